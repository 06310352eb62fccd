"""What identifies a model file while it is in use, and the check that it still is the same."""

import os
from pathlib import Path
from typing import NamedTuple, Self

from shared.errors import ModelChanged

RELOAD = "streamd reload takes the file as it is now"


class Fingerprint(NamedTuple):
    """A file's identity. A replaced file has another inode, a rewritten one another size or time.

    A tuple of integers, so that it crosses the wire as it is.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of_fd(cls, fd: int) -> Self:
        return cls._of(os.fstat(fd))

    def check_fd(self, fd: int, path: Path) -> None:
        """ModelChanged if the open file is another one; `path` is for the message only."""
        self._compare(self.of_fd(fd), path)

    def check_path(self, path: Path) -> None:
        """ModelChanged if `path` is gone, unreadable, or names a file that differs."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise ModelChanged(
                f"{path} was in use and cannot be found any more: {error.strerror}",
                f"put it back; {RELOAD}",
            ) from error
        self._compare(self._of(status), path)

    @classmethod
    def _of(cls, status: os.stat_result) -> Self:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def _compare(self, now: "Fingerprint", path: Path) -> None:
        if now == self:
            return
        if (now.device, now.inode) != (self.device, self.inode):
            change = "it has been replaced"
        elif now.size_bytes != self.size_bytes:
            change = f"its size has changed from {self.size_bytes} to {now.size_bytes} bytes"
        else:
            change = "it has been written to"
        raise ModelChanged(f"{path} is not the file that was opened: {change}", RELOAD)
