"""Uploads on an NVIDIA GPU, through torch."""

import torch
from torch import Tensor

from infer.resident.copy_lane import CudaStreams
from shared.cuda import pin_host, unpin_host
from shared.errors import GpuError


class CudaUploadDevice(CudaStreams):
    """See infer.uploads.device.UploadDevice."""

    def __init__(self, ordinal: int) -> None:
        device = torch.device("cuda", ordinal)
        torch.cuda.synchronize(device)  # makes its context this thread's
        super().__init__(device)
        self.name = str(device)
        self._memory: list[Tensor] = []

    def free_bytes(self) -> int:
        """What is free beside our own context, which is there by now."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(free_bytes)

    def allocate(self, size_bytes: int) -> int:
        return self._keep(size_bytes, "GPU", device=self._device)

    def allocate_pinned(self, size_bytes: int) -> int:
        return self._keep(size_bytes, "pinned", pin_memory=True)

    def _keep(self, size_bytes: int, kind: str, **where: object) -> int:
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, **where)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise GpuError(
                f"{size_bytes / 1e6:,.0f} MB of {kind} memory cannot be had: {error}",
                "give a smaller --gpu-cache, or end other programs",
            ) from error
        self._memory.append(memory)
        return memory.data_ptr()

    def pin(self, address: int, size_bytes: int) -> bool:
        return pin_host(self._driver, address, size_bytes, read_only=True)

    def unpin(self, address: int) -> None:
        unpin_host(self._driver, address)
