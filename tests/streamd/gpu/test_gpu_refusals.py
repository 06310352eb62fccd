"""Machines whose GPU will not do, over a made-up driver: said before anything is created."""

from types import SimpleNamespace

import pytest

from shared.errors import ConfigError, GpuError
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
    with pytest.raises(GpuError, match=r"Poor GPU cannot share its memory.*WSL2") as caught:
        cuda_device.CudaDevice(0)
    assert "--gpu-cache 0" in caught.value.remedy


@pytest.mark.parametrize(("count", "remedy"), [(0, "--gpu-cache 0"), (2, "cuda:0 to cuda:1")])
def test_a_device_that_is_not_there_is_refused(monkeypatch, count, remedy):
    monkeypatch.setattr(cuda_device, "load_driver", lambda: PoorDriver(count))
    with pytest.raises(ConfigError, match="no cuda:2") as caught:
        cuda_device.CudaDevice(2)
    assert remedy in caught.value.remedy
