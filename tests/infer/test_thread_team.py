"""Jobs on a team: every item once, whatever the threads and the other callers do."""

import threading
import time

import numpy as np
import pytest

from infer.kernels import ggml_library
from infer.kernels.compiled_matmul import ConvertJob, convert
from infer.kernels.jobs import prepared_job
from infer.kernels.thread_team import IDLE_POLLS, ThreadTeam, run
from shared.quants import TensorType

ITEM = 8


@pytest.fixture(params=[1, 2, 5])
def team(request):
    team = ThreadTeam(request.param)
    yield team
    team.close()


class HalfJob:
    """Converts the numbers from `first` on to float16, ITEM of them an item."""

    def __init__(self, team, items):
        self.source = np.empty(items * ITEM, np.float32)
        self.destination = np.empty(items * ITEM, np.float16)
        self.job = prepared_job(ConvertJob, team.at)
        self.job.from_float = ggml_library.load().activation_format(TensorType.F16).from_float
        self.job.values, self.job.items = items * ITEM, items
        self.job.item_values, self.job.item_bytes = ITEM, ITEM * 2
        self.job.source = self.source.ctypes.data
        self.job.destination = self.destination.ctypes.data

    def is_done_right(self, first):
        self.source[:] = np.arange(first, first + len(self.source)) % 2048
        self.destination[:] = -1
        run(self.job.at, convert)
        return np.array_equal(self.source, self.destination.astype(np.float32))


def test_every_item_is_done_before_run_returns(team):
    jobs = [HalfJob(team, items) for items in (1, 2, 3, 40)]
    for turn in range(3000):
        assert all(job.is_done_right(turn) for job in jobs)


def test_sleeping_threads_are_woken(team):
    job = HalfJob(team, 100)
    for turn in range(20):
        time.sleep(IDLE_POLLS * 4e-6)
        assert job.is_done_right(turn)
        assert job.job.next_thread >= 1


def test_another_caller_works_alone_while_the_team_is_busy(team):
    failures = []

    def call(seed):
        job = HalfJob(team, 30)
        failures.extend(turn for turn in range(1500) if not job.is_done_right(turn + seed))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


def test_helpers_join_and_end_with_close():
    before = threading.active_count()
    team = ThreadTeam(3)
    assert threading.active_count() == before + 2
    job = HalfJob(team, 400)
    deadline = time.monotonic() + 20
    joined = 1
    while joined < 2 and time.monotonic() < deadline:
        assert job.is_done_right(0)
        joined = job.job.next_thread
    assert joined >= 2
    team.close()
    assert threading.active_count() == before


def test_a_job_without_items_returns(team):
    job = HalfJob(team, 1)
    job.job.items = 0
    job.destination[:] = -1
    run(job.job.at, convert)
    assert (job.destination == -1).all()
