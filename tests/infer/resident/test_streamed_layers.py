"""A model whose layers are copied in their turn: the bits of one that lies in place."""

from pathlib import Path
from types import SimpleNamespace

import gguf_glm
import numpy as np
import pytest
import torch
from fake_copies import CopiesAtOnce

from infer.config import ModelConfig
from infer.kernels.ggml_cpu import GgmlKernels
from infer.resident.copy_lane import joined, pin
from infer.resident.streamed_layers import StreamedLayers
from infer.resident.weights import Weights
from infer.session import Session
from shared.errors import ConfigError
from shared.resident import ResidentLayout
from shared.streamed import kept_tensors, streamable_layers

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-hy3-iq2mix.gguf"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
# Long enough for matrices to be dequantised on a GPU.
PROMPT, DECODED = [20 + 7 * n % 300 for n in range(200)], list(range(40, 60))


class MemoryLane(CopiesAtOnce):
    """Plain memory that computes at once. Copies are made at once, or as late as may be: when
    somebody waits for one of them. It is its own streams and events."""

    def __init__(self, buffer_bytes, late):
        super().__init__(buffer_bytes, filled=0xFF)
        self._late = late
        self._waiting = []
        self.copied_bytes = 0

    def copy(self, copy):
        self.copied_bytes += copy.size_bytes
        self._waiting.append(copy)
        if not self._late:
            self.wait_event(self)

    def wait_event(self, _event):
        for copy in self._waiting:
            super().copy(copy)
        self._waiting.clear()


@pytest.fixture
def streamed_model(local_model):
    class StreamedModel(local_model):
        def __init__(self, path, late, **options):
            self._late = late
            super().__init__(path, GgmlKernels, **options)
            self.model.turns = self.streamed

        def _weights(self, layout, region):
            layouts = streamable_layers(self.index)
            self.lane = MemoryLane(max(p.total_bytes for p in layouts.values()), self._late)
            self.streamed = StreamedLayers(layouts, layout, region, self.lane)
            names = {tensor.name for tensor in kept_tensors(self.index, layouts)}
            kept = tuple(placed for placed in layout.tensors if placed.tensor.name in names)
            weights = Weights(
                self.index.paths[0],
                ResidentLayout(kept, layout.total_bytes),
                region,
                self,
                self.device,
            )
            for layer, copied in layouts.items():
                weights.add(copied, self.streamed.addresses[layer])
            return weights

    return StreamedModel


@pytest.fixture(params=["demo", "glm-mtp-udmix", "hy3-iq2_xxs"])
def model_path(request):
    if request.param == "demo":
        return DEMO
    return request.getfixturevalue("shared_dir") / "oracle" / f"{request.param}.gguf"


def copied_bytes(layout) -> int:
    return sum(placed.tensor.byte_count for placed in layout.tensors)


@pytest.mark.parametrize("late", [False, True], ids=["copied at once", "copied late"])
@pytest.mark.parametrize("exact", [False, True])
def test_streamed_layers_change_no_bit(local_model, streamed_model, model_path, exact, late):
    expected = local_model(model_path, GgmlKernels, exact=exact).logits(IDS)
    model = streamed_model(model_path, late, exact=exact, chunk=5)
    assert np.array_equal(model.logits(IDS), expected)
    a_pass = sum(copied_bytes(layout) for layout in model.streamed.layouts.values())
    assert model.lane.copied_bytes > 2 * a_pass, "three chunks, but for what a buffer keeps"


def cut(name, _values):
    """A tap that ends a pass in the middle."""
    if name == "hidden.4":
        raise InterruptedError


def test_after_a_pass_that_was_cut_short_too(local_model, streamed_model):
    expected = local_model(DEMO, GgmlKernels).logits(IDS)
    model = streamed_model(DEMO, late=True)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            model.logits(IDS, cut)
    assert np.array_equal(model.logits(IDS), expected)


def test_matrices_that_take_turns_cannot_be_told_apart_by_address(streamed_model):
    model = streamed_model(DEMO, late=False)
    layouts = model.streamed.layouts
    weights = Weights(DEMO, layouts[1], model.streamed.addresses[1], None, model.device)
    assert len(weights.names_by_address()) == len(layouts[1].tensors)
    weights.add(layouts[3], model.streamed.addresses[3])
    with pytest.raises(ConfigError, match="--device cpu"):
        weights.names_by_address()


def test_memory_that_is_not_pinned_is_told_of_once(caplog):
    def register(address, _size_bytes, flags):
        assert flags == 8, "CU_MEMHOSTREGISTER_READ_ONLY"
        return (address > 20,)

    driver = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuMemHostRegister=register)
    assert pin(driver, [(0, 8), (16, 8)]) == [0, 16]
    assert not caplog.messages
    assert pin(driver, [(0, 8), (30, 8), (40, 8)]) == [0]
    assert len(caplog.messages) == 1


def test_stretches_that_follow_each_other_are_pinned_as_one():
    assert joined([(0, 8), (8, 4), (16, 4), (20, 2), (30, 1)]) == [(0, 12), (16, 6), (30, 1)]
    assert joined([]) == []


def rows_of(session: Session, tap) -> np.ndarray:
    """Logits of a prompt and of tokens given one at a time, after a pass that was cut short; with
    a tap the engine makes the calls one by one."""
    engine = session.engine
    engine.kv.truncate(0)
    with pytest.raises(InterruptedError):
        engine.logits(PROMPT, cut)
    rows = [engine.logits(PROMPT)]
    rows += [engine.extend([token], tap)[np.newaxis] for token in DECODED]
    return np.concatenate(rows)


def small_glm(directory: Path) -> Path:
    """Seven layers with experts, four of them without an index and so smaller."""
    index_layers = (True, True, False, True, False, False, True, False)
    model = gguf_glm.glm_model(n_layers=8, index_layers=index_layers)
    return model.write(directory / "glm.gguf")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("family", "gpu_cache", "layer_counts"), [("hy3", "6M", (0, 4, 6)), ("glm", "2M", (0, 5, 7))]
)
def test_on_a_gpu_the_bits_are_those_of_resident_layers(
    tmp_path, family, gpu_cache, layer_counts, exact
):
    """None streamed, some, and all that can be; with few slots, so that experts come meanwhile."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = small_glm(tmp_path) if family == "glm" else DEMO
    found = []
    for gpu_resident, layer_count in zip((None, 2 << 20, 0), layer_counts, strict=True):
        config = ModelConfig(
            model=model,
            device="cuda:0",
            exact=exact,
            gpu_resident=gpu_resident,
            gpu_cache=gpu_cache,
            host_cache="10M",
            ctx=512,
        )
        with Session(config) as session:
            engine = session.engine
            assert len(engine.client.mapping.attached.streamed_layers) == layer_count
            assert isinstance(engine.model.turns, StreamedLayers) == (layer_count > 0)
            for tap in (lambda *_: None, None):
                found.append(rows_of(session, tap))
            assert engine.graphs.times.token_count == len(DECODED)
    assert all(np.array_equal(rows, found[0]) for rows in found[1:])
