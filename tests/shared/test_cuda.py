"""CUDA's driver interface over a made-up driver: what goes wrong is said, and nothing is left."""

import importlib
from enum import IntEnum
from types import SimpleNamespace

import pytest

from shared import cuda
from shared.errors import GpuError

MIB = 1 << 20


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_SUPPORTED = 801


class MadeUpDriver:
    """Addresses, mappings and handles are counted; any call can be made to fail."""

    CUresult = Status
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
    )

    def __init__(self, **failing):
        self.failing = failing
        self.reserved, self.mapped, self.released = set(), set(), []
        self.access = None

    def _status(self, name):
        return self.failing.get(name, Status.CUDA_SUCCESS)

    def cuInit(self, flags):
        return (self._status("cuInit"),)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if self._status("cuMemAddressReserve"):
            return self._status("cuMemAddressReserve"), None
        self.reserved.add(0x7000)
        return Status.CUDA_SUCCESS, 0x7000

    def cuMemMap(self, pointer, size, offset, handle, flags):
        if not self._status("cuMemMap"):
            self.mapped.add(pointer)
        return (self._status("cuMemMap"),)

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=SimpleNamespace(type=None, id=None), flags=None)

    def cuMemSetAccess(self, pointer, size, access, count):
        name = "cuMemSetAccess for reading" if access[0].flags == 1 else "cuMemSetAccess"
        if not self._status(name):
            self.access = access[0].flags
        return (self._status(name),)

    def cuMemUnmap(self, pointer, size):
        self.mapped.discard(pointer)
        return (Status.CUDA_SUCCESS,)

    def cuMemAddressFree(self, pointer, size):
        self.reserved.discard(pointer)
        return (Status.CUDA_SUCCESS,)

    def cuMemRelease(self, handle):
        self.released.append(handle)
        return (Status.CUDA_SUCCESS,)


def test_an_error_names_its_cause_and_a_remedy():
    driver = MadeUpDriver(cuInit=Status.CUDA_ERROR_NO_DEVICE)
    with pytest.raises(GpuError, match="cuInit says CUDA_ERROR_NO_DEVICE") as caught:
        cuda.call(driver, "cuInit", 0)
    assert "--device cpu" in caught.value.remedy


def test_memory_that_is_short_has_a_remedy_of_its_own():
    driver = MadeUpDriver(cuMemAddressReserve=Status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(GpuError) as caught:
        cuda.MappedMemory(driver, 0, "handle", MIB, writable=True)
    assert "smaller --gpu-cache" in caught.value.remedy


def no_bindings(name):
    raise ImportError(f"No module named {name!r}")


def no_cdll(name):
    raise OSError(f"{name}: cannot open shared object file")


def test_without_bindings_or_driver_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", no_bindings)
    monkeypatch.setattr(cuda.ctypes, "CDLL", no_cdll)
    with pytest.raises(GpuError, match="no NVIDIA driver") as caught:
        cuda.load_driver()
    assert "--device cpu" in caught.value.remedy
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: None)
    with pytest.raises(GpuError, match="cuda-bindings cannot be imported"):
        cuda.load_driver()

    def no_library(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    driver = SimpleNamespace(cuInit=no_library)
    monkeypatch.setattr(importlib, "import_module", lambda name: driver)
    with pytest.raises(GpuError, match="no NVIDIA driver"):
        cuda.load_driver()


def test_a_mapping_gives_up_its_handle_at_once_and_its_addresses_at_the_end():
    driver = MadeUpDriver()
    memory = cuda.MappedMemory(driver, 0, "handle", MIB, writable=True)
    assert (memory.address, driver.access, driver.released) == (0x7000, 3, ["handle"])
    memory.close()
    memory.close()
    assert not driver.mapped
    assert not driver.reserved


def test_a_mapping_goes_with_its_last_reference():
    driver = MadeUpDriver()
    cuda.MappedMemory(driver, 0, "handle", MIB, writable=False)
    assert not driver.mapped
    assert not driver.reserved


def test_a_mapping_is_read_only_where_the_driver_can():
    driver = MadeUpDriver()
    memory = cuda.MappedMemory(driver, 0, "handle", MIB, writable=False)
    assert (driver.access, memory.writable) == (1, False)
    unable = MadeUpDriver(**{"cuMemSetAccess for reading": Status.CUDA_ERROR_NOT_SUPPORTED})
    memory = cuda.MappedMemory(unable, 0, "handle", MIB, writable=False)
    assert (unable.access, memory.writable) == (3, True)


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_nothing(failing):
    driver = MadeUpDriver(**{failing: Status.CUDA_ERROR_INVALID_VALUE})
    with pytest.raises(GpuError, match=failing):
        cuda.MappedMemory(driver, 0, "handle", MIB, writable=True)
    assert not driver.mapped
    assert not driver.reserved
    assert driver.released == ["handle"]
