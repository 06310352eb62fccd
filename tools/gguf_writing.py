"""Write a GGUF file tensor by tensor: it can be interrupted and continued, and is never seen half.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    key count x { key: string | value type u32 | value }
    tensor count x { name: string | dimension count u32 | dimensions u64 each | type u32 | offset }
    padding | each tensor at a multiple of the alignment

Until it is whole the file is OUT.part; OUT.part.journal says which tensors of it are on disk:

    {"plan": hash of the header and of the sources' sizes and times}
    {"done": tensors written, in file order}      the last such line counts
"""

import errno
import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shared.errors import ConfigError, StreamError
from shared.quants import row_bytes

VERSION = 3
ALIGNMENT = 32
SYNC_BYTES = 256 << 20  # at the most so much is written again after an interruption

_U8, _I8, _U16, _I16, _U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64, _F64 = range(13)
_ARRAY_TYPES = {
    np.dtype(code): value_type
    for code, value_type in {
        "u1": _U8,
        "i1": _I8,
        "u2": _U16,
        "i2": _I16,
        "u4": _U32,
        "i4": _I32,
        "f4": _F32,
        "?": _BOOL,
        "u8": _U64,
        "i8": _I64,
        "f8": _F64,
    }.items()
}


class RawValue(bytes):
    """A value as it stands in another file: its type u32 and its bytes."""


class TensorPlan(NamedTuple):
    """One tensor to be written; `shape` in ggml's order, columns first."""

    name: str
    shape: tuple[int, ...]
    type_id: int

    @property
    def byte_count(self) -> int:
        return row_bytes(self.type_id, self.shape[0]) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """`header` with its padding; `offsets` of the tensors from the file's start."""

    header: bytes
    offsets: tuple[int, ...]
    total_bytes: int


def layout(metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]) -> Layout:
    """Values: bool, int, float (as F32), str, numpy arrays, lists of one of these, RawValue."""
    head = bytearray(struct.pack("<4sIQQ", b"GGUF", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + encode_value(value)
    relative = 0
    offsets = []
    for tensor in tensors:
        head += _string(tensor.name) + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type_id, relative)
        offsets.append(relative)
        relative += _padded(tensor.byte_count)
    head += bytes(_padded(len(head)) - len(head))
    start = len(head)
    return Layout(bytes(head), tuple(start + offset for offset in offsets), start + relative)


def encode_value(value: Any) -> bytes:
    """A metadata value with its type in front."""
    match value:
        case RawValue():
            return value
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            kind, code = (
                (_I64, "q") if value < 0 else (_U32, "I") if value < 1 << 32 else (_U64, "Q")
            )
            return struct.pack(f"<I{code}", kind, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _:
            return _encode_array(value)


def _encode_array(value: Any) -> bytes:
    if isinstance(value, list) and value and isinstance(value[0], str):
        body = b"".join(_string(text) for text in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + body
    array = np.asarray(value)
    if array.dtype == np.int64 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)
    return struct.pack("<IIQ", _ARRAY, _ARRAY_TYPES[array.dtype], array.size) + array.tobytes()


def write_header_only(
    path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorPlan]
) -> int:
    """A file of the header alone, put in place at once; the bytes it would have in full."""
    plan = layout(metadata, tensors)
    part = Path(f"{path}.part")
    part.write_bytes(plan.header)
    os.replace(part, path)
    return plan.total_bytes


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
        restart: bool = False,
    ) -> None:
        """ConfigError where OUT.part belongs to another plan or process, or the disk is full."""
        self.path = path
        self.tensors = tuple(tensors)
        self.layout = layout(metadata, tensors)
        self._part = Path(f"{path}.part")
        self._journal_path = Path(f"{path}.part.journal")
        self._plan = _plan_hash(self.layout.header, sources)
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            self.next_tensor = 0 if restart else self._done_before()
            self._check_space()
            if self.next_tensor == 0:
                self._begin()
            self._journal = self._journal_path.open("a", encoding="utf-8")
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
            lines = self._journal_path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return 0
        # The last line may be torn; what it would have said is then done again.
        entries = [json.loads(line) for line in lines[:-1]]
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


def _plan_hash(header: bytes, sources: Iterable[Path]) -> str:
    digest = xxhash.xxh3_64(header)
    for source in sources:
        status = source.stat()
        digest.update(f"{source.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _padded(byte_count: int) -> int:
    return -(-byte_count // ALIGNMENT) * ALIGNMENT
