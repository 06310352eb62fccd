"""Products with weights of every tensor type, against gguf's dequantiser.

Errors are relative to the root mean square of the result. In the default arithmetic activations
have 8 bits, which are off by up to half of 1/127 of their block's largest; beside 16-bit weights
they have 16.
"""

from collections.abc import Iterator

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix
from infer.selftest.outcome import EXACT_LIMIT, Outcome
from infer.selftest.stage import Stage
from shared.errors import UnsupportedModel
from shared.quants import GEOMETRY, TensorType

DEFAULT_LIMIT = 0.02
_ROWS, _COLUMNS, _TOKENS = 40, 512, 9
# Numbers that are no weights, and what products make of their activations
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")


def check_quants(kernels: Kernels, stage: Stage) -> Iterator[Outcome]:
    for kind in TensorType:
        if kind.name not in _NO_WEIGHTS:
            yield from _check_type(kernels, stage, kind)


def _check_type(kernels: Kernels, stage: Stage, kind: TensorType) -> Iterator[Outcome]:
    try:
        blocks = _sound_blocks(kind, _ROWS * _COLUMNS // GEOMETRY[kind].block_weights)
    except NotImplementedError:
        yield Outcome(f"{kind.name}: gguf has no dequantiser", None, 0)
        return
    there = torch.from_numpy(blocks).to(stage.device)
    matrix = QuantMatrix(int(kind), _ROWS, _COLUMNS, there.data_ptr(), there)
    x = stage.normal(_TOKENS, _COLUMNS)
    try:
        group = kernels.group([matrix])
        results = [kernels.linear(x.to(stage.device), group, exact)[0] for exact in (True, False)]
    except UnsupportedModel:
        yield Outcome(f"{kind.name}: not supported on {stage.device}", None, 0)
        return
    dense = gguf.quants.dequantize(blocks.reshape(_ROWS, -1), GGMLQuantizationType(kind))
    weights = torch.from_numpy(dense.astype(np.float64).reshape(_ROWS, _COLUMNS))
    expected = x.double() @ weights.T
    size = expected.square().mean().sqrt()
    for name, result, limit in zip(
        ("exact", "default"), results, (EXACT_LIMIT, DEFAULT_LIMIT), strict=True
    ):
        error = (result.double().cpu() - expected).square().mean().sqrt() / size
        yield Outcome(f"{kind.name} {name}", float(error), limit)


def _sound_blocks(kind: TensorType, count: int) -> np.ndarray:
    """uint8 [count, block bytes]: random bytes whose weights are finite and about one in size."""
    rng = np.random.default_rng(int(kind))
    if GEOMETRY[kind].block_weights == 1:
        weights = rng.standard_normal((count, 1), np.float32)
        return gguf.quants.quantize(weights, GGMLQuantizationType(kind)).view(np.uint8)
    found: list[np.ndarray] = []
    while sum(map(len, found)) < count:
        noise = rng.integers(0, 256, (1000, GEOMETRY[kind].block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            weights = gguf.quants.dequantize(noise, GGMLQuantizationType(kind))
            size = np.sqrt((weights.reshape(1000, -1).astype(np.float64) ** 2).mean(1))
        found.append(noise[(size > 0.3) & (size < 3)])
    return np.concatenate(found)[:count]
