"""Random valid blocks of every tensor type, for tests and benchmarks; no quantiser needed."""

from functools import cache

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Where a block keeps its half-precision scale, its offset, and the ratio of the two that centres
# the weights on zero (the mean of the quantised values). The others have the scale in front.
_SCALE_FIELDS: dict[Type, tuple[int, int | None, float]] = {
    Type.Q4_1: (0, 2, -7.5),
    Type.Q5_1: (0, 2, -15.5),
    Type.Q2_K: (80, 82, 1.5),
    Type.Q3_K: (108, None, 0),
    Type.Q4_K: (0, 2, 7.5),
    Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0),
    Type.TQ1_0: (52, None, 0),
    Type.TQ2_0: (64, None, 0),
}


def random_blocks(
    rng: np.random.Generator, type_id: int, rows: int, columns: int, std: float = 0.05
) -> np.ndarray:
    """Random valid blocks of any type that gguf.quants dequantises: uint8 [rows, row bytes].

    The weights have about the standard deviation `std`; their mean is near zero (TQ2_0: std / 3).
    """
    kind = Type(type_id)
    if kind in (Type.F32, Type.F16, Type.BF16):
        weights = rng.normal(0, std, (rows, columns)).astype(np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(weights, kind)).view(np.uint8)
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_weights, block_bytes), np.uint8)
    if kind == Type.TQ2_0:  # of the two-bit codes, 3 is none: the weights are -1, 0 and 1
        blocks[:, :64] &= ~(blocks[:, :64] >> 1 & 0x55)
    _set_scale(blocks, kind, 1.0)
    unit_std = float(gguf.quants.dequantize(blocks[:256], kind).std())
    _set_scale(blocks, kind, std / unit_std)
    return blocks.reshape(rows, -1)


@cache
def sound_blocks(type_id: int) -> np.ndarray:
    """64 or more random blocks with finite weights of about the same size, no quantiser needed.

    uint8 [blocks, block bytes], the same ones at every call: not to be written. Unlike
    `random_blocks`, every byte of a block is random, its scales too.
    """
    kind = Type(type_id)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(type_id))
    found = np.empty((0, block_bytes), np.uint8)
    while len(found) < 64:
        noise = rng.integers(0, 256, (4000, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            weights = gguf.quants.dequantize(noise, kind).reshape(4000, -1)
            size = np.sqrt((weights.astype(np.float64) ** 2).mean(1))
        found = np.concatenate((found, noise[(size > 0.3) & (size < 3)]))
    return found


def _set_scale(blocks: np.ndarray, kind: Type, scale: float) -> None:
    """Write the blocks' scale, as near to `scale` as the type can express."""
    if kind == Type.MXFP4:  # byte 0: exponent, biased by 127, of twice the scale
        blocks[:, 0] = 128 + round(np.log2(scale))
    elif kind == Type.NVFP4:  # bytes 0-3: unsigned e4m3 (bias 7), mantissa 0
        blocks[:, :4] = np.clip(7 + round(np.log2(scale)), 1, 15) << 3
    elif kind == Type.IQ1_M:  # a half spread over the top nibbles of the last four uint16
        nibbles = int(np.float16(scale).view(np.uint16)) >> np.array([0, 4, 8, 12]) & 15
        tops = blocks[:, 49:56:2]
        tops[:] = tops & 15 | (nibbles << 4).astype(np.uint8)
    else:
        scale_at, offset_at, ratio = _SCALE_FIELDS.get(kind, (0, None, 0))
        blocks[:, scale_at : scale_at + 2] = _half_bytes(scale)
        if offset_at is not None:
            blocks[:, offset_at : offset_at + 2] = _half_bytes(scale * ratio)


def _half_bytes(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)
