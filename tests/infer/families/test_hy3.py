"""The Hy3 forward pass against logits of independent implementations, and its dialects."""

import numpy as np
import pytest

from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.reference_kernels import ReferenceKernels
from shared.errors import MalformedModel, UnsupportedModel

ORACLES = ("iq1_m", "iq2_xxs", "iq3_xxs", "mtp-udmix", "mxfp4_moe", "q2_k", "q4_k_m", "q8_0")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def _reference(_bounds) -> ReferenceKernels:
    return ReferenceKernels()


@pytest.mark.parametrize("kernels", [GgmlKernels, _reference], ids=["ggml", "torch"])
@pytest.mark.parametrize("name", ORACLES)
def test_exact_logits_are_the_oracles(shared_dir, local_model, name, kernels):
    oracle = shared_dir / "oracle"
    key = "udmix" if name == "mtp-udmix" else name
    expected = np.load(oracle / "hy3-quant-logits.npz")[f"{key}.dequant"]
    ids = np.load(oracle / "hy3.npz")["ids"].tolist()
    logits = local_model(oracle / f"hy3-{name}.gguf", kernels).logits(ids)
    assert np.abs(logits - expected).max() < 1e-4
    assert (logits.argmax(1) == expected.argmax(1)).all()


def test_the_router_is_the_oracles(shared_dir, local_model):
    """On the first router's input, which quantisation has touched little in the Q8_0 file."""
    oracle = np.load(shared_dir / "oracle" / "hy3.npz")
    taken = {}
    local_model(shared_dir / "oracle" / "hy3-q8_0.gguf", GgmlKernels).logits(
        oracle["ids"].tolist(), tap=lambda name, values: taken.update({name: values.numpy()})
    )
    chosen = np.sort(taken["router_idx.1"], 1)
    agreeing = (chosen == np.sort(oracle["router_idx.1"], 1)).all(1)
    assert agreeing.mean() > 0.9
    weights = np.sort(taken["router_w.1"][agreeing], 1)
    assert np.abs(weights - np.sort(oracle["router_w.1"][agreeing], 1)).max() < 0.05
    assert np.allclose(taken["router_w.1"].sum(1), 2.826, atol=1e-5)
    assert set(taken) >= {"hidden.0", "hidden.4", "attn_out.3", "router_logits.3"}


@pytest.fixture
def tiny(gguf_factory):
    return gguf_factory.hy3_model()


def test_both_dialects_are_the_same_model(tiny, local_model, tmp_path):
    expected = local_model(tiny.write(tmp_path / "a.gguf"), GgmlKernels).logits(IDS)
    for key in [key for key in tiny.metadata if key.startswith("hy_v3.")]:
        tiny.metadata[key.replace("hy_v3.", "hy-v3.")] = tiny.metadata.pop(key)
    for name in [name for name in tiny.tensors if "exp_probs_b" in name]:
        stem = name.removesuffix(".bias")
        other = stem if name.endswith(".bias") else f"{stem}.bias"
        tiny.tensors[other] = tiny.tensors.pop(name)
    tiny.architecture = "hy-v3"
    dialect = local_model(tiny.write(tmp_path / "b.gguf"), GgmlKernels).logits(IDS)
    assert (dialect == expected).all()


def test_the_embedding_serves_as_output_where_there_is_none(tiny, local_model, tmp_path):
    tiny.tensors["output.weight"] = tiny.tensors["token_embd.weight"]
    expected = local_model(tiny.write(tmp_path / "a.gguf"), GgmlKernels).logits(IDS)
    del tiny.tensors["output.weight"]
    tied = local_model(tiny.write(tmp_path / "b.gguf"), GgmlKernels).logits(IDS)
    assert (tied == expected).all()


@pytest.mark.parametrize("exact", [True, False])
def test_bits_depend_on_neither_waves_nor_chunks(tiny, local_model, tmp_path, exact):
    path = tiny.write(tmp_path / "a.gguf")
    whole = local_model(path, GgmlKernels, exact=exact)
    expected = whole.logits(IDS)
    waves = local_model(path, GgmlKernels, exact=exact, wave_experts=2)
    assert (waves.logits(IDS) == expected).all()
    assert max(waves.read_counts.values()) > max(whole.read_counts.values())
    for chunk in (1, 3):
        chunked = local_model(path, GgmlKernels, exact=exact, chunk=chunk)
        assert (chunked.logits(IDS) == expected).all()


@pytest.mark.parametrize(
    ("break_it", "error", "words"),
    [
        (lambda m: m.tensors.pop("blk.1.attn_q_norm.weight"), MalformedModel, "attn_q_norm"),
        (lambda m: m.tensors.pop("token_embd.weight"), MalformedModel, "token_embd"),
        (lambda m: m.metadata.pop("hy_v3.rope.freq_base"), MalformedModel, "rope.freq_base"),
        (lambda m: m.metadata.update({"hy_v3.attention.head_count_kv": 3}), MalformedModel, "head"),
        (lambda m: m.metadata.update({"hy_v3.embedding_length": 512}), MalformedModel, "shape"),
        (lambda m: m.metadata.update({"hy_v3.expert_gating_func": 1}), UnsupportedModel, "gating"),
    ],
)
def test_a_broken_file_is_refused_by_name(tiny, local_model, tmp_path, break_it, error, words):
    break_it(tiny)
    with pytest.raises(error, match=words) as refusal:
        local_model(tiny.write(tmp_path / "broken.gguf"), GgmlKernels)
    assert refusal.value.remedy
