"""The real device: what is uploaded is there, for other processes too, and goes with the last."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shared import shm
from shared.device_copies import Copy
from shared.errors import ConfigError, GpuError
from streamd.gpu.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

IMPORTER = Path(__file__).with_name("gpu_importer.py")
SIZE_BYTES = 256 << 20
COPY_BYTES = 5 << 20


@pytest.fixture
def device():
    try:
        opened = CudaDevice(0)
    except (GpuError, ConfigError) as error:
        pytest.skip(str(error))
    yield opened
    opened.close()


@pytest.fixture
def host():
    """Shared memory, sealed as the daemon's arena is, with random bytes: (address, bytes)."""
    fd = shm.create("host", SIZE_BYTES)
    memory = shm.map_writable(fd, SIZE_BYTES)
    shm.seal_readonly(fd)
    memory[:] = np.random.default_rng(0).bytes(SIZE_BYTES)
    yield shm.address(memory), memory
    os.close(fd)


def finish(device):
    ended = []
    while device.copying:
        ended += device.reap()
    return ended


def downloaded(device, address, size_bytes):
    held = ctypes.create_string_buffer(size_bytes)
    device.download(ctypes.addressof(held), address, size_bytes)
    return held.raw


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_arrive_in_order(device, host, pinned):
    address, memory = host
    target = device.allocate(SIZE_BYTES)
    if pinned:
        assert all(device.pin(address + at * COPY_BYTES, COPY_BYTES) for at in range(20))
    for at in range(20):
        offset = at * COPY_BYTES
        third = COPY_BYTES // 3
        device.submit(
            at,
            [
                Copy(target.address + o, address + o, third)
                for o in range(offset, offset + 3 * third, third)
            ],
        )
    assert finish(device) == [(at, None) for at in range(20)]
    for at in range(20):
        offset = at * COPY_BYTES
        size_bytes = COPY_BYTES // 3 * 3
        held = downloaded(device, target.address + offset, size_bytes)
        assert held == memory[offset : offset + size_bytes]
    if pinned:
        for at in range(20):
            device.unpin(address + at * COPY_BYTES)
    target.close()


def test_what_cannot_be_pinned_is_no_error(device):
    assert not device.pin(1 << 40, COPY_BYTES)


def test_a_copy_that_cannot_be_queued_is_an_error(device, host):
    with pytest.raises(GpuError, match="CUDA_ERROR_INVALID_VALUE"):
        device.submit(1, [Copy(1 << 50, host[0], COPY_BYTES)])
    assert not device.copying


def test_more_memory_than_there_is_is_refused(device):
    with pytest.raises(GpuError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        device.allocate(device.memory_bytes()[1] * 2)
    assert "--gpu-cache" in caught.value.remedy


def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match="cuda:63"):
        CudaDevice(63)


def start_importer(target):
    return subprocess.Popen(
        [sys.executable, IMPORTER, str(target.fd), str(target.size_bytes), str(COPY_BYTES)],
        pass_fds=[target.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_another_process_reads_it_and_keeps_it_until_it_ends(device, host, end):
    address, memory = host
    free_bytes, _ = device.memory_bytes()
    target = device.allocate(SIZE_BYTES)
    device.submit(1, [Copy(target.address, address, COPY_BYTES)])
    finish(device)
    importer = start_importer(target)
    digest, writable = importer.stdout.readline().split()
    assert digest == hashlib.sha256(memory[:COPY_BYTES]).hexdigest()
    assert writable == "False"
    target.close()
    assert free_bytes - device.memory_bytes()[0] >= SIZE_BYTES, "the importer has it still"
    if end == "kill":
        importer.send_signal(signal.SIGKILL)
    importer.stdin.close()
    importer.wait(30)
    importer.stdout.close()
    deadline_s = time.monotonic() + 10
    while free_bytes - device.memory_bytes()[0] > 64 << 20 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert free_bytes - device.memory_bytes()[0] <= 64 << 20, "all of it has come back"
