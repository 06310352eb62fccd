"""Importance matrices: what is recorded, and the file."""

import gguf
import numpy as np
import pytest
from gguf_imatrix import main
from gguf_importance import Importance, Sums
from gguf_recording import Recorder

from infer.config import ModelConfig
from infer.session import Session
from shared.errors import MalformedModel

EPS = 1e-5


@pytest.fixture(scope="module")
def model(gguf_factory, tmp_path_factory):
    tiny = gguf_factory.hy3_model(mtp=True, expert_types=(8, 8, 8))
    path = tiny.write(tmp_path_factory.mktemp("imatrix") / "model.gguf")
    return tiny, path


def _norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _silu(x):
    return x / (1 + np.exp(-x))


def test_sums_are_those_of_what_went_into_each_matrix(model):
    tiny, path = model
    taken = {}
    recorder = Recorder()
    ids = [0, 5, 40, 41, 200, 7, 7, 99]
    config = ModelConfig(model=path, exact=True, host_cache="64M", chunk=3, ctx=64)
    with Session(config, recorder) as session:
        logits = session.engine.logits(
            ids, lambda name, values: taken.setdefault(name, []).append(values.numpy().copy())
        )
    with Session(config) as session:
        plain = session.engine.logits(ids)
    assert np.abs(logits - plain).max() < 1e-4
    taken = {name: np.concatenate(parts).astype(np.float64) for name, parts in taken.items()}
    weights = {name: tensor.weights().astype(np.float64) for name, tensor in tiny.tensors.items()}
    sums = recorder.sums

    attention = _norm(taken["hidden.1"], weights["blk.1.attn_norm.weight"])
    after = taken["hidden.1"] + taken["attn_out.1"]
    x = _norm(after, weights["blk.1.ffn_norm.weight"])
    expected = {
        "blk.1.attn_q.weight": attention,
        "blk.1.ffn_gate_inp.weight": x,
        "blk.1.ffn_up_shexp.weight": x,
    }
    for name, values in expected.items():
        assert sums[name].counts.tolist() == [len(ids)]
        np.testing.assert_allclose(sums[name].in_sum2[0], (values**2).sum(0), rtol=1e-3)

    chosen = taken["router_idx.1"].astype(int)
    gates, ups = (weights[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    for expert in range(8):
        mine = x[(chosen == expert).any(1)]
        hidden = _silu(mine @ gates[expert].T) * (mine @ ups[expert].T)
        for part, values in (("gate", mine), ("up", mine), ("down", hidden)):
            found = sums[f"blk.1.ffn_{part}_exps.weight"]
            assert found.counts[expert] == len(mine)
            np.testing.assert_allclose(
                found.in_sum2[expert], (values**2).sum(0), rtol=1e-3, atol=1e-8
            )
    assert not any(name.startswith("blk.3.") for name in sums)  # the MTP block


def test_the_command_writes_what_llama_cpp_reads(model, tmp_path, capsys):
    _, path = model
    text = tmp_path / "text.txt"
    text.write_text("the man and the sea " * 12)
    out = tmp_path / "out.gguf"
    words = ["--model", str(path), "--text", str(text), "-o", str(out), "--window", "16"]
    assert main([*words, "--dry-run"]) == 0
    counted = capsys.readouterr().out
    assert not out.exists()
    assert main([*words, "--windows", "3", "--host-cache", "64M"]) == 0
    reader = gguf.GGUFReader(out)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.type"] == "imatrix"
    assert keys["imatrix.datasets"] == ["text.txt"]
    assert (keys["imatrix.chunk_count"], keys["imatrix.chunk_size"]) == (3, 16)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.2.ffn_down_exps.weight.in_sum2"] == [256, 8]
    assert shapes["blk.2.ffn_down_exps.weight.counts"] == [1, 8]
    counts = {t.name: t.data for t in reader.tensors if t.name.endswith(".counts")}
    assert counts["blk.0.attn_q.weight.counts"].tolist() == [[3 * 16]]
    routed = [counts[f"blk.{layer}.ffn_down_exps.weight.counts"].sum() for layer in (1, 2)]
    assert routed[0] == routed[1] > 3 * 16, "all tokens, in the last layer too"
    assert "output.weight.in_sum2" not in shapes
    windows, tokens = (int(word) for word in counted.split() if word.isdigit())
    assert tokens == windows * 16


def test_a_file_comes_back_as_it_was(tmp_path):
    sums = Sums(np.arange(8, dtype=np.float32).reshape(2, 4), np.array([2, 0], np.float32))
    written = Importance(tmp_path / "m.gguf", ("a", "b"), 5, 512, {"x.weight": sums})
    written.write()
    read = Importance.open(tmp_path / "m.gguf")
    assert (read.datasets, read.chunk_count, read.chunk_size) == (("a", "b"), 5, 512)
    np.testing.assert_array_equal(read.sums["x.weight"].in_sum2, sums.in_sum2)
    assert list(read.unseen()) == [("x.weight", 1, 2)]
    np.testing.assert_array_equal(
        read.columns("x.weight", 4, 2), [[0, 0.5, 1, 1.5], [0, 0.5, 1, 1.5]]
    )
    assert read.columns("y.weight", 4, 2) is None
    with pytest.raises(MalformedModel, match="of this model"):
        read.columns("x.weight", 8, 2)


def test_a_model_is_no_importance_matrix(model):
    with pytest.raises(MalformedModel, match="no importance matrix"):
        Importance.open(model[1])


def test_a_text_that_is_none(model, tmp_path, capsys):
    words = ["--model", str(model[1]), "-o", str(tmp_path / "o.gguf"), "--dry-run"]
    assert main([*words, "--text", str(tmp_path / "missing.txt")]) == 1
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "empty.txt").write_text("")
    assert main([*words, "--text", str(tmp_path / "empty.txt")]) == 1
    assert "no token" in capsys.readouterr().err
