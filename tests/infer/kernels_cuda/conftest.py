"""Quantised matrices in GPU memory, and kernels for them."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from gguf_blocks import sound_blocks
from modules_beside import load_beside

from infer.kernels import reference
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.quant_matrix import QuantMatrix
from shared.quants import GEOMETRY, TensorType

(cuda_bench,) = load_beside(__file__, "cuda_bench")


class Uploaded(NamedTuple):
    """A matrix on the GPU and what it stands for: float64 [rows, columns] on the CPU."""

    matrix: QuantMatrix
    dense: torch.Tensor


def _upload(name, rows, columns, seed=1):
    """A matrix of sound blocks in random order."""
    kind = TensorType[name]
    blocks = sound_blocks(kind)
    count = rows * columns // GEOMETRY[kind].block_weights
    data = blocks[np.random.default_rng(seed).integers(0, len(blocks), count)]
    bytes_there = torch.from_numpy(data).cuda()
    matrix = QuantMatrix(kind, rows, columns, bytes_there.data_ptr(), bytes_there)
    return Uploaded(matrix, reference.dequantize(QuantMatrix.over(kind, columns, data)).double())


@pytest.fixture(scope="session")
def upload():
    return _upload


@pytest.fixture(scope="module")
def kernels():
    return CudaKernels(cuda_bench.BOUNDS)
