"""Finding the daemon's GPU: by what it is, whatever this process calls it."""

from types import SimpleNamespace

import pytest

from infer.daemon import gpu_mapping
from shared.errors import GpuError


class ManyGpus:
    """A driver that shows GPUs by their identity."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, *uuids):
        self.uuids = uuids

    def cuDeviceGetCount(self):
        return 0, len(self.uuids)

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetUuid(self, device):
        return 0, SimpleNamespace(bytes=bytes.fromhex(self.uuids[device]))


def attached(uuid):
    return SimpleNamespace(device_uuid=uuid, device_ordinal=3)


def test_the_same_gpu_has_another_number_here():
    assert gpu_mapping.ordinal_of(ManyGpus("aa" * 16, "bb" * 16), attached("bb" * 16)) == 1


def test_a_gpu_that_is_hidden_from_us_is_an_error():
    with pytest.raises(GpuError, match="there called cuda:3") as caught:
        gpu_mapping.ordinal_of(ManyGpus("aa" * 16), attached("bb" * 16))
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
