"""What the daemon needs of a GPU. streamd/gpu/cuda_device.py is the real one."""

from collections.abc import Sequence
from typing import Protocol

from shared.device_copies import Copy
from shared.errors import StreamError


class GpuMemory(Protocol):
    """Device memory of ours. `fd`: a descriptor of it that other processes can import."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def fd(self) -> int: ...

    def close(self) -> None:
        """Nothing uses it here any more; it stays as long as another process maps it."""


class CopyQueue(Protocol):
    """Used by one thread, which calls `reap` again and again while `copying`.

    CUDA has no event that can be polled together with sockets. On an H200, 5 MB are known to be
    there 122 us after `submit` by spinning, 132 us by looking every 50 us, 208 us through a thread
    that waits in the driver, and 226 us through cuLaunchHostFunc and an eventfd: so we look.
    """

    def submit(self, token: int, copies: Sequence[Copy]) -> None:
        """Queue copies; `reap` returns `token` once all of them are done.

        GpuError if they cannot be queued: nothing is under way then, and the token never comes.
        """
        ...

    def reap(self) -> list[tuple[int, StreamError | None]]:
        """Tokens whose copies have ended, in the order of `submit`, and what went wrong."""
        ...

    @property
    def copying(self) -> bool:
        """Whether tokens have yet to come."""
        ...

    def drain(self) -> None:
        """Wait until no copy is under way; `reap` tells how they went."""
        ...


class GpuDevice(CopyQueue, Protocol):
    """One GPU; its copies are those of CopyQueue."""

    @property
    def ordinal(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def uuid(self) -> str:
        """Hexadecimal; see shared.cuda.device_uuid."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total, as of now; what this process's own context takes is not free."""
        ...

    @property
    def granularity_bytes(self) -> int:
        """Allocations are multiples of it."""
        ...

    def allocate(self, size_bytes: int) -> GpuMemory:
        """At least `size_bytes`, rounded up to the granularity. GpuError where that is not had."""
        ...

    def pin(self, address: int, size_bytes: int) -> bool:
        """Lock host memory so that copies from it run at full speed, without our thread.

        False where that is refused: copies from it work all the same, only slower.
        """
        ...

    def unpin(self, address: int) -> None: ...

    def close(self) -> None: ...
