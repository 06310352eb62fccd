"""An NVIDIA GPU through cuda-bindings: shared memory, pinned host memory, copies."""

import os
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shared.arena import round_up
from shared.cuda import (
    WITHOUT_GPU,
    MappedMemory,
    call,
    check,
    device_name,
    device_uuid,
    fd_handle_type,
    load_driver,
    pin_host,
    shareable,
    unpin_host,
)
from shared.device_copies import Copy
from shared.errors import ConfigError, GpuError, StreamError
from streamd.gpu.sharing import not_shared, require_sharing


class CudaMemory:
    """See streamd.gpu.device.GpuMemory."""

    def __init__(self, driver: Any, ordinal: int, size_bytes: int) -> None:
        handle = call(driver, "cuMemCreate", size_bytes, shareable(driver, ordinal), 0)
        try:
            fd = call(driver, "cuMemExportToShareableHandle", handle, fd_handle_type(driver), 0)
        except BaseException:
            call(driver, "cuMemRelease", handle)
            raise
        self.fd = int(fd)
        try:
            self._mapped = MappedMemory(driver, ordinal, handle, size_bytes, writable=True)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = self._mapped.address
        self.size_bytes = size_bytes

    def close(self) -> None:
        self._mapped.close()
        os.close(self.fd)


class CudaDevice:
    """See streamd.gpu.device.GpuDevice. Making one creates its context, about 0.5 GB of memory."""

    def __init__(self, ordinal: int) -> None:
        self._driver = driver = load_driver()
        count = call(driver, "cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise ConfigError(
                f"there is no cuda:{ordinal}: this machine shows {count} CUDA devices",
                f"give cuda:0 to cuda:{count - 1}" if count else WITHOUT_GPU,
            )
        self.ordinal = ordinal
        self._device = call(driver, "cuDeviceGet", ordinal)
        self.uuid = device_uuid(driver, self._device)
        self.name = device_name(driver, self._device)
        require_sharing(driver, self._device, self.name)
        call(driver, "cuCtxSetCurrent", call(driver, "cuDevicePrimaryCtxRetain", self._device))
        self.granularity_bytes = int(
            call(
                driver,
                "cuMemGetAllocationGranularity",
                shareable(driver, ordinal),
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        self._try_sharing()
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = call(driver, "cuStreamCreate", non_blocking)
        self._idle_events: list[Any] = []
        self._in_flight: deque[tuple[int, Any]] = deque()  # (token, event), in stream order

    def _try_sharing(self) -> None:
        """Some drivers say that they can and then refuse (containers, virtual machines)."""
        try:
            self.allocate(self.granularity_bytes).close()
        except GpuError as error:
            self._driver.cuDevicePrimaryCtxRelease(self._device)
            raise not_shared(self.name, error.message) from error

    # Memory

    def memory_bytes(self) -> tuple[int, int]:
        free_bytes, total_bytes = call(self._driver, "cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def allocate(self, size_bytes: int) -> CudaMemory:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        return CudaMemory(self._driver, self.ordinal, size_bytes)

    def pin(self, address: int, size_bytes: int) -> bool:
        return pin_host(self._driver, address, size_bytes)

    def unpin(self, address: int) -> None:
        unpin_host(self._driver, address)

    # Copies

    def submit(self, token: int, copies: Sequence[Copy]) -> None:
        driver, stream = self._driver, self._stream
        event = self._idle_events.pop() if self._idle_events else self._new_event()
        copy = driver.cuMemcpyHtoDAsync
        try:
            for target, source, size_bytes in copies:
                (status,) = copy(target, source, size_bytes, stream)
                if status:  # compared with a name it takes as long as the call
                    check(driver, "cuMemcpyHtoDAsync", status)
            call(driver, "cuEventRecord", event, stream)
        except GpuError:
            with suppress(GpuError):  # the first error is the one to tell
                call(driver, "cuStreamSynchronize", stream)
            self._idle_events.append(event)
            raise
        self._in_flight.append((token, event))

    def _new_event(self) -> Any:
        without_timing = self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return call(self._driver, "cuEventCreate", without_timing)

    @property
    def copying(self) -> bool:
        return bool(self._in_flight)

    def reap(self) -> list[tuple[int, StreamError | None]]:
        ended: list[tuple[int, StreamError | None]] = []
        while self._in_flight:
            token, event = self._in_flight[0]
            status, *_ = self._driver.cuEventQuery(event)
            if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                break
            self._in_flight.popleft()
            self._idle_events.append(event)
            try:
                check(self._driver, "a copy to the GPU", status)
            except GpuError as error:
                ended.append((token, error))
            else:
                ended.append((token, None))
        return ended

    def download(self, target: int, source: int, size_bytes: int) -> None:
        """Device to host, waited for: for checks of what has been uploaded."""
        call(self._driver, "cuMemcpyDtoHAsync", target, source, size_bytes, self._stream)
        call(self._driver, "cuStreamSynchronize", self._stream)

    def drain(self) -> None:
        with suppress(GpuError):  # after a fatal error nothing is under way any more
            call(self._driver, "cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Errors are of no interest any more: the context goes, and all with it."""
        self.drain()
        self._driver.cuStreamDestroy(self._stream)
        self._driver.cuDevicePrimaryCtxRelease(self._device)
