"""Block geometry of every GGML tensor type.

GGML stores a row as consecutive blocks; a block holds a fixed number of weights in a fixed number
of bytes. Ids and geometry follow ggml's `enum ggml_type` and its block structs. The table is
our own because importing the gguf package costs more than opening a model does
(`tools/bench_gguf_open.py`); a test compares the two.
"""

from enum import IntEnum
from typing import NamedTuple

from shared.errors import MalformedModel, UnsupportedModel


class TensorType(IntEnum):
    """The ids in a GGUF file. Those left out were withdrawn by ggml (4, 5, 31-33, 36-38)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


class BlockGeometry(NamedTuple):
    """One type's block: `block_weights` is a count, `block_bytes` a size."""

    type_id: int
    name: str
    block_weights: int
    block_bytes: int


# type -> (weights in a block, bytes of a block)
_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q8_1: (32, 40),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.Q8_K: (256, 292),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ4_NL: (32, 18),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ4_XS: (256, 136),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    TensorType.F64: (1, 8),
    TensorType.IQ1_M: (256, 56),
    TensorType.BF16: (1, 2),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
    TensorType.Q1_0: (128, 18),
}

GEOMETRY = {
    int(kind): BlockGeometry(int(kind), kind.name, weights, size)
    for kind, (weights, size) in _BLOCKS.items()
}


def geometry(type_id: int) -> BlockGeometry:
    """The geometry of a type id read from a file; UnsupportedModel where the id is unknown."""
    found = GEOMETRY.get(type_id)
    if found is None:
        raise UnsupportedModel(
            f"tensor type {type_id} is unknown",
            "use a file quantised to a known type, such as IQ2_XXS, Q4_K or Q8_0",
        )
    return found


def row_bytes(type_id: int, columns: int) -> int:
    """Bytes of one row of `columns` weights.

    UnsupportedModel for an unknown type, MalformedModel where a row is not made of whole blocks.
    """
    block = geometry(type_id)
    if columns % block.block_weights:
        raise MalformedModel(
            f"a row of {columns} weights is not a multiple of {block.name}'s block of"
            f" {block.block_weights}",
            "convert or download the model again",
        )
    return columns // block.block_weights * block.block_bytes
