"""Uploads on an NVIDIA GPU, through torch."""

import torch
from torch import Tensor

from infer.resident.copy_lane import CudaStreams
from shared.cuda import pin_host, unpin_host
from shared.errors import GpuError
from shared.sizes import size_text


class CudaUploadDevice(CudaStreams):
    """See infer.uploads.device.UploadDevice."""

    def __init__(self, ordinal: int) -> None:
        count = torch.cuda.device_count()
        if ordinal >= count:
            raise GpuError(
                f"--device cuda:{ordinal}: there is no such GPU, torch sees {count}",
                f"give cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}, or --device cpu",
            )
        device = torch.device("cuda", ordinal)
        try:
            torch.cuda.synchronize(device)  # makes its context this thread's
        except RuntimeError as error:
            raise GpuError(
                f"{device} cannot be used: {error}",
                "end other programs on the GPU, or give --device cpu",
            ) from error
        super().__init__(device)
        self.name = str(device)
        self._memory: list[Tensor] = []

    def free_bytes(self) -> int:
        """What is free beside our own context, which is there by now."""
        torch.cuda.empty_cache()  # what an earlier client of this process has had
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(free_bytes)

    def allocate(self, size_bytes: int) -> int:
        remedy = "give a smaller --gpu-cache, or end other programs on the GPU"
        return self._keep(size_bytes, "GPU", remedy, device=self._device)

    def allocate_pinned(self, size_bytes: int) -> int:
        remedy = "end other programs, or give --device cpu"
        return self._keep(size_bytes, "pinned host", remedy, pin_memory=True)

    def _keep(self, size_bytes: int, kind: str, remedy: str, **where: object) -> int:
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, **where)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise GpuError(
                f"{size_text(size_bytes)} of {kind} memory cannot be had: {error}", remedy
            ) from error
        self._memory.append(memory)
        return memory.data_ptr()

    def pin(self, address: int, size_bytes: int) -> bool:
        return pin_host(self._driver, address, size_bytes, read_only=True)

    def unpin(self, address: int) -> None:
        unpin_host(self._driver, address)
