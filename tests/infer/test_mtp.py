"""The MTP block against logits of independent implementations, and against its formula."""

import gguf
import numpy as np
import pytest
import torch

from infer.commands.measure import mtp_logits
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.reference_kernels import ReferenceKernels
from shared.daemon_options import OWN_MTP
from shared.errors import UnsupportedModel

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def _reference(_bounds) -> ReferenceKernels:
    return ReferenceKernels()


def rows(model, ids):
    """Logits of the trunk and of the block, and the trunk's last hidden states."""
    taken = []
    last = f"hidden.{model.shape.n_layers}"
    logits = model.logits(ids, lambda name, x: taken.append(x.numpy()) if name == last else None)
    hidden = np.concatenate(taken)
    return logits, mtp_logits(model, ids, hidden), hidden


@pytest.mark.parametrize(
    ("kernels", "chunk"),
    [(GgmlKernels, 48), (GgmlKernels, 5), (GgmlKernels, 1), (_reference, 48)],
    ids=["ggml", "ggml-5", "ggml-1", "torch"],
)
@pytest.mark.parametrize("family", ["hy3", "glm"])
def test_exact_logits_are_the_oracles(shared_dir, local_model, family, chunk, kernels):
    oracle = shared_dir / "oracle"
    expected = np.load(oracle / f"{family}-quant-logits.npz")
    ids = np.load(oracle / f"{family}.npz")["ids"].ravel().tolist()
    path = oracle / f"{family}-mtp-udmix.gguf"
    model = local_model(path, kernels, mtp=OWN_MTP, chunk=chunk)
    logits, guesses, _ = rows(model, ids)
    assert np.abs(logits - expected["udmix.dequant"]).max() < 1e-4
    assert np.abs(guesses - expected["udmix.mtp_dequant"]).max() < 1e-4


@pytest.fixture
def tiny(gguf_factory):
    """Its MTP experts are of a size of their own, as in real files."""
    q2 = [gguf.GGMLQuantizationType.Q2_K] * 3
    return gguf_factory.hy3_model(mtp=True, layer_expert_types={3: q2})


def test_the_block_is_a_layer_on_the_joined_input(tiny, gguf_factory, local_model, tmp_path):
    """A model whose only layer is the block, its embedding the joined input, computes the same."""
    weights = {name: tensor.weights() for name, tensor in tiny.tensors.items()}
    model = local_model(tiny.write(tmp_path / "a.gguf"), _reference, mtp=OWN_MTP)
    _, guesses, hidden = rows(model, IDS)

    def norm(x, name):
        scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
        return x * scale * weights[f"blk.3.nextn.{name}.weight"].reshape(-1)

    embedded = norm(weights["token_embd.weight"][IDS[1:]], "enorm")
    joined = np.concatenate((embedded, norm(hidden[:-1], "hnorm")), 1)
    inputs = joined @ weights["blk.3.nextn.eh_proj.weight"].T.astype(np.float64)

    alone = gguf_factory.hy3_model(n_layers=1, dense_layers=0, vocab_count=384)
    for name in [name for name in alone.tensors if name.startswith("blk.0.")]:
        alone.tensors[name] = tiny.tensors[name.replace("blk.0.", "blk.3.")]
    table = np.zeros((384, 256))
    table[: len(inputs)] = inputs
    alone.tensors["token_embd.weight"] = gguf_factory.float_tensor(table)
    alone.tensors["output.weight"] = tiny.tensors["output.weight"]
    alone.tensors["output_norm.weight"] = tiny.tensors["blk.3.nextn.shared_head_norm.weight"]
    expected = local_model(alone.write(tmp_path / "b.gguf"), _reference).logits(
        list(range(len(inputs)))
    )
    assert np.abs(guesses - expected).max() < 1e-4


def test_own_embedding_output_and_norm_replace_the_trunks(tiny, local_model, tmp_path):
    """Taken from the trunk where they are missing, so copies of the trunk's change nothing."""
    del tiny.tensors["blk.3.nextn.shared_head_norm.weight"]
    _, expected, _ = rows(
        local_model(tiny.write(tmp_path / "a.gguf"), GgmlKernels, mtp="model"), IDS
    )
    for own, trunks in (
        ("embed_tokens", "token_embd"),
        ("shared_head_head", "output"),
        ("shared_head_norm", "output_norm"),
    ):
        tiny.tensors[f"blk.3.nextn.{own}.weight"] = tiny.tensors[f"{trunks}.weight"]
    path = tiny.write(tmp_path / "b.gguf")
    _, copied, _ = rows(local_model(path, GgmlKernels, mtp=OWN_MTP), IDS)
    assert (copied == expected).all()
    for own in ("embed_tokens", "shared_head_head", "shared_head_norm"):
        name = f"blk.3.nextn.{own}.weight"
        kept = tiny.tensors[name]
        tiny.tensors[name] = type(kept)(kept.shape, kept.type_id, kept.data[::-1].copy())
        if kept.data.shape[0] == 1:
            tiny.tensors[name].data = (kept.data.view(np.float32) * 2).view(np.uint8)
        path = tiny.write(tmp_path / f"{own}.gguf")
        _, other, _ = rows(local_model(path, GgmlKernels, mtp=OWN_MTP), IDS)
        assert (other != expected).any(), own
        tiny.tensors[name] = kept


def test_a_file_of_its_own_serves_as_well(tiny, gguf_factory, local_model, tmp_path):
    whole = tiny.write(tmp_path / "whole.gguf")
    trunk, expected, _ = rows(local_model(whole, GgmlKernels, mtp=OWN_MTP), IDS)
    block = {name: tensor for name, tensor in tiny.tensors.items() if name.startswith("blk.3.")}
    renamed = {name.replace("blk.3.", "blk.0."): tensor for name, tensor in block.items()}
    apart = gguf_factory.TinyModel("hy_v3", {"hy_v3.block_count": 1}, renamed)
    for name in block:
        del tiny.tensors[name]
    without = tiny.write(tmp_path / "without.gguf")
    with pytest.raises(UnsupportedModel, match="no MTP block"):
        local_model(without, GgmlKernels, mtp=OWN_MTP)
    apart_path = apart.write(tmp_path / "mtp.gguf")
    logits, guesses, _ = rows(local_model(without, GgmlKernels, mtp=str(apart_path)), IDS)
    assert (logits == trunk).all()
    assert (guesses == expected).all()


def test_the_trunk_is_the_same_with_and_without(tiny, local_model, tmp_path):
    path = tiny.write(tmp_path / "a.gguf")
    with_block, without = (
        local_model(path, GgmlKernels, mtp=OWN_MTP),
        local_model(path, GgmlKernels),
    )
    assert with_block.experts.n_layers == without.experts.n_layers + 1
    assert without.mtp is None
    assert (with_block.logits(IDS) == without.logits(IDS)).all()


@pytest.mark.parametrize("exact", [True, False])
def test_bits_depend_on_neither_waves_nor_chunks(tiny, local_model, tmp_path, exact):
    path = tiny.write(tmp_path / "a.gguf")
    _, expected, _ = rows(local_model(path, GgmlKernels, exact=exact, mtp=OWN_MTP), IDS)
    model = local_model(path, GgmlKernels, exact=exact, mtp=OWN_MTP, chunk=2, wave_experts=2)
    _, chunked, _ = rows(model, IDS)
    assert (chunked == expected).all()
    assert torch.isfinite(torch.from_numpy(chunked)).all()


def test_an_indexer_of_its_own_is_an_option(shared_dir, local_model):
    """It selects everything as long as that is no more than its top-k, 8 here."""
    path = shared_dir / "oracle" / "glm-mtp-udmix.gguf"
    ids = np.load(shared_dir / "oracle" / "glm.npz")["ids"].ravel().tolist()
    dense, indexed = (
        rows(local_model(path, GgmlKernels, mtp=OWN_MTP, mtp_indexer=own), ids)[1]
        for own in (False, True)
    )
    assert (indexed[:8] == dense[:8]).all()
    assert (indexed[8:] != dense[8:]).any(axis=1).all()


def test_a_block_without_an_indexer_cannot_use_one(tiny, local_model, tmp_path):
    with pytest.raises(UnsupportedModel, match="has no indexer"):
        local_model(tiny.write(tmp_path / "a.gguf"), GgmlKernels, mtp=OWN_MTP, mtp_indexer=True)
