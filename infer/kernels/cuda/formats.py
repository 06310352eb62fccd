"""The tensor types the CUDA sources know, and the grids of those that need one."""

from functools import cache

import numpy as np
import numpy.typing as npt
from gguf import quants

from shared.errors import UnsupportedModel
from shared.quants import TensorType, geometry

FLOAT_FORMATS = ("F32", "F16", "BF16")
CODED_FORMATS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "NVFP4", "TQ1_0", "TQ2_0"),
)
FORMATS = (*FLOAT_FORMATS, *CODED_FORMATS)

# Grids of eight codes with three levels: the levels' numbers as nibbles of one word.
_SELECTORS = {
    "IQ2_XXS": quants.IQ2_XXS,
    "IQ2_XS": quants.IQ2_XS,
    "IQ2_S": quants.IQ2_S,
    "IQ1_S": quants.IQ1_S,
    "IQ1_M": quants.IQ1_M,
}
# How many bits of signs go with eight codes of these; the table lies behind the grid.
_SIGN_BITS = {"IQ2_XXS": 7, "IQ2_XS": 7, "IQ2_S": 8}
# Grids of four codes: the codes as bytes of one word.
_CODES = {"IQ3_XXS": quants.IQ3_XXS, "IQ3_S": quants.IQ3_S}


def format_name(type_id: int) -> str:
    """The name of a tensor type that can be multiplied; UnsupportedModel for others."""
    name = geometry(type_id).name
    if name not in FORMATS:
        raise UnsupportedModel(
            f"tensors of type {name} cannot be multiplied on a GPU",
            "use a file quantised to a common type, such as IQ2_XXS, Q4_K or Q8_0",
        )
    return name


def is_float(type_id: int) -> bool:
    return TensorType(type_id).name in FLOAT_FORMATS


@cache
def grid_words(name: str) -> npt.NDArray[np.uint32] | None:
    """The lookup grid of a format as the sources expect it, a word an entry; None without one."""
    if kind := _SELECTORS.get(name):
        kind.init_grid()
        levels = np.array(kind.grid_map, np.float32)
        numbers = np.searchsorted(levels, kind.grid.reshape(kind.grid_shape)).astype(np.uint32)
        words = _nibbles(numbers)
        bits = _SIGN_BITS.get(name)
        return words if bits is None else np.concatenate((words, _signs(bits)))
    if kind := _CODES.get(name):
        kind.init_grid()
        codes = kind.grid.reshape(kind.grid_shape).astype(np.uint8)
        return np.ascontiguousarray(codes).view(np.uint32).reshape(-1)
    return None


def _nibbles(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """[n, 8] numbers below 16 -> [n] words, the first number in the lowest nibble."""
    return (numbers << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)


def _signs(bits: int) -> npt.NDArray[np.uint32]:
    """For each pattern of minus signs a word with 4 in the nibbles of the negative ones.

    Of 7 bits, the eighth makes the number of minus signs even.
    """
    minus = (np.arange(2**bits)[:, None] >> np.arange(8) & 1).astype(np.uint32)
    if bits == 7:
        minus[:, 7] = minus.sum(1) % 2
    return _nibbles(4 * minus)
