"""Machines whose GPU will not do, over a made-up driver: said before anything is created."""

from types import SimpleNamespace

import pytest

from shared.errors import ConfigError, GpuNotShared
from streamd.gpu import cuda_device


class PoorDriver:
    """One GPU; `abilities` by the names of the driver's attributes. It cannot create contexts."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="mapping",
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED="descriptors",
    )

    def __init__(self, count=1, **abilities):
        self.count = count
        self.abilities = abilities

    def cuDeviceGetCount(self):
        return 0, self.count

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetUuid(self, device):
        return 0, SimpleNamespace(bytes=bytes(16))

    def cuDeviceGetName(self, length, device):
        return 0, b"Poor GPU\0".ljust(length)

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, self.abilities[attribute]


@pytest.mark.parametrize("lacking", ["mapping", "descriptors"])
def test_a_driver_that_cannot_share_is_refused_with_a_way_out(monkeypatch, lacking):
    driver = PoorDriver(**{"mapping": 1, "descriptors": 1, lacking: 0})
    monkeypatch.setattr(cuda_device, "load_driver", lambda: driver)
    with pytest.raises(GpuNotShared, match=r"Poor GPU cannot share its memory.*WSL2"):
        cuda_device.CudaDevice(0)


class DishonestDriver(PoorDriver):
    """It says that it can share, and refuses when it comes to it; contexts it has."""

    CUmemAllocationGranularity_flags = SimpleNamespace(
        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED="recommended"
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)

    def __init__(self):
        super().__init__(mapping=1, descriptors=1)
        self.contexts = self.allocations = 0

    def CUmemAllocationProp(self):
        return SimpleNamespace(location=SimpleNamespace())

    def cuDevicePrimaryCtxRetain(self, device):
        self.contexts += 1
        return 0, "context"

    def cuDevicePrimaryCtxRelease(self, device):
        self.contexts -= 1
        return (0,)

    def cuCtxSetCurrent(self, context):
        return (0,)

    def cuMemGetAllocationGranularity(self, properties, kind):
        return 0, 1 << 21

    def cuMemCreate(self, size_bytes, properties, flags):
        self.allocations += 1
        return 0, "handle"

    def cuMemRelease(self, handle):
        self.allocations -= 1
        return (0,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED"), None


def test_a_driver_that_only_says_that_it_can_is_refused_too(monkeypatch):
    driver = DishonestDriver()
    monkeypatch.setattr(cuda_device, "load_driver", lambda: driver)
    with pytest.raises(GpuNotShared, match="cuMemExportToShareableHandle says CUDA_ERROR_NOT_SUPP"):
        cuda_device.CudaDevice(0)
    assert (driver.contexts, driver.allocations) == (0, 0)


@pytest.mark.parametrize(("count", "remedy"), [(0, "--device cpu"), (2, "cuda:0 to cuda:1")])
def test_a_device_that_is_not_there_is_refused(monkeypatch, count, remedy):
    monkeypatch.setattr(cuda_device, "load_driver", lambda: PoorDriver(count))
    with pytest.raises(ConfigError, match="no cuda:2") as caught:
        cuda_device.CudaDevice(2)
    assert remedy in caught.value.remedy
