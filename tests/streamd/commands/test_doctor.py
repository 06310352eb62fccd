"""doctor's findings, on this machine and on machines that lack something."""

import platform
import re
import resource
import subprocess
from types import SimpleNamespace

import pytest

from shared.errors import ConfigError, GpuError
from streamd.commands import doctor
from streamd.commands.doctor import FAIL, OK, WARN, Finding, examine, render
from streamd.readers.direct import open_file
from streamd.readers.pread_engine import PreadEngine
from streamd.tiers.pages import HugePageSettings

SUBJECTS = ["kernel", "I/O engine", "memlock", "huge pages", "memory", "processors", "GPU"]


def findings(model=None, rate=2e9) -> dict[str, Finding]:
    return {each.subject: each for each in examine(model, lambda path: rate)}


def test_everything_is_looked_at_and_what_is_not_well_has_a_remedy(demo_model):
    found = findings(demo_model)
    assert [each for each in found if each in SUBJECTS] == SUBJECTS
    assert {"model", "O_DIRECT", "disk"} <= found.keys()
    for each in found.values():
        assert each.level in (OK, WARN, FAIL)
        assert each.found
        assert each.remedy or each.level == OK or each.subject == "I/O engine"
    assert found["kernel"].found.startswith(platform.release())
    assert found["disk"].found.startswith("2,000 MB/s")


def test_a_finding_is_one_line_and_its_remedy_another():
    assert render(Finding(OK, "kernel", "6.1")) == "ok    kernel         6.1"
    assert render(Finding(WARN, "memlock", "64 KiB", "ulimit -l")).splitlines() == [
        "warn  memlock        64 KiB",
        "                     -> ulimit -l",
    ]


@pytest.mark.parametrize(
    ("release", "level"),
    [("5.4.0-generic", FAIL), ("5.10.0", OK), ("6.12.1-arch1-1", OK), ("4.19.300", FAIL)],
)
def test_the_kernel_must_be_new_enough(release, level, monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: release)
    assert findings()["kernel"].level == level


def test_the_fallback_engine_is_a_warning_with_the_reasons(monkeypatch):
    def only_pread(preference, depth):
        return PreadEngine(1), ["liburing: no", "uring-api: no", "I/O engine pread chosen"]

    monkeypatch.setattr(doctor, "choose_engine", only_pread)
    found = findings()["I/O engine"]
    assert (found.level, found.found) == (WARN, "pread (liburing: no; uring-api: no)")


def test_no_engine_at_all_is_a_failure(monkeypatch):
    def none(preference, depth):
        raise ConfigError("nothing works", "buy a computer")

    monkeypatch.setattr(doctor, "choose_engine", none)
    found = findings()["I/O engine"]
    assert (found.level, found.found, found.remedy) == (FAIL, "nothing works", "buy a computer")


@pytest.mark.parametrize(
    ("limit", "level", "shown"),
    [
        (resource.RLIM_INFINITY, OK, "unlimited"),
        (64 << 20, OK, "67.1 MB"),
        (8 << 20, WARN, "8.39 MB"),
        (0, WARN, "0 B"),
    ],
)
def test_memlock(limit, level, shown, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    found = findings()["memlock"]
    assert (found.level, found.found) == (level, shown)
    assert bool(found.remedy) == (level == WARN)


@pytest.mark.parametrize(("shmem", "level"), [("never", WARN), ("advise", OK)])
def test_huge_pages(shmem, level, monkeypatch):
    settings = HugePageSettings(shmem, "madvise", 0)
    monkeypatch.setattr(doctor, "huge_page_settings", lambda: settings)
    found = findings()["huge pages"]
    assert found.level == level
    assert f"shmem {shmem}" in found.found
    assert ("shmem_enabled" in found.remedy) == (level == WARN)


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "available_memory_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor, "cgroup_room_bytes", lambda: 1 << 29)
    found = findings()
    assert (found["memory"].level, found["memory"].found) == (WARN, "1.07 GB available")
    assert found["cgroup"].found.startswith("537 MB")


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (
            "Some GPU, 570.1, 15000 MiB, 4, 8\n",
            OK,
            "Some GPU, driver 570.1, 15.7 GB free, PCIe 4 x8",
        ),
        ("No devices were found\n", WARN, "No devices were found"),
    ],
)
def test_the_gpu_is_shown_as_its_driver_tells(answer, level, words, monkeypatch):
    def run(command, **options):
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(subprocess, "run", run)
    found, sharing = doctor._gpu()
    assert (found.level, found.found) == (level, words)
    assert sharing.subject == "GPU sharing"


class OneGpu:
    """A driver; `descriptors`: whether memory can be exported as one."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="mapping",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="descriptors",
    )

    def __init__(self, descriptors):
        self.abilities = {"mapping": 1, "descriptors": descriptors}

    def cuDeviceGetCount(self):
        return 0, 1

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetName(self, length, device):
        return 0, b"RTX 4060 Ti\0".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, self.abilities[attribute]


def test_whether_gpu_memory_can_be_shared_and_what_it_costs_if_not(monkeypatch):
    monkeypatch.setattr(doctor, "load_driver", lambda: OneGpu(1))
    assert doctor._gpu_sharing().level == OK
    monkeypatch.setattr(doctor, "load_driver", lambda: OneGpu(0))
    found = doctor._gpu_sharing()
    assert found.level == WARN
    assert "RTX 4060 Ti cannot share its memory between processes here (WSL2" in found.found
    assert "a client of the GPU keeps slots and resident tensors of its own" in found.found
    assert "infer uploads for itself" in found.remedy


def test_a_driver_that_the_daemon_cannot_load_is_a_warning(monkeypatch):
    def no_bindings():
        raise GpuError("cuda-bindings cannot be imported", "install them")

    monkeypatch.setattr(doctor, "load_driver", no_bindings)
    found = doctor._gpu_sharing()
    assert (found.level, found.remedy) == (WARN, "install them")


@pytest.mark.parametrize(
    "fault", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)]
)
def test_no_driver_means_the_cpu_computes(fault, monkeypatch):
    def run(command, **options):
        raise fault

    monkeypatch.setattr(subprocess, "run", run)
    assert [each.level for each in doctor._gpu()] == [OK]


def test_a_filesystem_without_direct_reads_is_a_warning(demo_model, monkeypatch):
    monkeypatch.setattr(doctor, "open_file", lambda path: open_file(path, align_of=lambda fd: 0))
    found = findings(demo_model)["O_DIRECT"]
    assert found.level == WARN
    assert re.search("ext4|xfs", found.remedy)


@pytest.mark.parametrize("content", [b"", b"no GGUF at all" * 100])
def test_a_model_that_cannot_be_used_is_a_failure(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    found = findings(path)
    assert found["model"].level == FAIL
    assert "disk" not in found


def test_a_drive_that_cannot_be_measured_is_a_failure(demo_model):
    def broken(path):
        raise ConfigError("the drive has not answered for 5 s", "see the kernel's log")

    found = {each.subject: each for each in examine(demo_model, broken)}
    assert found["model"].level == FAIL
    assert "not answered" in found["model"].found
