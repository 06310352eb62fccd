"""Quantised matrices in GPU memory."""

from functools import cache
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.quant_matrix import QuantMatrix
from shared.quants import GEOMETRY, TensorType, row_bytes


class Uploaded(NamedTuple):
    """A matrix on the GPU and what it stands for: float64 [rows, columns] on the CPU."""

    matrix: QuantMatrix
    dense: torch.Tensor


@cache
def _sound_blocks(kind):
    """Random blocks of the type with finite weights of about the same size: no quantiser needed."""
    rng = np.random.default_rng(kind)
    found = np.empty((0, row_bytes(kind, GEOMETRY[kind].block_weights)), np.uint8)
    while len(found) < 64:
        noise = rng.integers(0, 256, (4000, found.shape[1]), dtype=np.uint8)
        with np.errstate(all="ignore"):
            weights = gguf.quants.dequantize(noise, GGMLQuantizationType(kind)).reshape(4000, -1)
            size = np.sqrt((weights.astype(np.float64) ** 2).mean(1))
        found = np.concatenate((found, noise[(size > 0.3) & (size < 3)]))
    return found


def _upload(name, rows, columns, seed=1):
    """A matrix of sound blocks in random order."""
    kind = TensorType[name]
    blocks = _sound_blocks(kind)
    count = rows * columns // GEOMETRY[kind].block_weights
    data = blocks[np.random.default_rng(seed).integers(0, len(blocks), count)]
    bytes_there = torch.from_numpy(data).cuda()
    matrix = QuantMatrix(kind, rows, columns, bytes_there.data_ptr(), bytes_there)
    return Uploaded(matrix, reference.dequantize(QuantMatrix.over(kind, columns, data)).double())


@pytest.fixture(scope="session")
def upload():
    return _upload
