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

# Floats of an item: done at once, or in about the time in which another caller comes along
SHORT, LONG = 8, 50_000


@pytest.fixture(params=[1, 2, 5])
def team(request):
    team = ThreadTeam(request.param)
    yield team
    team.close()


class HalfJob:
    """Converts the numbers from `first` on to float16, `length` of them an item."""

    def __init__(self, team, items, length=SHORT):
        self.source = np.empty(items * length, np.float32)
        self.destination = np.empty(items * length, np.float16)
        self.job = prepared_job(ConvertJob, team.at)
        self.job.from_float = ggml_library.load().activation_format(TensorType.F16).from_float
        self.job.values, self.job.items = items * length, items
        self.job.item_values, self.job.item_bytes = length, length * 2
        self.job.source = self.source.ctypes.data
        self.job.destination = self.destination.ctypes.data

    def threads(self):
        """How many worked on the last run: each takes one item too many."""
        return self.job.next_item - self.job.items

    def is_done_right(self, first):
        self.source[:] = np.arange(first, first + len(self.source)) % 2048
        self.destination[:] = -1
        run(self.job.at, convert)
        return np.array_equal(self.source, self.destination.astype(np.float32))


def test_every_item_is_done_before_run_returns(team):
    jobs = [HalfJob(team, items) for items in (1, 2, 3, 40)]
    for turn in range(3000):
        assert all(job.is_done_right(turn) for job in jobs)


def test_roused_threads_work_or_sleep_again(team):
    job = HalfJob(team, 40)
    team.rouse()  # nobody sleeps yet
    for turn in range(20):
        time.sleep(0.002)  # long enough to fall asleep
        team.rouse()
        if turn % 2:
            assert job.is_done_right(turn)


def test_items_in_other_threads_are_waited_for(team):
    job = HalfJob(team, 3, LONG)
    assert all(job.is_done_right(turn) for turn in range(300))


def test_a_busy_team_is_not_used():
    team = ThreadTeam(2)
    job = HalfJob(team, 100_000)
    team._shared.team.busy = 1
    for turn in range(20):
        assert job.is_done_right(turn)
        assert job.threads() == 1
    team.close()


def test_several_callers_at_once_get_their_own_results(team):
    failures = []

    def call(seed):
        job = HalfJob(team, 4, LONG)
        failures.extend(turn for turn in range(100) if not job.is_done_right(turn + seed))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert failures == []


@pytest.mark.parametrize("pause_s", [0, IDLE_POLLS * 20e-6])
def test_helpers_join_awake_or_asleep_and_end_with_close(pause_s):
    before = threading.active_count()
    team = ThreadTeam(3)
    assert threading.active_count() == before + 2
    job = HalfJob(team, 100_000)
    deadline = time.monotonic() + 20
    threads = 1
    while threads < 3 and time.monotonic() < deadline:
        time.sleep(pause_s)
        assert job.is_done_right(0)
        threads = job.threads()
    assert threads == 3
    team.close()
    assert threading.active_count() == before


def test_helpers_end_with_the_team():
    before = threading.active_count()
    team = ThreadTeam(3)
    assert HalfJob(team, 3).is_done_right(0)
    del team
    assert threading.active_count() == before


def test_a_job_without_items_returns(team):
    job = HalfJob(team, 1)
    job.job.items = 0
    job.destination[:] = -1
    run(job.job.at, convert)
    assert (job.destination == -1).all()
