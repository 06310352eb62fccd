"""The GLM forward pass against logits of independent implementations, and its dialects."""

from functools import partial

import gguf_glm
import numpy as np
import pytest
from gguf_factory import float_tensor

from infer.blocks import mla_expanded
from infer.commands.inspect import describe
from infer.families.glm_shape import GlmShape
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.reference_kernels import ReferenceKernels
from shared.errors import MalformedModel, UnsupportedModel
from shared.gguf_index import GgufIndex

ORACLES = ("iq2_xxs", "iq3_xxs", "mtp-udmix", "q2_k")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def _reference(_bounds) -> ReferenceKernels:
    return ReferenceKernels()


@pytest.fixture(scope="module")
def ids(shared_dir) -> list[int]:
    return np.load(shared_dir / "oracle" / "glm.npz")["ids"].tolist()


def _expected(shared_dir, name) -> np.ndarray:
    key = name.removeprefix("mtp-")
    return np.load(shared_dir / "oracle" / "glm-quant-logits.npz")[f"{key}.dequant"]


@pytest.mark.parametrize("kernels", [GgmlKernels, _reference], ids=["ggml", "torch"])
@pytest.mark.parametrize("name", ORACLES)
def test_exact_logits_are_the_oracles(shared_dir, local_model, ids, name, kernels):
    expected = _expected(shared_dir, name)
    logits = local_model(shared_dir / "oracle" / f"glm-{name}.gguf", kernels).logits(ids)
    assert np.abs(logits - expected).max() < 1e-4
    assert (logits.argmax(1) == expected.argmax(1)).all()


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_have_the_bits_of_the_whole(shared_dir, local_model, ids, chunk):
    path = shared_dir / "oracle" / "glm-iq2_xxs.gguf"
    whole = local_model(path, GgmlKernels).logits(ids)
    parts = local_model(path, GgmlKernels, chunk=chunk, wave_experts=3).logits(ids)
    assert np.array_equal(parts, whole)


@pytest.mark.parametrize("name", ORACLES)
def test_an_expanded_first_chunk_has_the_oracles_logits(
    shared_dir, local_model, ids, monkeypatch, name
):
    calls = []

    class Counted(mla_expanded.ExpandedAttention):
        def __call__(self, *arguments):
            calls.append(arguments)
            return super().__call__(*arguments)

    monkeypatch.setattr(mla_expanded, "EXPANDED_TOKENS", 5)
    monkeypatch.setattr("infer.blocks.mla.ExpandedAttention", Counted)
    path = shared_dir / "oracle" / f"glm-{name}.gguf"
    logits = local_model(path, GgmlKernels, chunk=8).logits(ids)
    assert len(calls) == 5, "once a layer: later chunks read what is selected"
    assert np.abs(logits - _expected(shared_dir, name)).max() < 1e-4


def test_the_default_arithmetic_differs_little(shared_dir, local_model, ids):
    """In the rows before the first one that chooses other experts or positions: random weights
    have near ties, and what follows one is another computation."""
    logits, choices = [], []
    for exact in (True, False):
        taken = {}
        kernels_of = partial(GgmlKernels, tiles=False)  # the same on every processor
        model = local_model(shared_dir / "oracle" / "glm-iq3_xxs.gguf", kernels_of, exact=exact)
        rows = model.logits(ids, tap=lambda name, x, taken=taken: taken.update({name: x.numpy()}))
        logits.append(_log_softmax(rows.astype(np.float64)))
        chosen = [x for name, x in taken.items() if name.startswith(("router_idx", "indexer"))]
        choices.append(np.concatenate([np.sort(x, axis=1) for x in chosen], axis=1))
    same = (choices[0] == choices[1]).all(1)
    first_other = int(same.argmin())
    assert first_other >= 3
    p, q = (x[:first_other] for x in logits)
    assert (np.exp(p) * (p - q)).sum(1).mean() < 0.005


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def test_the_selection_is_the_oracles_where_quantisation_has_touched_little(
    shared_dir, local_model, ids
):
    """Layer 0's first eight tokens see all; later ones differ by near ties at the most."""
    oracle = np.load(shared_dir / "oracle" / "glm.npz")
    taken = {}
    local_model(shared_dir / "oracle" / "glm-mtp-udmix.gguf", GgmlKernels).logits(
        ids, tap=lambda name, values: taken.update({name: values.numpy()})
    )
    assert {name for name in taken if "topk" in name} == {f"indexer_topk.{n}" for n in (0, 1, 3)}
    chosen, expected = taken["indexer_topk.0"], oracle["indexer_topk.0"][0]
    common = 0
    for position in range(len(ids)):
        ours, theirs = ({*row[row <= position]} for row in (chosen[position], expected[position]))
        assert len(ours) == len(theirs) == min(8, position + 1)
        common += len(ours & theirs)
    assert common > 0.9 * sum(min(8, position + 1) for position in range(len(ids)))


@pytest.fixture
def logits_of(local_model, tmp_path):
    """Writes a model and computes IDS: nothing else may depend on how the file says it."""

    def compute(model) -> np.ndarray:
        return local_model(model.write(tmp_path / "glm.gguf"), GgmlKernels).logits(IDS)

    return compute


def test_dialects_mean_the_same(logits_of):
    expected = logits_of(gguf_glm.glm_model())
    other = gguf_glm.glm_model(architecture="glm_moe_dsa", bias_name="exp_probs_b")
    del other.metadata["glm_moe_dsa.expert_gating_func"]
    assert np.array_equal(logits_of(other), expected)


def test_an_index_that_is_not_used_is_ignored(logits_of):
    model = gguf_glm.glm_model()
    expected = logits_of(model)
    everywhere = gguf_glm.glm_model(index_everywhere=True)
    ignored = {name for name in everywhere.tensors if name.startswith("blk.2.indexer")}
    assert len(ignored) == 5
    for name in ignored:
        model.tensors[name] = everywhere.tensors[name]
    assert np.array_equal(logits_of(model), expected)


def test_unsplit_matrices_mean_the_same(logits_of):
    model = gguf_glm.glm_model()
    expected = logits_of(model)
    for layer in range(4):
        key, value = (
            model.tensors.pop(f"blk.{layer}.attn_{part}_b.weight").weights() for part in "kv"
        )
        both = np.concatenate((key.transpose(0, 2, 1), value), axis=1)  # [heads, rows, kv_lora]
        model.tensors[f"blk.{layer}.attn_kv_b.weight"] = float_tensor(both.reshape(-1, 256))
    for kind, length in (("key", 96), ("value", 64)):
        del model.metadata[f"glm-dsa.attention.{kind}_length_mla"]
        model.metadata[f"glm-dsa.attention.{kind}_length"] = length
    np.testing.assert_allclose(logits_of(model), expected, rtol=0, atol=2e-5)


def _shape(tmp_path, **knobs) -> GlmShape:
    model = gguf_glm.glm_model(**knobs)
    return GlmShape.from_gguf(GgufIndex.open(model.write(tmp_path / "glm.gguf")))


def test_layers_with_an_index_where_the_file_does_not_say(tmp_path):
    assert _shape(tmp_path, index_layers=None).index_layers == (0, 1, 2, 3)
    many = _shape(tmp_path, index_layers=None, context=1 << 20, n_layers=12, n_experts=2)
    assert many.index_layers == (0, 1, 2, 6, 10)


def test_bytes_of_a_token(tmp_path):
    values = describe(GgufIndex.open(gguf_glm.glm_model().write(tmp_path / "glm.gguf")))
    assert values["family"] == "glm_dsa"
    assert values["kv_bytes_per_token"] == 2 * (4 * (256 + 32) + 3 * 64)


@pytest.mark.parametrize(
    ("break_it", "error", "words"),
    [
        (lambda m: m.tensors.pop("blk.1.attn_q_a.weight"), MalformedModel, "attn_q_a"),
        (lambda m: m.tensors.pop("blk.1.attn_k_b.weight"), MalformedModel, "attn_kv_b"),
        (lambda m: m.tensors.pop("blk.3.indexer.proj.weight"), MalformedModel, "indexer.proj"),
        (
            lambda m: m.metadata.pop("glm-dsa.attention.kv_lora_rank"),
            MalformedModel,
            "kv_lora_rank",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.rope.dimension_count": 96}),
            MalformedModel,
            "rotated",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.rope.dimension_count": 31}),
            MalformedModel,
            "odd",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.attention.indexer.types": [False] * 4}),
            MalformedModel,
            "first is true",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.attention.indexer.types": [True]}),
            MalformedModel,
            "each of 4 layers",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.rope.scaling.type": "yarn"}),
            UnsupportedModel,
            "yarn",
        ),
        (
            lambda m: m.metadata.update({"glm-dsa.expert_group_count": 4}),
            UnsupportedModel,
            "groups",
        ),
    ],
)
def test_a_broken_file_is_refused_by_name(local_model, tmp_path, break_it, error, words):
    model = gguf_glm.glm_model()
    break_it(model)
    with pytest.raises(error, match=words) as refusal:
        local_model(model.write(tmp_path / "broken.gguf"), GgmlKernels)
    assert refusal.value.remedy
