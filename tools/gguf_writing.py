"""Write a GGUF file tensor by tensor: it can be interrupted and continued, and is never seen half.

Until it is whole the file is OUT.part; OUT.part.journal says which tensors of it are on disk:

    {"plan": hash of the header, of the sources' sizes and times, and of where tensors come from}
    {"done": tensors written, in file order}      the last such line counts
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from gguf_layout import TensorPlan, layout

from shared.errors import ConfigError, StreamError

SYNC_BYTES = 256 << 20  # at the most so much is written again after an interruption


class ResumableFile:
    """Writes the tensors of a plan in their order. Use as a context manager; `finish` publishes.

    `next_tensor` is the first tensor that an earlier run has not left whole.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Sequence[TensorPlan],
        sources: Iterable[Path],
        *,
        origins: Iterable[str] = (),
        restart: bool = False,
    ) -> None:
        """`origins`: words that differ where a tensor's bytes do, though nothing else tells.

        ConfigError where OUT.part belongs to another plan or process, or the disk is full.
        """
        self.path = path
        self.tensors = tuple(tensors)
        self.layout = layout(metadata, tensors)
        self._part = Path(f"{path}.part")
        self._journal_path = Path(f"{path}.part.journal")
        self._plan = _plan_hash(self.layout.header, sources, origins)
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self.next_tensor = 0 if restart else self._done_before()
            self._check_space()
            if self.next_tensor == 0:
                self._begin()
            self._journal = self._journal_path.open("a", encoding="utf-8")
            self._journal.write("\n")  # behind what may be a torn line
        except BaseException:
            os.close(self._fd)
            raise
        self._unsynced_bytes = 0

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(self, *_: object) -> None:
        """Without `finish`, what is written stays for the next run."""
        if self._fd >= 0:
            self._sync()
            self._close()

    def write(self, pieces: Iterable[bytes | memoryview | np.ndarray]) -> None:
        """The next tensor's bytes, in pieces."""
        tensor = self.tensors[self.next_tensor]
        start = self.layout.offsets[self.next_tensor]
        position = start
        for piece in pieces:
            position += self._put(memoryview(piece).cast("B"), position)
        assert position - start == tensor.byte_count, (tensor, position - start)
        self.next_tensor += 1
        self._unsynced_bytes += tensor.byte_count
        if self._unsynced_bytes >= SYNC_BYTES:
            self._sync()

    def finish(self) -> None:
        """All tensors are written: the file gets its name."""
        assert self.next_tensor == len(self.tensors)
        os.ftruncate(self._fd, self.layout.total_bytes)
        os.fsync(self._fd)
        os.replace(self._part, self.path)
        self._close()
        self._journal_path.unlink()
        directory = os.open(self.path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self._part} is being written", "wait for the other run") from error

    def _begin(self) -> None:
        self._journal_path.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        self._put(memoryview(self.layout.header), 0)
        os.fsync(self._fd)
        self._journal_path.write_text(json.dumps({"plan": self._plan}) + "\n", encoding="utf-8")

    def _done_before(self) -> int:
        """How many tensors an interrupted run of the same plan has left."""
        try:
            lines = self._journal_path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return 0
        entries = list(_entries(lines))
        if not entries or entries[0].get("plan") != self._plan:
            raise ConfigError(
                f"{self._part} was begun with other types or other sources",
                "say --restart to begin again, or give the options of before",
            )
        done = int(entries[-1].get("done", 0))
        header = self.layout.header
        kept = os.pread(self._fd, len(header), 0) == header
        return done if kept and os.fstat(self._fd).st_size >= self._end_of(done) else 0

    def _end_of(self, tensor_count: int) -> int:
        """Where the first tensors end."""
        if tensor_count == 0:
            return len(self.layout.header)
        return self.layout.offsets[tensor_count - 1] + self.tensors[tensor_count - 1].byte_count

    def _check_space(self) -> None:
        missing = self.layout.total_bytes - os.fstat(self._fd).st_blocks * 512
        free = shutil.disk_usage(self._part.absolute().parent).free
        if missing > free:
            raise ConfigError(
                f"{self.path} needs {missing / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free",
                "make room, or write to another disk",
            )

    def _put(self, data: memoryview, position: int) -> int:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done:], position + done)
            except OSError as error:
                remedy = "make room and run again: it goes on where it stopped"
                raise StreamError(
                    f"writing {self._part} failed: {error.strerror}",
                    remedy if error.errno == errno.ENOSPC else "check the disk",
                ) from error
        return done

    def _sync(self) -> None:
        """The data first, then the line that vouches for it."""
        os.fdatasync(self._fd)
        self._journal.write(json.dumps({"done": self.next_tensor}) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._unsynced_bytes = 0

    def _close(self) -> None:
        self._journal.close()
        os.close(self._fd)
        self._fd = -1


def _entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A journal's; a line that was torn says nothing, and what it would have said is done again."""
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _plan_hash(header: bytes, sources: Iterable[Path], origins: Iterable[str]) -> str:
    digest = xxhash.xxh3_64(header)
    for origin in origins:
        digest.update(f"{origin}\n".encode())
    for source in sources:
        status = source.stat()
        digest.update(f"{source.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
