"""Whether GPU memory can be shared between processes here, and what it costs where it cannot."""

from typing import Any

from shared.cuda import call
from shared.errors import GpuNotShared

WITHOUT_SHARING = (
    "a client of the GPU keeps slots and resident tensors of its own there: it begins without any,"
    " uploads for itself alone, and a second one takes as much memory again (infer --gpu-cache SIZE"
    " says how much)"
)


def require_sharing(driver: Any, device: Any, name: str) -> None:
    """GpuNotShared where the driver has no allocations that a descriptor can stand for.

    That is so under WSL2, and with drivers before 450. It needs no context on the device.
    """
    attributes = driver.CUdevice_attribute
    for attribute in (
        attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ):
        if not call(driver, "cuDeviceGetAttribute", attribute, device):
            raise not_shared(name, "WSL2, or an old driver")


def not_shared(name: str, why: str) -> GpuNotShared:
    return GpuNotShared(
        f"{name} cannot share its memory between processes here ({why})",
        "use Linux itself with a current driver; until then infer uploads for itself",
    )
