"""One run of random or sequential reads of a file: by our reader, by fio, through the page cache.

All get the same list of reads. Sizes in bytes; a run's rate counts what was asked for.
"""

import ctypes
import json
import mmap
import os
import pickle
import resource
import select
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared import shm
from streamd.pages import page_report
from streamd.populate import PageFinder, populate
from streamd.readers.depth import DepthController
from streamd.readers.direct import open_file
from streamd.readers.probe import make_engine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead

KINDS = ("private 4 KiB", "private 2 MiB", "shared")
ALIGN_BYTES = 4096
# Reads that wait beyond those in flight, so that the reader itself chooses how many those are.
ADAPTIVE_DEPTH, ADAPTIVE_SLOTS = 32, 64
WAIT_MS = 10_000
PR_SET_THP_DISABLE = 41
SMAPS_AFTER_S = 0.3


@dataclass(frozen=True)
class Reads:
    """`size_bytes` at each of `offsets`, multiples of 4096."""

    path: Path
    size_bytes: int
    offsets: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * len(self.offsets)


@dataclass(frozen=True)
class Result:
    """mean_in_flight_bytes is 0 where nothing is ever in flight, as in a loop of preads."""

    mb_s: float
    cpu_ms_per_gb: float
    mean_in_flight_bytes: float = 0.0
    pages: str = ""


@dataclass(frozen=True)
class ReaderRun:
    """By streamd's reader: `depth` reads in flight, or 0 for as many as it finds best."""

    engine: str
    kind: str
    depth: int
    registered: bool = True
    direct: bool = True

    def __call__(self, reads: Reads) -> Result:
        slot_bytes = -(-(ALIGN_BYTES + reads.size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        count = self.depth or ADAPTIVE_SLOTS
        mapping = _memory(self.kind, slot_bytes * count)
        memory = memoryview(mapping)
        slots = [memory[at * slot_bytes : (at + 1) * slot_bytes] for at in range(count)]
        find_pages = PageFinder()
        for slot in slots:
            find_pages(slot)
        find_pages.close()
        pages = page_report(shm.address(mapping)).kind
        # Without an alignment a file is taken for one that cannot be read directly.
        file = open_file(reads.path) if self.direct else open_file(reads.path, align_of=_no_align)
        depth = self.depth or ADAPTIVE_DEPTH
        fixed_bytes = depth * slot_bytes
        fixed = DepthController(fixed_bytes, fixed_bytes, fixed_bytes) if self.depth else None
        reader = Reader(make_engine(self.engine, depth), [file], depth, controller=fixed)
        if self.registered:
            for slot in slots:
                reader.register(slot)
        try:
            return self._run(reader, slots, reads, pages)
        finally:
            reader.close()
            file.close()

    def _run(self, reader: Reader, slots: list[memoryview], reads: Reads, pages: str) -> Result:
        bell = select.poll()
        bell.register(reader.fileno(), select.POLLIN)
        free, waiting = list(range(len(slots))), iter(reads.offsets)
        left = len(reads.offsets)
        clock = _Clock()
        while left:
            while free and (offset := next(waiting, None)) is not None:
                slot = free.pop()
                extent = Extent(0, offset, reads.size_bytes, slots[slot])
                reader.submit(SlabRead(slot, (extent,)))
            if not bell.poll(WAIT_MS):
                raise TimeoutError(f"a read has not ended within {WAIT_MS} ms")
            for completion in reader.poll():
                if completion.error is not None:
                    raise completion.error
                free.append(completion.key)
                left -= 1
        result = clock.result(reads.total_bytes, pages)
        byte_s = reader.stats().in_flight_byte_s
        return Result(result.mb_s, result.cpu_ms_per_gb, byte_s / clock.elapsed_s, pages)


@dataclass(frozen=True)
class FioRun:
    """By fio with io_uring; mean bytes in flight by Little's law from its mean latency."""

    kind: str
    depth: int
    registered: bool = False

    def __call__(self, reads: Reads) -> Result:
        with tempfile.NamedTemporaryFile("w", suffix=".iolog") as log:
            path = reads.path.absolute()
            lines = [f"{path} read {offset} {reads.size_bytes}" for offset in reads.offsets]
            head = ["fio version 2 iolog", f"{path} add", f"{path} open"]
            log.write("\n".join([*head, *lines, f"{path} close", ""]))
            log.flush()
            huge_bytes, output = self._start(log.name)
        job = json.loads(output[output.index("{") :])["jobs"][0]
        read = job["read"]
        cpu_ms = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"]
        return Result(
            read["bw_bytes"] / 1e6,
            cpu_ms / (read["io_bytes"] / 1e9),
            read["bw_bytes"] * read["lat_ns"]["mean"] / 1e9,
            "2 MiB" if huge_bytes > self.depth * reads.size_bytes / 2 else "4 KiB",
        )

    def _start(self, log: str) -> tuple[int, str]:
        """Bytes that stood on huge pages while it ran, and what it printed."""
        memory = "mmapshared" if self.kind == "shared" else "malloc"
        command = [
            *("fio", "--name=read", f"--read_iolog={log}", "--replay_no_stall=1", "--direct=1"),
            *("--ioengine=io_uring", f"--iodepth={self.depth}", f"--iomem={memory}", "--thread"),
            *(f"--fixedbufs={int(self.registered)}", "--output-format=json"),
        ]
        huge = self.kind == "private 2 MiB"
        # glibc then asks for transparent huge pages under whatever malloc maps.
        tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge else {}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | tunables,
            preexec_fn=None if huge else _forbid_huge_pages,  # noqa: PLW1509 - no threads run
        )
        time.sleep(SMAPS_AFTER_S)
        smaps = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"fio failed: {output}")
        return int(smaps.split("AnonHugePages:")[1].split()[0]) << 10, output


@dataclass(frozen=True)
class CachedRun:
    """By preads of what is in the page cache already, one after the other into the same memory."""

    kind: str

    def __call__(self, reads: Reads) -> Result:
        mapping = _memory(self.kind, reads.size_bytes)
        memory = memoryview(mapping)
        populate(memory)
        fd = os.open(reads.path, os.O_RDONLY)
        try:
            _read_all(fd, memory, reads)  # brings it there
            clock = _Clock()
            _read_all(fd, memory, reads)
            return clock.result(reads.total_bytes, page_report(shm.address(mapping)).kind)
        finally:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


Run = Callable[[Reads], Result]


def run_apart(run: Run, reads: Reads) -> Result:
    """In a process of its own, so that its memory is as fresh as a daemon's or fio's."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(into, pickle.dumps(run(reads)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as told:
        answer = told.read()
    os.waitpid(pid, 0)
    if not answer:
        raise SystemExit("a run has failed")
    result: Result = pickle.loads(answer)
    return result


class _Clock:
    """Wall time and CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._cpu_before_s = _cpu_s()
        self._started_s = time.perf_counter()

    def result(self, done_bytes: int, pages: str) -> Result:
        self.elapsed_s = time.perf_counter() - self._started_s
        cpu_ms = (_cpu_s() - self._cpu_before_s) * 1000
        return Result(done_bytes / self.elapsed_s / 1e6, cpu_ms / (done_bytes / 1e9), 0.0, pages)


def _memory(kind: str, size_bytes: int) -> mmap.mmap:
    if kind == "shared":
        fd = shm.create("bench-io", size_bytes)
        memory = shm.map_writable(fd, size_bytes)
        os.close(fd)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if kind == "private 2 MiB" else mmap.MADV_NOHUGEPAGE)
    return memory


def _read_all(fd: int, memory: memoryview, reads: Reads) -> None:
    for offset in reads.offsets:
        assert os.preadv(fd, [memory], offset) == reads.size_bytes


def _no_align(_fd: int) -> int:
    return 0


def _forbid_huge_pages() -> None:
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
