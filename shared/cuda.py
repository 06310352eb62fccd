"""What both sides need of CUDA's driver interface: calls that raise, and memory that is shared.

cuda-bindings comes with torch's CUDA wheels; a machine without a GPU need not have it, so it is
imported when a GPU is asked for.

    owner      create -> export a descriptor -> map          the physical memory is freed when the
    importer            import the descriptor -> map         last mapping and descriptor are gone
"""

import ctypes
import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from shared.errors import GpuError

log = logging.getLogger(__name__)

_NAME_LENGTH = 96
_READ_ONLY = 0x08  # cuda.h: CU_MEMHOSTREGISTER_READ_ONLY
WITHOUT_GPU = "--device cpu does without the GPU"
NO_DRIVER_REMEDY = "leave --gpu-cache, --vram and --device cuda:N out, or say --device cpu"
_REMEDIES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "give a smaller --gpu-cache, or end other programs on the GPU",
    "CUDA_ERROR_NO_DEVICE": f"see what nvidia-smi says; {WITHOUT_GPU}",
    "CUDA_ERROR_NOT_SUPPORTED": f"a newer driver may help; {WITHOUT_GPU}",
}


def load_driver() -> Any:
    """The module cuda.bindings.driver, initialised. GpuError where it or the driver is missing."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        if not _has_driver_library():
            raise GpuError("there is no NVIDIA driver", NO_DRIVER_REMEDY) from error
        raise GpuError(
            f"cuda-bindings cannot be imported: {error}",
            f"install torch with CUDA, or pip install cuda-bindings; {WITHOUT_GPU}",
        ) from error
    try:
        call(driver, "cuInit", 0)
    except RuntimeError as error:  # libcuda.so.1 is not there
        raise GpuError(f"there is no NVIDIA driver: {error}", NO_DRIVER_REMEDY) from error
    return driver


def _has_driver_library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value (or tuple of values) of a driver function; GpuError with what it says."""
    function: Callable[..., tuple[Any, ...]] = getattr(driver, name)
    status, *values = function(*arguments)
    check(driver, name, status)
    return values[0] if len(values) == 1 else tuple(values)


def check(driver: Any, name: str, status: Any) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        cause = getattr(status, "name", str(status))
        raise GpuError(
            f"{name} says {cause}",
            _REMEDIES.get(cause, f"see nvidia-smi and the kernel's log; {WITHOUT_GPU}"),
        )


def device_uuid(driver: Any, device: Any) -> str:
    """The same for every process, whatever it calls the device."""
    return bytes(call(driver, "cuDeviceGetUuid", device).bytes).hex()


def device_name(driver: Any, device: Any) -> str:
    name: bytes = call(driver, "cuDeviceGetName", _NAME_LENGTH, device)
    return name.split(b"\0")[0].decode(errors="replace").strip()


class MappedMemory:
    """An allocation, by handle, in this process's GPU address space.

    address: of its first byte; size_bytes: a multiple of the device's granularity; writable: for
    this process. The handle is given up here, whatever happens. `close`, or the end of the object,
    unmaps: whoever does it sees to it that no kernel or copy uses the memory any more.
    """

    def __init__(
        self, driver: Any, ordinal: int, handle: Any, size_bytes: int, writable: bool
    ) -> None:
        self.size_bytes = size_bytes
        self.writable = writable
        try:
            pointer = call(driver, "cuMemAddressReserve", size_bytes, 0, 0, 0)
            try:
                call(driver, "cuMemMap", pointer, size_bytes, 0, handle, 0)
                self._grant_access(driver, ordinal, pointer)
            except BaseException:
                _unmap(driver, pointer, size_bytes)
                raise
        finally:
            call(driver, "cuMemRelease", handle)  # the mapping keeps the memory
        self.address = int(pointer)
        self._finalizer = weakref.finalize(self, _unmap, driver, pointer, size_bytes)
        self._finalizer.atexit = False  # the driver may be gone by then, and frees it all anyway

    def _grant_access(self, driver: Any, ordinal: int, pointer: Any) -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        flags = driver.CUmemAccess_flags
        read_only, read_write = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        )
        if not self.writable:
            access.flags = read_only
            status, *_ = driver.cuMemSetAccess(pointer, self.size_bytes, [access], 1)
            if status == driver.CUresult.CUDA_SUCCESS:
                return
            self.writable = True  # this driver maps device memory for both or not at all
        access.flags = read_write
        call(driver, "cuMemSetAccess", pointer, self.size_bytes, [access], 1)

    def close(self) -> None:
        self._finalizer()


def _unmap(driver: Any, pointer: Any, size_bytes: int) -> None:
    """Each on its own: what was not mapped yet still has its addresses given back."""
    driver.cuMemUnmap(pointer, size_bytes)
    driver.cuMemAddressFree(pointer, size_bytes)


def pin_host(driver: Any, address: int, size_bytes: int, read_only: bool = False) -> bool:
    """Lock host memory so that copies from it run at full speed, without our thread.

    read_only: it is mapped for reading only. False where the driver refuses.
    """
    status, *_ = driver.cuMemHostRegister(address, size_bytes, _READ_ONLY if read_only else 0)
    if status == driver.CUresult.CUDA_SUCCESS:
        return True
    log.debug("host memory cannot be pinned: %s", status)
    return False


def unpin_host(driver: Any, address: int) -> None:
    call(driver, "cuMemHostUnregister", address)


def shareable(driver: Any, ordinal: int) -> Any:
    """The properties of allocations that can be exported as a descriptor: CUmemAllocationProp."""
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    wanted.requestedHandleTypes = fd_handle_type(driver)
    return wanted


def fd_handle_type(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
