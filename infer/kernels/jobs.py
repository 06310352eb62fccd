"""The records through which Python tells compiled workers what to do.

Each is a ctypes.Structure of eight-byte fields that Python fills by name, and the numba record of
the same layout. Fields are addresses, sizes in bytes or counts, int64 unless listed as reals.
Every job starts with the header

    next_item     the next item to be worked on, taken atomically
    next_thread   how many threads have come so far, taken atomically
    items         how many there are
    launcher, threads   the team (`infer.kernels.thread_team`)
"""

import ctypes

import numba
import numpy as np
from numba import types

HEADER_FIELDS = ("next_item", "next_thread", "items", "launcher", "threads")
NEXT_ITEM, NEXT_THREAD = 0, 1


class Task(ctypes.Structure):
    """One matrix times `count` rows: outputs[output_rows[i]] = W inputs[input_rows[i]].

    The task's items are first_item up to end_item, `item_rows` rows of W each. Where `to_float` is
    not 0, weights are dequantised into the thread's tile before vec_dot sees them.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("first_item", "end_item", "item_rows"),
            *("weights", "weight_stride", "rows", "columns", "vec_dot", "to_float"),
            *("inputs", "input_stride", "input_rows"),
            *("outputs", "output_stride", "output_rows", "count"),
        )
    )


def _job(name: str, integers: str, reals: str = "") -> type[ctypes.Structure]:
    fields = [(field, ctypes.c_int64) for field in (*HEADER_FIELDS, *integers.split())]
    fields += [(field, ctypes.c_double) for field in reals.split()]
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields)})


def record(structure: type[ctypes.Structure]) -> types.Record:
    return numba.from_dtype(np.dtype(structure))
