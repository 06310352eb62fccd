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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared import shm
from streamd.readers.depth import DepthController
from streamd.readers.direct import open_file
from streamd.readers.probe import make_engine
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.tiers.populate import PageFinder, populate

KINDS = ("private 4 KiB", "private 2 MiB", "shared")
ALIGN_BYTES = 4096
ADAPTIVE_DEPTH, ADAPTIVE_SLOTS = 64, 96
# Beyond those in flight, so that it is always the reader that chooses how many these are.
SURPLUS_READS = 4
WAIT_MS = 10_000
PR_SET_THP_DISABLE = 41
LOOK_AFTER_S = 0.3
PAGE_BYTES = mmap.PAGESIZE
FRAME_MASK, PRESENT = (1 << 55) - 1, 1 << 63  # of an entry of /proc/PID/pagemap


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
    """mean_in_flight_bytes: 0 where nothing is ever in flight, as in a loop of preads.

    run_bytes: of memory that lies side by side, on the average: a read into it is cut that often.
    The kernel tells it to root only; else 0.
    """

    mb_s: float
    cpu_ms_per_gb: float
    mean_in_flight_bytes: float = 0.0
    run_bytes: float = 0.0


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
        run_bytes = mean_run_bytes(os.getpid(), shm.address(mapping), len(mapping))
        # Without an alignment a file is taken for one that cannot be read directly.
        file = open_file(reads.path) if self.direct else open_file(reads.path, align_of=_no_align)
        depth = self.depth or ADAPTIVE_DEPTH
        fixed = DepthController.fixed(depth * slot_bytes) if self.depth else None
        reader = Reader(make_engine(self.engine, depth), [file], depth, controller=fixed)
        if self.registered:
            for slot in slots:
                reader.register(slot)
        try:
            return self._run(reader, slots, reads, run_bytes)
        finally:
            reader.close()
            file.close()

    def _run(
        self, reader: Reader, slots: list[memoryview], reads: Reads, run_bytes: float
    ) -> Result:
        bell = select.poll()
        bell.register(reader.fileno(), select.POLLIN)
        free, waiting = list(range(len(slots))), iter(reads.offsets)
        left = len(reads.offsets)
        clock = _Clock()
        while left:
            # The slot used last is used next: as little memory as fio's buffers, which it goes
            # through again and again, and which the machine's caches hold.
            while free and reader.waiting_reads < SURPLUS_READS:
                if (offset := next(waiting, None)) is None:
                    break
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
        result = clock.result(reads.total_bytes)
        mean_bytes = reader.stats().in_flight_byte_s / clock.elapsed_s
        return replace(result, mean_in_flight_bytes=mean_bytes, run_bytes=run_bytes)


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
            run_bytes, output = self._start(log.name, reads.size_bytes)
        job = json.loads(output[output.index("{") :])["jobs"][0]
        read = job["read"]
        cpu_ms = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"]
        return Result(
            read["bw_bytes"] / 1e6,
            cpu_ms / (read["io_bytes"] / 1e9),
            read["bw_bytes"] * read["lat_ns"]["mean"] / 1e9,
            run_bytes,
        )

    def _start(self, log: str, read_bytes: int) -> tuple[float, str]:
        """The mean run of its memory, and what it printed."""
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
        time.sleep(LOOK_AFTER_S)
        run_bytes = mean_run_bytes(process.pid, *_mapping_of(process.pid, self.depth * read_bytes))
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"fio failed: {output}")
        return run_bytes, output


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
            return clock.result(reads.total_bytes)
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

    def result(self, done_bytes: int) -> Result:
        self.elapsed_s = time.perf_counter() - self._started_s
        cpu_ms = (_cpu_s() - self._cpu_before_s) * 1000
        return Result(done_bytes / self.elapsed_s / 1e6, cpu_ms / (done_bytes / 1e9))


def mean_run_bytes(pid: int, address: int, size_bytes: int) -> float:
    """How much of a process's memory lies side by side, on the average; 0 where that is secret."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(size_bytes // PAGE_BYTES * 8), np.uint64)
    frames = (entries[entries & PRESENT != 0] & FRAME_MASK).astype(np.int64)
    if not frames.any():
        return 0.0
    return float(len(frames) * PAGE_BYTES / (1 + np.count_nonzero(np.diff(frames) != 1)))


def _mapping_of(pid: int, size_bytes: int) -> tuple[int, int]:
    """Address and size of the smallest mapping that can hold as many bytes."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if end - start >= size_bytes:
            found.append((end - start, start))
    size, start = min(found, default=(0, 0))
    return start, size


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
