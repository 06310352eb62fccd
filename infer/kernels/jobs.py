"""The records through which Python tells compiled workers what to do.

A record is a ctypes.Structure of eight-byte fields that Python fills by name, and the numpy dtype
of the same layout for compiled code. Fields are addresses, sizes in bytes or counts (int64), or
reals (float64). Every job starts with this header:

    next_item     the next item to work on, taken atomically by the threads
    next_thread   how many threads have come so far, counted atomically
    items         how many items there are
    team          the address of the team (`infer.kernels.thread_team`), or 0

Threads take the next item when they are done with one, so that a slow core takes fewer of them.
Which thread computes an item never changes its bits.
"""

import ctypes
from typing import Any

from infer.kernels.numba_cache import inner
from infer.kernels.numba_calls import atomic_add

_HEADER = "next_item next_thread items team"


def structure(name: str, integers: str, reals: str = "") -> Any:
    """A ctypes.Structure with these fields, in this order."""
    fields = [(field, ctypes.c_int64) for field in integers.split()]
    fields += [(field, ctypes.c_double) for field in reals.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def job_structure(name: str, integers: str = "", reals: str = "") -> Any:
    return structure(name, f"{_HEADER} {integers}", reals)


def prepared_job(kind: Any, team: int) -> Any:
    """An empty job for the team at this address; attribute `at` is the job's own."""
    job = kind(team=team)
    job.at = ctypes.addressof(job)
    return job


@inner
def take_item(job):
    return atomic_add(job, 1)


@inner
def take_thread(job):
    return atomic_add(job + 8, 1)
