"""The records through which Python tells compiled workers what to do.

A record is a ctypes.Structure of eight-byte fields that Python fills by name, and the numpy dtype
of the same layout for compiled code. Fields are addresses, sizes in bytes or counts (int64), or
reals (float64). Every job starts with this header:

    next_item           the next item to work on, taken atomically by the threads
    next_thread         how many threads have come so far, counted atomically
    items               how many items there are
    launcher, threads   the team (`infer.kernels.thread_team`)

Threads take the next item when they are done with one, so that a slow core takes fewer of them.
Which thread computes an item never changes its bits.
"""

import ctypes
from typing import Any

import numpy as np
from numba import carray

from infer.kernels.numba_cache import inner, kernel
from infer.kernels.numba_calls import add_one, at, call_team, call_worker
from infer.kernels.thread_team import ThreadTeam

_HEADER = "next_item next_thread items launcher threads"


def structure(name: str, integers: str, reals: str = "") -> Any:
    """A ctypes.Structure with these fields, in this order."""
    fields = [(field, ctypes.c_int64) for field in integers.split()]
    fields += [(field, ctypes.c_double) for field in reals.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def job_structure(name: str, integers: str, reals: str = "") -> Any:
    return structure(name, f"{_HEADER} {integers}", reals)


def prepared_job(kind: Any, team: ThreadTeam) -> Any:
    """An empty job for this team; attribute `at` is its address."""
    job = kind(launcher=team.launcher, threads=team.threads)
    job.at = ctypes.addressof(job)
    return job


@inner
def take_item(data):
    return add_one(data, 0)


@inner
def take_thread(data):
    return add_one(data, 1)


HEADER_DTYPE = np.dtype(structure("Header", _HEADER))


@kernel("void(int64, int64)")
def run(job, worker):
    """Work off the items of the job at this address; one item, or one thread, needs no team."""
    header = carray(at(job), 1, HEADER_DTYPE)[0]
    header.next_item = 0
    header.next_thread = 0
    if header.items == 1 or header.threads == 1:
        call_worker(worker, job)
    else:
        call_team(header.launcher, worker, job, header.threads)
