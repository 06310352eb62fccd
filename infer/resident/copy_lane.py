"""The copies of streamed layers on an NVIDIA GPU: a stream of its own, pinned memory to copy from.

Pinned memory is copied at the bus's speed and without the host's help. The daemon's is mapped for
reading only, which not every driver pins; from memory that is not pinned copies are right as well.
"""

import logging
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

from shared.cuda import call, load_driver, pin_host, unpin_host
from shared.device_copies import Copy
from shared.errors import GpuError
from shared.streamed import BUFFERS

log = logging.getLogger(__name__)


class CudaStreams:
    """A GPU's stream for computing, and one beside it for copies from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = load_driver()
        self.copying = torch.cuda.Stream(device)

    def computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def copy(self, copy: Copy) -> None:
        call(self._driver, "cuMemcpyHtoDAsync", *copy, self.copying.cuda_stream)


class CudaLane(CudaStreams):
    """See infer.resident.streamed_layers.CopyLane.

    host: (address, bytes) of stretches of host memory, ascending, each on pages of its own; each
    copy comes from one of them. They are let go of with this object, and then `keepalive` is.
    """

    def __init__(
        self,
        device: torch.device,
        buffer_bytes: int,
        host: Iterable[tuple[int, int]],
        keepalive: object,
    ) -> None:
        super().__init__(device)
        memory = torch.empty((BUFFERS, buffer_bytes), dtype=torch.uint8, device=device)
        self.buffers = tuple(memory[at].data_ptr() for at in range(BUFFERS))
        pinned = pin(self._driver, joined(host))
        ended = weakref.finalize(
            self, _let_go, self._driver, self.copying, pinned, memory, keepalive
        )
        ended.atexit = False  # the driver may be gone by then


def _let_go(driver: Any, copying: torch.cuda.Stream, pinned: list[int], *_memory: object) -> None:
    """When no copy is under way any more. After a fatal error the driver lets nothing go."""
    with suppress(GpuError, RuntimeError):
        copying.synchronize()
        for address in pinned:
            unpin_host(driver, address)


def pin(driver: Any, ranges: list[tuple[int, int]]) -> list[int]:
    """Addresses of those that the driver has pinned: all, or those before the first refusal."""
    pinned = []
    for address, size_bytes in ranges:
        if not pin_host(driver, address, size_bytes, read_only=True):
            log.warning(
                "the driver does not pin the daemon's memory: streamed layers are copied slowly"
            )
            break
        pinned.append(address)
    return pinned


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes), ascending: those that follow without a gap as one."""
    found: list[tuple[int, int]] = []
    for address, size_bytes in ranges:
        if found and sum(found[-1]) == address:
            first, bytes_before = found.pop()
            found.append((first, bytes_before + size_bytes))
        else:
            found.append((address, size_bytes))
    return found
