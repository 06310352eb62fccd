"""Resident tensors by name, at the address where their region begins."""

import numpy as np
import pytest
import torch

from infer.resident.weights import Weights
from shared.errors import MalformedModel, UnsupportedModel
from shared.gguf_shard import TensorInfo
from shared.quants import TensorType
from shared.resident import gpu_resident_layout, resident_layout

TENSORS = [
    TensorInfo("norm", (8,), int(TensorType.F32), 0, 96, 32),
    TensorInfo("matrix", (32, 4), int(TensorType.Q8_0), 0, 4096 + 160, 4 * 34),
    TensorInfo("half", (8,), int(TensorType.F16), 0, 8192, 16),
]


@pytest.fixture(params=["widened", "packed"])
def region(request):
    """(weights, bytes of the region, its layout)."""
    if request.param == "packed":
        layout = gpu_resident_layout(TENSORS)
    else:
        layout = resident_layout(TENSORS, 4096)
    data = np.random.default_rng(1).integers(0, 256, layout.total_bytes, np.uint8)
    address = data.ctypes.data
    return Weights("m.gguf", layout, address, data, torch.device("cpu")), data, layout


def _payload(data, layout, name):
    placed = next(p for p in layout.tensors if p.tensor.name == name)
    return data[placed.payload_offset : placed.payload_offset + placed.tensor.byte_count]


def test_matrices_lie_in_place(region):
    weights, data, layout = region
    matrix = weights.matrix("matrix", 4, 32)
    assert (matrix.blocks().reshape(-1) == _payload(data, layout, "matrix")).all()


def test_vectors_are_copies(region):
    weights, data, layout = region
    vector = weights.vector("norm", 8)
    assert vector.numpy().tobytes() == _payload(data, layout, "norm").tobytes()
    data[:] = 0
    assert vector.numpy().any()


@pytest.mark.parametrize(
    ("take", "error", "words"),
    [
        (lambda w: w.matrix("matrix", 5, 32), MalformedModel, "shape"),
        (lambda w: w.vector("norm", 9), MalformedModel, "shape"),
        (lambda w: w.vector("half", 8), UnsupportedModel, "F32"),
        (lambda w: w.vector("absent", 8), MalformedModel, "lacks the tensor absent"),
        (lambda w: w.first("absent", "gone"), MalformedModel, "absent"),
    ],
)
def test_what_is_not_there_or_not_as_expected_is_named(region, take, error, words):
    with pytest.raises(error, match=words) as refusal:
        take(region[0])
    assert refusal.value.remedy


def test_the_first_name_that_is_there_is_taken(region):
    assert region[0].first("absent", "norm", "matrix") == "norm"
    assert "norm" in region[0]
    assert "absent" not in region[0]
