"""Other types for some tensors of a file, and tensors of a second one."""

import gguf
import numpy as np
import pytest
from gguf_importance import Importance, Sums
from gguf_mix import main
from gguf_quantize import quantize, type_of

from shared.gguf_index import GgufIndex


@pytest.fixture
def model(gguf_factory, tmp_path):
    return gguf_factory.hy3_model(mtp=True).write(tmp_path / "model.gguf")


def _raw(path):
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def _keys(path):
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}


def test_without_a_rule_it_is_a_copy(model, tmp_path):
    out = tmp_path / "out.gguf"
    assert main([str(model), "-o", str(out)]) == 0
    assert _raw(out) == _raw(model)
    before = _keys(model)
    assert before.pop("general.alignment") == 32
    assert _keys(out) == before


def test_only_what_a_rule_names_changes(model, tmp_path):
    out = tmp_path / "out.gguf"
    options = ["--type", "blk.1.*_exps=Q4_K", "--type", "output=F16"]
    assert main([str(model), "-o", str(out), *options]) == 0
    before, after = _raw(model), _raw(out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"blk.1.ffn_{p}_exps.weight" for p in ("gate", "up", "down")} | {
        "output.weight"
    }
    for name in changed:
        was, now = (gguf.GGMLQuantizationType[raw[name][0]] for raw in (before, after))
        shape = GgufIndex.open(model).tensors[name].shape
        bytes_of = [np.frombuffer(raw[name][1], np.uint8) for raw in (before, after)]
        rows = int(np.prod(shape[1:]))
        old, new = (
            gguf.quants.dequantize(data.reshape(rows, -1), kind)
            for data, kind in zip(bytes_of, (was, now), strict=True)
        )
        assert np.sqrt(np.mean((old - new) ** 2)) < 0.1 * old.std(), name


def test_each_expert_is_quantised_by_its_own_importance(model, tmp_path):
    name = "blk.1.ffn_down_exps.weight"
    tensor = GgufIndex.open(model).tensors[name]
    columns, rows, experts = tensor.shape
    rng = np.random.default_rng(0)
    sums = Sums(
        rng.uniform(0.01, 100, (experts, columns)).astype(np.float32),
        np.arange(experts, dtype=np.float32),  # none reached expert 0
    )
    matrix = Importance(tmp_path / "m.gguf", ("text",), 3, 512, {name: sums})
    matrix.write()
    out = tmp_path / "out.gguf"
    options = ["--type", "blk.1.*down_exps=IQ2_XXS", "--imatrix", str(matrix.path)]
    assert main([str(model), "-o", str(out), *options]) == 0
    before = next(t for t in gguf.GGUFReader(model).tensors if t.name == name)
    weights = gguf.quants.dequantize(before.data, before.tensor_type).reshape(
        experts, rows, columns
    )
    means = sums.in_sum2[1:] / sums.counts[1:, None]
    expected = [
        quantize(weights[expert], type_of("IQ2_XXS"), own)
        for expert, own in enumerate([means.mean(0), *means])
    ]
    assert _raw(out)[name] == ("IQ2_XXS", np.stack(expected).tobytes())
    assert _keys(out)["quantize.imatrix.chunks_count"] == 3


def test_low_bits_without_importance_are_refused(model, tmp_path, capsys):
    model = str(model)
    out = tmp_path / "out.gguf"
    assert main([model, "-o", str(out), "--type", "*_exps=IQ2_XS"]) == 1
    error = capsys.readouterr().err
    assert "demands an importance matrix" in error
    assert "gguf_imatrix" in error
    assert not out.exists()
    options = ["--type", "*_exps=IQ2_XS", "--fallback", "Q3_K"]
    assert main([model, "-o", str(out), *options]) == 0
    assert "no importance matrix for IQ2_XS: Q3_K" in capsys.readouterr().err


def test_mtp_experts_get_the_type_that_is_said(model, tmp_path):
    out = tmp_path / "out.gguf"
    for option, expected in (([], "Q2_K"), (["--mtp-experts", "Q5_K"], "Q5_K")):
        options = ["--type", "*_exps=Q4_K", "--force", *option]
        assert main([str(model), "-o", str(out), *options]) == 0
        raw = _raw(out)
        assert raw["blk.3.ffn_up_exps.weight"][0] == expected
        assert raw["blk.2.ffn_up_exps.weight"][0] == "Q4_K"


def test_splicing_takes_the_other_files_bytes(gguf_factory, model, tmp_path):
    other = gguf_factory.hy3_model(mtp=True, seed=5, expert_types=(12, 12, 12))
    path = other.write(tmp_path / "other.gguf", shard_tensors=20)
    out = tmp_path / "out.gguf"
    options = ["--splice", str(path), "--take", "blk.{2,3}.*_exps", "--type", "*_exps=Q8_0"]
    assert main([str(model), "-o", str(out), *options]) == 0
    raw, before = _raw(out), _raw(model)
    for layer, part in ((2, "up"), (3, "down")):
        name = f"blk.{layer}.ffn_{part}_exps.weight"
        assert raw[name] == ("Q4_K", other.tensors[name].data.tobytes())
    assert raw["blk.1.ffn_up_exps.weight"][0] == "Q8_0"
    assert raw["blk.2.attn_q.weight"] == before["blk.2.attn_q.weight"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--take", "*"], "belong together"),
        (["--splice", "{other}"], "belong together"),
        (["--splice", "{other}", "--take", "blk.9.*"], "names no tensor"),
        (["--splice", "{other}", "--take", "*_exps"], "one and the same model"),
    ],
)
def test_splices_that_do_not_fit(gguf_factory, model, tmp_path, capsys, options, message):
    other = gguf_factory.hy3_model(mtp=True, n_experts=4).write(tmp_path / "other.gguf")
    words = [word.format(other=other) for word in options]
    assert main([str(model), "-o", str(tmp_path / "out.gguf"), *words]) == 1
    assert message in capsys.readouterr().err


def test_another_choice_of_tensors_is_not_gone_on_with(gguf_factory, model, tmp_path, capsys):
    """Same header, same sources: only what is taken is another."""
    other = gguf_factory.hy3_model(mtp=True, seed=9).write(tmp_path / "other.gguf")
    out, sources = tmp_path / "out.gguf", [str(model), "--splice", str(other)]
    gone_on = [*sources, "-o", str(out), "--take", "token_embd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf_writing.ResumableFile.finish", lambda _file: _interrupted())
        assert main(gone_on) == 130
    assert main([*sources, "-o", str(out), "--take", "output_norm"]) == 1
    assert "--restart" in capsys.readouterr().err
    assert main(gone_on) == 0


def _interrupted():
    raise KeyboardInterrupt


def test_a_directory_that_is_not_there(model, tmp_path, capsys):
    assert main([str(model), "-o", str(tmp_path / "no" / "out.gguf")]) == 1
    assert "is no directory" in capsys.readouterr().err


def test_a_split_model_becomes_one_file(gguf_factory, tmp_path):
    whole = gguf_factory.hy3_model()
    first = whole.write(tmp_path / "split.gguf", shard_tensors=10)
    out = tmp_path / "out.gguf"
    assert main([str(first), "-o", str(out)]) == 0
    assert {name: data for name, (_, data) in _raw(out).items()} == {
        name: tensor.data.tobytes() for name, tensor in whole.tensors.items()
    }
    assert not any(key.startswith("split.") for key in _keys(out))


def test_files_are_not_overwritten_unasked(model, capsys):
    assert main([str(model), "-o", str(model)]) == 1
    assert "one of the sources" in capsys.readouterr().err
    other = model.with_name("there.gguf")
    other.write_bytes(b"mine")
    assert main([str(model), "-o", str(other)]) == 1
    assert "--force" in capsys.readouterr().err
    assert other.read_bytes() == b"mine"


def test_a_dry_run_writes_nothing(model, capsys):
    out = model.with_name("out.gguf")
    assert main([str(model), "-o", str(out), "--dry-run", "--type", "*_exps=Q4_K"]) == 0
    shown = capsys.readouterr().out
    assert "was IQ2_XXS; MTP expert" in shown
    assert [path.name for path in model.parent.iterdir()] == [model.name]
