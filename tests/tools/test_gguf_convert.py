"""Checkpoints written by hand, converted, and read back with the gguf package."""

import io
import json

import gguf
import gguf_making
import numpy as np
import pytest
from checkpoint_factory import VOCAB, glm_checkpoint, hy3_checkpoint, write_tokenizer
from gguf_convert import main
from gguf_quantize import quantize

from infer.families import family_of
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex


def _values(path):
    """Every tensor of a file in float32, shaped as numpy has it."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = weights.reshape(tensor.shape[::-1])
    return found


def _convert(folder, out, *options):
    assert main([str(folder), "-o", str(out), *options]) == 0
    return _values(out)


def test_hy3_keeps_every_weight(tmp_path):
    weights = hy3_checkpoint(tmp_path / "hy3")
    found = _convert(tmp_path / "hy3", tmp_path / "out.gguf", "--type", "*=BF16")
    layer = "model.layers.1"
    pairs = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output.weight": weights["lm_head.weight"],
        "blk.0.ffn_down.weight": weights["model.layers.0.mlp.down_proj.weight"],
        "blk.1.attn_output.weight": weights[f"{layer}.self_attn.o_proj.weight"],
        "blk.1.attn_q_norm.weight": weights[f"{layer}.self_attn.q_norm.weight"],
        "blk.1.ffn_gate_inp.weight": weights[f"{layer}.mlp.router.gate.weight"],
        "blk.1.exp_probs_b": weights[f"{layer}.mlp.expert_bias"],
        "blk.1.ffn_up_shexp.weight": weights[f"{layer}.mlp.shared_mlp.up_proj.weight"],
        "blk.2.nextn.eh_proj.weight": weights["model.layers.2.eh_proj.weight"],
        "blk.2.nextn.shared_head_norm.weight": weights["model.layers.2.final_layernorm.weight"],
    }
    for part in ("gate", "up", "down"):
        pairs[f"blk.2.ffn_{part}_exps.weight"] = np.stack(
            [weights[f"model.layers.2.mlp.experts.{e}.{part}_proj.weight"] for e in range(4)]
        )
    for name, expected in pairs.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert sum(v.size for v in found.values()) == sum(v.size for v in weights.values())


def test_glm_splits_and_transposes_its_latent_projections(tmp_path):
    weights = glm_checkpoint(tmp_path / "glm")
    found = _convert(tmp_path / "glm", tmp_path / "out.gguf", "--type", "*=BF16")
    whole = weights["model.layers.1.self_attn.kv_b_proj.weight"].reshape(4, 64 + 48, 128)
    np.testing.assert_array_equal(found["blk.1.attn_k_b.weight"], whole[:, :64].transpose(0, 2, 1))
    np.testing.assert_array_equal(found["blk.1.attn_v_b.weight"], whole[:, 64:])
    fused = weights["model.layers.2.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(found["blk.2.ffn_gate_exps.weight"], fused[:, :256])
    np.testing.assert_array_equal(found["blk.2.ffn_up_exps.weight"], fused[:, 256:])
    assert "blk.1.indexer.proj.weight" not in found
    np.testing.assert_array_equal(
        found["blk.2.indexer.k_norm.bias"],
        weights["model.layers.2.self_attn.indexer.k_norm.bias"],
    )
    assert sum(v.size for v in found.values()) == sum(v.size for v in weights.values())


@pytest.mark.parametrize("make", [hy3_checkpoint, glm_checkpoint])
def test_the_family_knows_what_is_written(tmp_path, make):
    make(tmp_path / "model")
    assert main([str(tmp_path / "model"), "-o", str(tmp_path / "out.gguf")]) == 0
    index = GgufIndex.open(tmp_path / "out.gguf")
    shape = family_of(index).read_shape(index)
    assert (shape.width, shape.vocab_size, shape.context_length) == (256, VOCAB, 1024)
    experts = ExpertIndex.from_gguf(index)
    assert (experts.n_experts, experts.top_k) == (4, 2)
    types = {name: gguf.GGMLQuantizationType(t.type_id).name for name, t in index.tensors.items()}
    assert types["blk.1.ffn_up_exps.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.1.ffn_gate_inp.weight"] == "F32"


def test_the_tokenizer_is_the_folders(tmp_path):
    glm_checkpoint(tmp_path / "glm")
    expected = write_tokenizer(tmp_path / "glm")
    _convert(tmp_path / "glm", tmp_path / "out.gguf")
    keys = GgufIndex.open(tmp_path / "out.gguf").metadata
    assert keys["tokenizer.ggml.pre"] == "glm4"
    used = expected["tokenizer.ggml.token_type"].index(5)  # unused ones have other texts
    assert keys["tokenizer.ggml.tokens"][:used] == expected["tokenizer.ggml.tokens"][:used]
    assert keys["tokenizer.ggml.token_type"].tolist() == expected["tokenizer.ggml.token_type"]
    for key in ("tokenizer.ggml.merges", "tokenizer.chat_template"):
        assert keys[key] == expected[key]
    ids = {name: keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "eom")}
    assert ids == {"bos": 0, "eos": 1, "eot": 2, "eom": 3}


def test_the_mtp_block_can_be_left_out(tmp_path):
    hy3_checkpoint(tmp_path / "hy3")
    found = _convert(tmp_path / "hy3", tmp_path / "out.gguf", "--no-mtp")
    assert not any(name.startswith("blk.2.") for name in found)
    metadata = GgufIndex.open(tmp_path / "out.gguf").metadata
    assert metadata["hy_v3.block_count"] == 2
    assert "hy_v3.nextn_predict_layers" not in metadata


def test_a_tied_head_is_not_written(tmp_path):
    hy3_checkpoint(tmp_path / "hy3", tie_word_embeddings=True)
    found = _convert(tmp_path / "hy3", tmp_path / "out.gguf")
    assert "token_embd.weight" in found
    assert "output.weight" not in found


def test_nothing_is_written_on_a_dry_run(tmp_path, capsys):
    hy3_checkpoint(tmp_path / "hy3")
    out = tmp_path / "out.gguf"
    assert main([str(tmp_path / "hy3"), "-o", str(out), "--dry-run"]) == 0
    assert "blk.1.ffn_up_exps.weight" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["hy3"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"head_dim": 32}, "config.json demands"),
        ({"num_experts": 5}, "demands 5 columns"),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": 0}, "lacks the tensor"),
        ({"num_nextn_predict_layers": 0}, "that have no place"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"vocab_size": 300}, "demands 300 rows"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(tmp_path, capsys, changes, message):
    hy3_checkpoint(tmp_path / "hy3")
    path = tmp_path / "hy3" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert main([str(tmp_path / "hy3"), "-o", str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "out.gguf").exists()
    assert "Traceback" not in error


def test_weights_that_are_not_finite_are_refused(tmp_path, capsys):
    hy3_checkpoint(tmp_path / "hy3")
    path = tmp_path / "hy3" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\x80\x7f"  # infinity in BF16
    path.write_bytes(data)
    assert main([str(tmp_path / "hy3"), "-o", str(tmp_path / "out.gguf")]) == 1
    assert "not a finite number" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_an_interrupted_conversion_goes_on(tmp_path, capsys, monkeypatch):
    hy3_checkpoint(tmp_path / "hy3")
    straight, out = tmp_path / "straight.gguf", tmp_path / "out.gguf"
    assert main([str(tmp_path / "hy3"), "-o", str(straight), "--name", "x"]) == 0
    calls = iter(range(1000))

    def interrupted(*arguments):
        if next(calls) == 12:
            raise KeyboardInterrupt
        return quantize(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_making, "quantize", interrupted)
        assert main([str(tmp_path / "hy3"), "-o", str(out), "--name", "x"]) == 130
    assert not out.exists()
    capsys.readouterr()
    assert main([str(tmp_path / "hy3"), "-o", str(out), "--name", "x"]) == 0
    assert "going on after" in capsys.readouterr().err
    assert out.read_bytes() == straight.read_bytes()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [_Terminal, io.StringIO])
def test_progress_is_for_terminals(tmp_path, monkeypatch, stream):
    hy3_checkpoint(tmp_path / "hy3")
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(gguf_making, "_SHOW_EVERY_S", 0)
    assert main([str(tmp_path / "hy3"), "-o", str(tmp_path / "out.gguf")]) == 0
    assert ("MB/s" in written.getvalue()) == written.isatty()
    assert ("\x1b" in written.getvalue()) == written.isatty()
    assert written.getvalue().endswith(")\n")
