"""Jobs recorded once and then run by one compiled call: what is fixed of a token's step.

A recorded job is a copy, with copies of its tasks, so the kernels may go on using theirs. What it
points to is kept: every tensor that torch made meanwhile, and scratch memory, which the kernels
own. Numbers that follow from the token's position are written before a step, each as

    offset + scale * (position // divisor)
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from infer.kernels.compiled_attention import SPLIT_POSITIONS, AttentionJob, attend_splits
from infer.kernels.compiled_matmul import ConvertJob, MatmulJob, Task, convert
from infer.kernels.compiled_rows import RopeJob
from infer.kernels.ggml_library import ActivationFormat
from infer.kernels.jobs import prepared_job
from infer.kernels.numba_cache import kernel
from infer.kernels.numba_calls import at, call_two
from infer.kernels.scratch import address_of
from infer.kernels.thread_team import run

_CLOCK_MONOTONIC = 1
_ENTRY = np.dtype([("job", np.int64), ("worker", np.int64), ("part", np.int64)])
_PATCH = np.dtype([(name, np.int64) for name in ("address", "offset", "scale", "divisor")])


@kernel("void(int64, int64, int64, int64, int64, int64)")
def _run(entries_at, first, end, clock, now_at, spent_at):
    """Run jobs; spent[part] grows by nanoseconds. `clock` is clock_gettime's address, and `now` has
    room for what it writes, seconds and nanoseconds."""
    entries = carray(at(entries_at), end, _ENTRY)
    now = carray(at(now_at), 2, np.int64)
    spent = carray(at(spent_at), 1 << 10, np.int64)
    call_two(clock, _CLOCK_MONOTONIC, now_at)
    before_ns = now[0] * 1_000_000_000 + now[1]
    for i in range(first, end):
        run(entries[i].job, entries[i].worker)
        call_two(clock, _CLOCK_MONOTONIC, now_at)
        after_ns = now[0] * 1_000_000_000 + now[1]
        spent[entries[i].part] += after_ns - before_ns
        before_ns = after_ns


@kernel("void(int64, int64, int64)")
def _move(patches_at, count, position):
    patches = carray(at(patches_at), count, _PATCH)
    for i in range(count):
        patch = patches[i]
        cell = carray(at(patch.address), 1, np.int64)
        cell[0] = patch.offset + patch.scale * (position // patch.divisor)


class Program:
    """`run` jobs by number, after a `move_to`; to look at the clock behind each takes 0.02 us."""

    def __init__(
        self, entries: Sequence[Any], patches: Sequence[Any], parts: Sequence[str], kept: object
    ) -> None:
        self._parts = tuple(parts)
        self._entries = np.array(entries, _ENTRY)
        self._patches = np.array(patches, _PATCH)
        self._kept = kept
        self._spent_ns = np.zeros(len(parts), np.int64)
        self._now = np.zeros(2, np.int64)
        self._at, self._patches_at = self._entries.ctypes.data, self._patches.ctypes.data
        libc = ctypes.CDLL(None)
        clock = ctypes.cast(libc.clock_gettime, ctypes.c_void_p).value
        self._timing = (clock, self._now.ctypes.data, self._spent_ns.ctypes.data)

    def move_to(self, position: int) -> None:
        """The next step stands at this position."""
        _move(self._patches_at, len(self._patches), position)

    def run(self, first: int, end: int) -> None:
        assert 0 <= first <= end <= len(self._entries)
        _run(self._at, first, end, *self._timing)

    @property
    def spent_s(self) -> dict[str, float]:
        """By part, of all that has run."""
        return dict(zip(self._parts, (self._spent_ns / 1e9).tolist(), strict=True))


class Recorder(TorchFunctionMode):
    """Takes the place of a team's `run`. part: what the next jobs' time is counted as.

    `count` is the number of the next job. The step must be recorded at position 0.
    """

    def __init__(self, team: int, half: ActivationFormat) -> None:
        """half: the format F16, in which a cache keeps its numbers."""
        super().__init__()
        self.part = ""
        self._team, self._half = team, half
        self._entries: list[tuple[int, int, int]] = []
        self._patches: list[tuple[int, int, int, int]] = []
        self._parts: list[str] = []
        self._tasks: list[Any] = []
        self._kept: list[object] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Keeps what torch makes: recorded jobs have its address."""
        result = func(*args, **(kwargs or {}))
        self._kept.append(result)
        return result

    @property
    def count(self) -> int:
        return len(self._entries)

    def program(self) -> Program:
        return Program(self._entries, self._patches, self._parts, self._kept)

    def note(self, job: Any, worker: int) -> None:
        """Record the job as it is now."""
        copy = type(job).from_buffer_copy(job)
        if isinstance(copy, MatmulJob):
            tasks = self._copy_tasks(copy)
            self._tasks.append(tasks)
            copy.tasks = ctypes.addressof(tasks)
        elif isinstance(copy, RopeJob):
            self._patch(copy, "start", 0, 1)
        elif isinstance(copy, AttentionJob):
            self._patch(copy, "start", 0, 1)
            self._patch(copy, "splits", 1, 1, SPLIT_POSITIONS)
            if worker == attend_splits:
                self._patch(copy, "items", copy.kv_heads, copy.kv_heads, SPLIT_POSITIONS)
        self._add(copy, worker)

    def store(self, rows: Tensor, plane: Tensor) -> None:
        """Record that a token's float32 [1, ...] go to its position of float16 [context, ...]."""
        assert plane.dtype is torch.float16
        assert rows.shape[1:] == plane.shape[1:]
        job = prepared_job(ConvertJob, self._team)
        job.from_float, job.items = self._half.from_float, 1
        job.values = job.item_values = rows.numel()
        job.source = address_of(rows)
        self._patch(job, "destination", plane.data_ptr(), self._half.row_bytes(rows.numel()))
        self._add(job, convert)

    def weights_of(self, product: int) -> npt.NDArray[np.int64]:
        """Of a recorded product, -1 for the last: where each task's matrix lies, to be changed."""
        return np.frombuffer(self._tasks[product], np.dtype(Task))["weights"]

    def _add(self, job: Any, worker: int) -> None:
        if self.part not in self._parts:
            self._parts.append(self.part)
        self._kept.append(job)
        self._entries.append((ctypes.addressof(job), worker, self._parts.index(self.part)))

    def _patch(self, job: Any, field: str, offset: int, scale: int, divisor: int = 1) -> None:
        address = ctypes.addressof(job) + getattr(type(job), field).offset
        self._patches.append((address, offset, scale, divisor))

    def _copy_tasks(self, job: Any) -> Any:
        """Of a product, with the rows that its tasks name."""
        tasks = (Task * job.task_count)()
        ctypes.memmove(tasks, job.tasks, ctypes.sizeof(tasks))
        for task in tasks:
            for name in ("input_rows", "output_rows"):
                rows = (ctypes.c_int32 * task.count)()
                ctypes.memmove(rows, getattr(task, name), ctypes.sizeof(rows))
                self._kept.append(rows)
                setattr(task, name, ctypes.addressof(rows))
        self._kept.append(tasks)
        return tasks
