"""Opening a model file so that reads go past the page cache.

The daemon is the cache: a second copy of the file in the page cache would only take memory from
its slots. Some filesystems refuse O_DIRECT, as a flag or at the first read; those are read
buffered, and every range read is dropped from the page cache again.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ModelError

ALIGN_FALLBACK_BYTES = 4096
ALIGN_MAX_BYTES = 1 << 20

# struct statx, 256 bytes, as far as it is used:
#   0  u32 stx_mask               which fields the kernel has filled in
# 152  u32 stx_dio_mem_align      alignment of the memory, 0 where direct I/O is not supported
# 156  u32 stx_dio_offset_align   alignment of the file offset and of the length
STATX_BYTES = 256
STATX_DIO_AT = 152
STATX_DIOALIGN = 0x2000
AT_EMPTY_PATH = 0x1000


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A model file. `align_bytes` is a power of two that holds for offsets, lengths and memory."""

    fd: int
    path: Path
    size_bytes: int
    mtime_ns: int
    align_bytes: int
    direct: bool
    reason: str  # why it is not direct; empty where it is

    def close(self) -> None:
        os.close(self.fd)

    def change(self) -> str:
        """How the open file differs from what it was when it was opened; empty if it does not."""
        now = os.fstat(self.fd)
        if now.st_size != self.size_bytes:
            return (
                f"{self.path} is not the file that was opened: its size has changed from"
                f" {self.size_bytes} to {now.st_size} bytes"
            )
        if now.st_mtime_ns != self.mtime_ns:
            return f"{self.path} is not the file that was opened: it has been written to"
        return ""

    def forget(self, offset: int, size_bytes: int) -> None:
        """After a buffered read: the page cache need not keep what a slot holds."""
        os.posix_fadvise(self.fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def dio_align_bytes(fd: int) -> int:
    """What direct I/O on this file must be aligned to, in bytes; 0 where it is not supported.

    STATX_DIOALIGN came with Linux 6.1 and not every filesystem fills it in: the answer is then
    4096, and the caller has to try.
    """
    statx = getattr(ctypes.CDLL(None), "statx", None)
    answer = ctypes.create_string_buffer(STATX_BYTES)
    if statx is None or statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer) != 0:
        return ALIGN_FALLBACK_BYTES
    (mask,) = struct.unpack_from("=I", answer, 0)
    if not mask & STATX_DIOALIGN:
        return ALIGN_FALLBACK_BYTES
    memory, offset = struct.unpack_from("=II", answer, STATX_DIO_AT)
    return max(memory, offset) if memory and offset else 0


def open_file(
    path: Path,
    *,
    align_of: Callable[[int], int] = dio_align_bytes,
    preadv: Callable[[int, list[mmap.mmap], int], int] = os.preadv,
) -> OpenFile:
    """Opens `path` for direct reads, or for buffered ones where those are refused.

    Raises ModelError when it cannot be opened or read, or is not a regular file.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file", "name a GGUF file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            align_bytes = align_of(fd)
            reason = _refusal(fd, align_bytes, preadv)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise ModelError(
            f"cannot open {path}: {error.strerror}", "check the path, its permissions and the disk"
        ) from None
    if reason:
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        align_bytes = ALIGN_FALLBACK_BYTES
    return OpenFile(
        fd, path, status.st_size, status.st_mtime_ns, align_bytes, direct=not reason, reason=reason
    )


def _refusal(fd: int, align_bytes: int, preadv: Callable[[int, list[mmap.mmap], int], int]) -> str:
    """Makes `fd` direct; why that cannot be, or an empty string. Raises OSError for other faults.

    Some filesystems accept the flag and refuse the reads, so one read decides.
    """
    if align_bytes == 0:
        return "the filesystem does not support O_DIRECT on this file"
    if align_bytes & (align_bytes - 1) or align_bytes > ALIGN_MAX_BYTES:
        return f"the filesystem asks for an alignment of {align_bytes} bytes"
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        with mmap.mmap(-1, max(align_bytes, mmap.PAGESIZE)) as trial:
            preadv(fd, [trial], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return f"the filesystem refuses O_DIRECT: {error.strerror}"
    return ""
