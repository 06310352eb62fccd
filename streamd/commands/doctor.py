"""`streamd doctor`: is this machine fit for the job, and what to do where it is not.

Each check is a function that looks at one thing and says what it found; none raises.
"""

import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shared.cuda import call, device_name, load_driver
from shared.errors import GpuError, GpuNotShared, StreamError
from shared.experts import ExpertIndex
from shared.free_memory import available_memory_bytes, cgroup_room_bytes
from shared.gguf_index import GgufIndex
from shared.sizes import size_text
from streamd.gpu.sharing import WITHOUT_SHARING, require_sharing
from streamd.readers.direct import open_file
from streamd.readers.probe import AUTO, choose_engine
from streamd.tiers.pages import huge_page_settings

OK, WARN, FAIL = "ok", "warn", "fail"
PROBE_DEPTH = 32
GPU_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Finding:
    level: str
    subject: str
    found: str
    remedy: str = ""


def examine(model: Path | None, disk_probe: Callable[[Path], float]) -> Iterator[Finding]:
    """All findings, as they come; `disk_probe(model)` measures bytes a second."""
    yield _kernel()
    yield from _io_uring()
    yield _memlock()
    yield _huge_pages()
    yield from _memory()
    yield _processors()
    yield from _gpu()
    if model is not None:
        yield from _model(model, disk_probe)


def render(finding: Finding) -> str:
    line = f"{finding.level:<5} {finding.subject:<14} {finding.found}"
    return f"{line}\n{'':<20} -> {finding.remedy}" if finding.remedy else line


def _kernel() -> Finding:
    release = platform.release()
    major, minor = (int(part) for part in release.split(".")[:2])
    if (major, minor) < (5, 10):
        return Finding(FAIL, "kernel", release, "Linux 5.10 or newer is needed")
    return Finding(OK, "kernel", f"{release} on {platform.machine()}")


def _io_uring() -> Iterator[Finding]:
    try:
        disabled = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        disabled = "0"
    if disabled != "0":
        yield Finding(
            WARN, "io_uring", f"disabled (kernel.io_uring_disabled={disabled})",
            "sysctl kernel.io_uring_disabled=0; without it preads from threads do the job",
        )  # fmt: skip
    try:
        engine, report = choose_engine(AUTO, PROBE_DEPTH)
    except StreamError as error:
        yield Finding(FAIL, "I/O engine", error.message, error.remedy)
        return
    name = engine.name
    engine.close()
    refusals = "; ".join(report[:-1])
    level = OK if name != "pread" else WARN
    yield Finding(level, "I/O engine", name + (f" ({refusals})" if refusals else ""))


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= 64 << 20:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else size_text(soft)
        return Finding(OK, "memlock", shown)
    return Finding(
        WARN, "memlock", size_text(soft),
        "ulimit -l unlimited (LimitMEMLOCK=infinity in a unit); old kernels count rings against it",
    )  # fmt: skip


def _huge_pages() -> Finding:
    settings = huge_page_settings()
    found = (
        f"shmem {settings.shmem_enabled}, anonymous {settings.thp_enabled},"
        f" {settings.hugetlb_pages} hugetlb pages allowed"
    )
    if settings.shared_possible:
        return Finding(OK, "huge pages", found)
    return Finding(
        WARN, "huge pages", f"{found}: slots will stand on 4 KiB pages",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        " (or sysctl vm.nr_overcommit_hugepages=N): computing and reading get faster",
    )  # fmt: skip


def _memory() -> Iterator[Finding]:
    available_bytes = available_memory_bytes()
    level = OK if available_bytes > 4 << 30 else WARN
    yield Finding(level, "memory", f"{size_text(available_bytes)} available")
    room_bytes = cgroup_room_bytes()
    if room_bytes is not None:
        yield Finding(OK, "cgroup", f"{size_text(room_bytes)} left by the control group")
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    if shm is not None:
        yield Finding(OK, "/dev/shm", f"{size_text(shm.free)} free (not used: we share memfds)")


def _processors() -> Finding:
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = "max", "1"
    if quota != "max" and int(quota) / int(period) < count:
        return Finding(
            WARN, "processors", f"{count}, of which the cgroup grants {int(quota) / int(period):g}",
            "give infer --threads that many, or raise cpu.max",
        )  # fmt: skip
    return Finding(OK, "processors", str(count))


def _gpu() -> Iterator[Finding]:
    query = "name,driver_version,memory.free,pcie.link.gen.current,pcie.link.width.current"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=GPU_DEADLINE_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        yield Finding(OK, "GPU", "no NVIDIA driver: the CPU computes")
        return
    for line in answer.stdout.splitlines():
        values = [part.strip() for part in line.split(",")]
        if len(values) != len(query.split(",")):
            yield Finding(WARN, "GPU", line, "see nvidia-smi")
            continue
        name, driver, free, generation, width = values
        free_mib = free.removesuffix(" MiB")
        shown = size_text(int(free_mib) << 20) if free_mib.isdecimal() else free
        yield Finding(
            OK, "GPU", f"{name}, driver {driver}, {shown} free, PCIe {generation} x{width}"
        )
    yield _gpu_sharing()


def _gpu_sharing() -> Finding:
    """Whether a daemon can keep a GPU's slots for all clients."""
    try:
        driver = load_driver()
        for ordinal in range(call(driver, "cuDeviceGetCount")):
            device = call(driver, "cuDeviceGet", ordinal)
            require_sharing(driver, device, device_name(driver, device))
    except GpuNotShared as error:
        return Finding(WARN, "GPU sharing", f"{error.message}: {WITHOUT_SHARING}", error.remedy)
    except GpuError as error:
        return Finding(WARN, "GPU sharing", error.message, error.remedy)
    return Finding(OK, "GPU sharing", "its memory can be shared: slots are kept for all clients")


def _model(path: Path, disk_probe: Callable[[Path], float]) -> Iterator[Finding]:
    try:
        index = GgufIndex.open(path)
        experts = ExpertIndex.from_gguf(index)
        with ExitStack() as stack:
            files = [open_file(shard) for shard in index.paths]
            for file in files:
                stack.callback(file.close)
        slab = max(c.slab_bytes for c in experts.classes)
        yield Finding(OK, "model", f"{index.architecture}, slabs of up to {size_text(slab)}")
        for file in files:
            if file.direct:
                yield Finding(OK, "O_DIRECT", f"{file.path.name}: aligned to {file.align_bytes}")
            else:
                yield Finding(
                    WARN, "O_DIRECT", f"{file.path.name}: {file.reason}",
                    "put the model on ext4 or xfs on a local drive",
                )  # fmt: skip
        started_s = time.monotonic()
        rate = disk_probe(path)
        yield Finding(
            OK,
            "disk",
            f"{rate / 1e6:,.0f} MB/s random slabs ({time.monotonic() - started_s:.1f} s)",
        )
    except StreamError as error:
        yield Finding(FAIL, "model", error.message, error.remedy)
