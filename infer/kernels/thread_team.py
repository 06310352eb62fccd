"""The threads that kernels run on: torch's own OpenMP team.

A parallel region is one call of the OpenMP runtime's entry GOMP_parallel, which gcc-compiled code
uses and which LLVM's and Intel's runtimes offer too. Taking it from the runtime that torch has
loaded means one team for both: a second one's idle threads would spin against the first's
(`tools/bench_cpu_kernels.py` measures a launch).
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class ThreadTeam:
    """`launcher` is the address of GOMP_parallel, or 0: then the caller's thread works alone."""

    threads: int
    launcher: int


def thread_team(threads: int | None = None) -> ThreadTeam:
    """A team of `threads`, by default as many as the processors this process may use.

    torch.set_num_threads should be given the same number: the runtime starts and ends threads
    whenever the team's size changes.
    """
    if threads is None:
        threads = _available_processors()
    assert threads >= 1
    launcher = _openmp_entry()
    return ThreadTeam(min(threads, MAX_THREADS) if launcher else 1, launcher)


def _available_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _openmp_entry() -> int:
    library = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # Looks through what torch's library was linked with, whatever its file is called.
            entry = ctypes.CDLL(str(library / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(entry, ctypes.c_void_p).value or 0
    return 0
