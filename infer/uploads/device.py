"""What uploads need of a GPU. infer/uploads/cuda_device.py is the real one."""

from typing import Any, Protocol

from infer.resident.streamed_layers import Stream
from shared.device_copies import Copy


class Event(Protocol):
    """As torch.cuda.Event: a place in a stream, that of the last `record`."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None:
        """Wait until the GPU has come there; without a `record` it has."""


class UploadDevice(Protocol):
    """One GPU, and two streams of it: work in each is done in order, and beside the other's.

    name: torch's; what is allocated stays as long as the device does.
    """

    name: str

    @property
    def copying(self) -> Stream: ...

    def computing(self) -> Stream:
        """What kernels are launched on at present."""

    def event(self) -> Event: ...

    def copy(self, copy: Copy) -> None:
        """Queue it on `copying`. Its source is pinned and does not change before it is done."""

    def allocate(self, size_bytes: int) -> int:
        """The address of new device memory. GpuError where that is not had."""

    def allocate_pinned(self, size_bytes: int) -> int:
        """The address of new host memory that copies can come from."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """Lock host memory that is mapped for reading only; False where the driver refuses."""

    def unpin(self, address: int) -> None:
        """What `pin` has locked from that address on; GpuError where it has not."""
