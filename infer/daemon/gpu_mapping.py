"""The daemon's GPU memory, imported into a client."""

import logging
from typing import Any

from infer.daemon.mapping import TierMemory
from shared.cuda import MappedMemory, call, device_uuid, fd_handle_type, load_driver
from shared.errors import GpuError
from shared.wire import Attached

log = logging.getLogger(__name__)


def map_gpu_tier(attached: Attached, arena_fd: int, resident_fd: int) -> TierMemory:
    """Both allocations in the primary context of the daemon's device, the one torch uses too.

    Read-only where the driver can do that. GpuError where the device is hidden from this process,
    or the driver refuses.
    """
    driver = load_driver()
    ordinal = ordinal_of(driver, attached)
    device = call(driver, "cuDeviceGet", ordinal)
    call(driver, "cuCtxSetCurrent", call(driver, "cuDevicePrimaryCtxRetain", device))
    arena = import_memory(driver, ordinal, arena_fd, attached.arena_bytes)
    resident = import_memory(driver, ordinal, resident_fd, attached.resident_bytes)
    if arena.writable:
        log.info("this driver maps the daemon's GPU memory for writing too")
    return TierMemory(f"cuda:{ordinal}", True, arena.address, resident.address, (arena, resident))


def ordinal_of(driver: Any, attached: Attached) -> int:
    """What this process calls the daemon's device."""
    for ordinal in range(call(driver, "cuDeviceGetCount")):
        if device_uuid(driver, call(driver, "cuDeviceGet", ordinal)) == attached.device_uuid:
            return ordinal
    raise GpuError(
        f"this process does not see the daemon's GPU, there called cuda:{attached.device_ordinal}",
        "unset CUDA_VISIBLE_DEVICES, or compute with --device cpu",
    )


def import_memory(driver: Any, ordinal: int, fd: int, size_bytes: int) -> MappedMemory:
    """Map the allocation behind `fd`, which stays the caller's, in the current context."""
    handle = call(driver, "cuMemImportFromShareableHandle", fd, fd_handle_type(driver))
    return MappedMemory(driver, ordinal, handle, size_bytes, writable=False)
