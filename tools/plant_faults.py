"""Plant a fault in a copy of the project, and see whether the test that should notice does.

    python tools/plant_faults.py [NAME ...]        all of them without a name

Each fault is one replacement in one file. A line each: caught, or not. Exit code 1 if one was not.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parents[1]
COPIED = ("shared", "streamd", "infer", "tests", "tools", "pyproject.toml")
SHARED_DATA = PROJECT_DIR.parent / "shared"
DEADLINE_S = 120.0
# Of pytest: all passed; some failed.
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Fault:
    """`sound` occurs once in `path` and becomes `planted`; `test` is file::name under tests/."""

    path: str
    sound: str
    planted: str
    test: str


READERS = "streamd/readers/test_readers.py"
UPLOADS = "infer/uploads/test_uploading_client.py"
RESERVE = "streamd/slot_cache/test_cache_reserve.py"
FAULTS = {
    "off by one in widening": Fault(
        "streamd/readers/pieces.py",
        "-(-stop // align) * align",
        "stop // align * align",
        f"{READERS}::test_a_range_is_read_as_it_is_in_the_file",
    ),
    "payload one block off": Fault(
        "streamd/readers/pieces.py",
        "extent.target[offset - start : offset - start + size]",
        "extent.target[offset - start + 1 : offset - start + size]",
        f"{READERS}::test_a_range_is_read_as_it_is_in_the_file",
    ),
    "a short read accepted": Fault(
        "streamd/readers/reader.py",
        "if result >= piece.needed:",
        "if result > 0:",
        "streamd/readers/test_reader_faults.py",
    ),
    "no grace period": Fault(
        "shared/slots.py",
        "while self.limbo and self.limbo[0][0] <= oldest_epoch:",
        "while self.limbo:",
        "streamd/slot_cache/test_cache.py::test_a_retired_slot_is_not_reused_while_its_readers_may_be_there",
    ),
    "grace period one epoch short": Fault(
        "shared/slots.py",
        "self.limbo[0][0] <= oldest_epoch",
        "self.limbo[0][0] <= oldest_epoch + 1",
        "streamd/slot_cache/test_cache_stateful.py::test_random_walks",
    ),
    "epoch moved before the table": Fault(
        "shared/residency.py",
        "if again == epoch:",
        "if True:",
        "shared/test_residency.py::test_entering_goes_on_until_the_epoch_has_not_moved",
    ),
    "no ageing": Fault(
        "shared/policy.py",
        "self.heat *= np.float32(kept)",
        "self.heat *= np.float32(1)",
        "shared/test_policy.py::test_a_use_counts_half_after_the_half_life",
    ),
    "most recent evicted": Fault(
        "shared/policy.py",
        "np.argsort(self.worth(keys)",
        "np.argsort(-self.worth(keys)",
        f"{RESERVE}::test_the_coldest_are_evicted",
    ),
    "wrong size class": Fault(
        "streamd/slot_cache/cache.py",
        "return self.classes[self.layer_class[key // self._n_experts]]",
        "return self.classes[0]",
        f"{RESERVE}::test_each_size_class_has_its_own_slots_and_reserve",
    ),
    "double count of misses": Fault(
        "streamd/slot_cache/cache_counters.py",
        "self.misses += expert_count",
        "self.misses += 2 * expert_count",
        "streamd/monitoring/test_stats.py::test_lookups_are_counted_over_clients_present_and_gone",
    ),
    "double count of hits that have left": Fault(
        "streamd/slot_cache/cache.py",
        "self.counters.departed_hits += client.area.hits",
        "self.counters.departed_hits += 2 * client.area.hits",
        "streamd/slot_cache/test_cache_clients.py::test_what_a_client_counted_outlives_it",
    ),
    "no reserve": Fault(
        "streamd/slot_cache/reserve.py",
        "return len(slots.free) > share_of_older and slots.spare_count > self.count(slots)",
        "return len(slots.free) > 0",
        "streamd/slot_cache/test_reserve.py::test_a_slot_is_given_only_beyond_the_share_and_the_reserve",
    ),
    "a pin forgotten": Fault(
        "shared/slots.py",
        "return self._states[index] == SlotState.LIVE and not self._pins[index]",
        "return self._states[index] == SlotState.LIVE",
        "shared/test_victims.py",
    ),
    "a lane that looks again": Fault(
        "streamd/tiers/uploads.py",
        "if lane.host_slot == NOT_RESIDENT:",
        "if True:",
        "streamd/gpu/test_uploads.py::"
        "test_what_was_put_out_after_a_lane_had_seen_it_is_copied_all_the_same",
    ),
    "hints that never pass": Fault(
        "streamd/scheduling/prefetch.py",
        "if now_ms >= hinted.deadline_ms:",
        "if False:",
        "streamd/scheduling/test_scheduler.py::test_a_hint_grows_old",
    ),
    "a hint held up by no share": Fault(
        "streamd/slot_cache/reserve.py",
        "return min(beyond_floor_count, share_count) - ",
        "return beyond_floor_count - ",
        "streamd/slot_cache/test_reserve.py::test_reading_ahead_has_a_share_of_what_is_beyond_the_floor",
    ),
    "any version spoken": Fault(
        "shared/wire.py",
        "if version != PROTOCOL_VERSION:",
        "if version < 0:",
        "shared/test_wire.py::test_another_version_is_named_whatever_it_says",
    ),
    "memory left writable": Fault(
        "shared/shm.py",
        "F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)",
        "fcntl.F_SEAL_SEAL)",
        "shared/test_shm.py::test_nobody_else_can_map_it_writable",
    ),
    "a client's slot overwritten under its kernels": Fault(
        "infer/uploads/slot_cache.py",
        "self.readers[self.held] = section\n        for slot",
        "for slot",
        f"{UPLOADS}::test_every_slab_comes_whole_whatever_runs_first",
    ),
    "a host slot left before it is copied": Fault(
        "infer/uploads/client.py",
        "self._copied.synchronize()\n        self._host.check_revoked()",
        "self._host.check_revoked()",
        f"{UPLOADS}::test_every_slab_comes_whole_whatever_runs_first",
    ),
    "a copy kept whose source may be overwritten": Fault(
        "infer/uploads/client.py",
        "self._copied.synchronize()\n        self._host.check_revoked()",
        "self._copied.synchronize()",
        "infer/uploads/test_uploading_life.py::test_a_section_that_was_given_up_is_done_again",
    ),
}


@contextmanager
def copied_project() -> Iterator[Path]:
    """A copy with its tests; what lies beside the project is beside the copy."""
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        project = Path(directory, "main")
        for name in COPIED:
            source = PROJECT_DIR / name
            if source.is_dir():
                shutil.copytree(
                    source, project / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(source, project / name)
        if SHARED_DATA.is_dir():
            Path(directory, "shared").symlink_to(SHARED_DATA)
        (project / "models").symlink_to(PROJECT_DIR / "models")
        yield project


def is_caught(project: Path, fault: Fault) -> bool:
    """Whether the test fails with the fault; the copy is as before afterwards."""
    path = project / fault.path
    text = path.read_text()
    assert text.count(fault.sound) == 1, f"{fault.path}: {fault.sound!r} is not there once"
    path.write_text(text.replace(fault.sound, fault.planted))
    try:
        return run_test(project, fault.test) == FAILED
    finally:
        path.write_text(text)


def run_test(project: Path, test: str) -> int:
    """The exit code of a test of the copy; a hang is a failure, its processes' end included."""
    words = ("-x", "-p", "no:cacheprovider", f"--timeout={DEADLINE_S / 2:g}", f"tests/{test}")
    environment = os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode not in (PASSED, FAILED):
        raise RuntimeError(f"{test}: pytest could not run\n{done.stdout[-2000:]}{done.stderr}")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAULTS))
    names = parser.parse_args().names or list(FAULTS)
    if unknown := set(names) - FAULTS.keys():
        parser.error(f"no fault {', '.join(sorted(unknown))}")
    missed = 0
    with copied_project() as project:
        for name in names:
            caught = is_caught(project, FAULTS[name])
            missed += not caught
            print(
                f"{'caught' if caught else 'NOT CAUGHT'}  {name}  {FAULTS[name].test}", flush=True
            )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
