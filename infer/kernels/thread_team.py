"""The threads that kernels run on.

The caller publishes a job, works on it itself, and then waits only for those threads that have
joined it: one that the system has not got round to running is not missed. (An OpenMP region waits
for every thread of its team. Where other processes want the same processors, each of the hundred
regions of a token may then cost a time slice: a decode step of 1.5 ms took 10 to 100 ms.)

    state    generation of the job, whether it is open for joining, how many threads are in it
    busy     1 while a caller uses the team; another caller then works alone
    sleepers threads that wait for `wake`, after IDLE_POLLS looks at the state
    rouses   how often sleepers have been woken to look at the state for as long again

A thread joins by raising the count of an open job by compare-and-swap, and leaves by lowering it.
The caller closes the job when no items are left, and returns when the count is zero. A thread that
goes to sleep counts itself, then looks at the state once more; the caller publishes, then looks at
that count: one of them sees the other. To wake a dozen threads takes as long as a small job; who
knows that one is coming may `rouse` them while it is prepared.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray

from infer.kernels.jobs import job_structure, structure
from infer.kernels.numba_cache import inner, kernel
from infer.kernels.numba_calls import (
    at,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_swap,
    call_nothing,
    call_one,
    call_two,
)
from shared.threads import start_thread

MAX_THREADS = 256
# An idle thread looks at the state this often, offering its processor to others in between (about
# 0.2 ms where there are none), before it sleeps.
IDLE_POLLS = 500
_OPEN = 1 << 16
_COUNT = _OPEN - 1
_GENERATION = 1 << 17

_Team = structure(
    "_Team",
    # Fields that are polled have a cache line to themselves.
    "state _1 _2 _3 _4 _5 _6 _7 sleepers _8 _9 _10 _11 _12 _13 _14"
    " busy job worker stop rouses yield_processor lock unlock wait wake mutex condition",
)
_TEAM = np.dtype(_Team)
_SLEEPERS, _BUSY, _STOP, _ROUSES = (
    getattr(_Team, name).offset for name in ("sleepers", "busy", "stop", "rouses")
)
_HEADER = np.dtype(job_structure("Header"))
# More than a pthread_mutex_t or pthread_cond_t takes anywhere
_PTHREAD_OBJECT_BYTES = 256


@inner
def _can_join(state, joined):
    return state & _OPEN != 0 and state // _GENERATION != joined


@inner
def _sleep(team_at, team, joined):
    call_one(team.lock, team.mutex)
    atomic_add(team_at + _SLEEPERS, 1)
    rouses = atomic_load(team_at + _ROUSES)
    while not (
        _can_join(atomic_load(team_at), joined)
        or atomic_load(team_at + _STOP) != 0
        or atomic_load(team_at + _ROUSES) != rouses
    ):
        call_two(team.wait, team.condition, team.mutex)
    atomic_add(team_at + _SLEEPERS, -1)
    call_one(team.unlock, team.mutex)


@inner
def _wake_all(team):
    call_one(team.lock, team.mutex)
    call_one(team.wake, team.condition)
    call_one(team.unlock, team.mutex)


@kernel("void(int64)")
def _serve(team_at):
    """A thread's life."""
    team = carray(at(team_at), 1, _TEAM)[0]
    joined, polls = 0, 0
    while atomic_load(team_at + _STOP) == 0:
        state = atomic_load(team_at)
        if _can_join(state, joined):
            if atomic_replace(team_at, state, state + 1):
                joined = state // _GENERATION
                call_one(team.worker, team.job)
                atomic_add(team_at, -1)
                polls = 0
        elif polls < IDLE_POLLS:
            polls += 1
            call_nothing(team.yield_processor)
        else:
            _sleep(team_at, team, joined)
            polls = 0


@kernel("void(int64, int64)")
def run(job_at, worker):
    """Work off the items of a job with its team; alone where that is absent, busy or not needed."""
    job = carray(at(job_at), 1, _HEADER)[0]
    job.next_item = 0
    job.next_thread = 0
    team_at = job.team
    if job.items <= 1 or team_at == 0 or atomic_swap(team_at + _BUSY, 1) != 0:
        call_one(worker, job_at)
        return
    team = carray(at(team_at), 1, _TEAM)[0]
    team.job = job_at
    team.worker = worker
    generation = atomic_load(team_at) // _GENERATION + 1
    atomic_swap(team_at, generation * _GENERATION + _OPEN)
    if atomic_load(team_at + _SLEEPERS) > 0:
        _wake_all(team)
    call_one(worker, job_at)
    atomic_add(team_at, -_OPEN)
    while atomic_load(team_at) & _COUNT != 0:
        call_nothing(team.yield_processor)
    atomic_swap(team_at + _BUSY, 0)


@kernel("void(int64)")
def _rouse(team_at):
    team = carray(at(team_at), 1, _TEAM)[0]
    if atomic_load(team_at + _SLEEPERS) > 0:
        atomic_add(team_at + _ROUSES, 1)
        _wake_all(team)


class ThreadTeam:
    """`threads` with the caller's own; `at` is what a job's `team` field wants.

    `run(job, worker)` works a prepared job off; infer.kernels.program records jobs in its place.
    The helpers end with `close`, with this object or with the process.
    """

    def __init__(self, threads: int | None = None) -> None:
        """By default as many threads as there are processors for this process."""
        wanted = available_processors() if threads is None else threads
        assert wanted >= 1
        self.threads = min(wanted, MAX_THREADS)
        self.run: Callable[[Any, int], None] = _run_now
        self._shared = _Shared()
        self.at = ctypes.addressof(self._shared.team) if self.threads > 1 else 0
        helpers = [
            threading.Thread(target=_serve, args=(self.at,), name=f"kernel-{i}", daemon=True)
            for i in range(1, self.threads)
        ]
        for helper in helpers:
            start_thread(helper)
        # Helpers must not outlive the memory they poll.
        self.close = weakref.finalize(self, _end, self._shared, helpers)

    def rouse(self) -> None:
        """A job comes soon: its helpers need not be woken then."""
        if self.at:
            _rouse(self.at)


class _Shared:
    """What the threads of a team share."""

    def __init__(self) -> None:
        self.libc = libc = ctypes.CDLL(None)
        self.mutex = ctypes.create_string_buffer(_PTHREAD_OBJECT_BYTES)
        self.condition = ctypes.create_string_buffer(_PTHREAD_OBJECT_BYTES)
        libc.pthread_mutex_init(self.mutex, None)
        libc.pthread_cond_init(self.condition, None)
        self.team = _Team(
            yield_processor=_address(libc.sched_yield),
            lock=_address(libc.pthread_mutex_lock),
            unlock=_address(libc.pthread_mutex_unlock),
            wait=_address(libc.pthread_cond_wait),
            wake=_address(libc.pthread_cond_broadcast),
            mutex=ctypes.addressof(self.mutex),
            condition=ctypes.addressof(self.condition),
        )


def _end(shared: _Shared, helpers: list[threading.Thread]) -> None:
    shared.team.stop = 1
    shared.libc.pthread_mutex_lock(shared.mutex)
    shared.libc.pthread_cond_broadcast(shared.condition)
    shared.libc.pthread_mutex_unlock(shared.mutex)
    for helper in helpers:
        helper.join()


def _run_now(job: Any, worker: int) -> None:
    run(job.at, worker)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


def available_processors() -> int:
    """For this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
