"""Where copies come from: pinned slots, or pieces of a ring."""

import ctypes
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from fake_upload_device import FakeUploadDevice

from infer.uploads.bounce import PIECE_COUNT, BounceRing
from infer.uploads.host_slots import HostSlots
from shared.device_copies import Copy
from shared.experts import SizeClass

PAGE = mmap.PAGESIZE


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 100, 300, 64 * PIECE_COUNT, 999])
def test_a_source_may_change_once_it_has_been_copied_from(late, size_bytes):
    device = FakeUploadDevice(late_copies=late)
    ring = BounceRing(device, piece_bytes=64)
    source = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    expected = source.tobytes()
    target = device.allocate(size_bytes + 1)
    ring.copy(Copy(target, source.ctypes.data, size_bytes))
    source[:] = 0
    device.finish()
    assert ctypes.string_at(target, size_bytes + 1) == expected + b"\xff"


class Host:
    """Two slots of three stretches, as a client maps them."""

    def __init__(self, align=PAGE, stays=True):
        self.memory = mmap.mmap(-1, 64 * PAGE)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        attached = SimpleNamespace(class_slot_counts=[2], align=align)
        self.mapping = SimpleNamespace(
            attached=attached, arena_address=self.address, stays=stays, keepalive=self.memory
        )
        self.experts = SimpleNamespace(classes=(SizeClass(0, (PAGE, PAGE, 100), (0,), 2),))

    def slots(self, device):
        return HostSlots(device, BounceRing(device, 64), self.mapping, self.experts)


def test_a_slot_is_pinned_when_it_is_first_copied_from():
    device, host = FakeUploadDevice(), Host()
    slots = host.slots(device)
    target = device.allocate(PAGE)
    for slot in (1, 1, 0):
        slots.copy(slot, [Copy(target, host.address + 6 * PAGE * slot + 7, 100)])
    assert device.pinned == {host.address: 6 * PAGE, host.address + 6 * PAGE: 6 * PAGE}
    assert (device.pin_tries, device.copy_count) == (2, 3)
    slots.close()
    assert device.pinned == {}


class Interrupted(FakeUploadDevice):
    """Ctrl-C in the middle of the first pin, when the driver has done it or has not."""

    def __init__(self, is_done):
        super().__init__()
        self._is_done = is_done

    def pin(self, address, size_bytes):
        if self.pin_tries:
            return super().pin(address, size_bytes)
        self.pin_tries += 1
        if self._is_done:
            super().pin(address, size_bytes)
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_done", [False, True])
def test_a_slot_whose_pin_was_broken_off_is_not_pinned_for_good(is_done):
    device, host = Interrupted(is_done), Host()
    slots = host.slots(device)
    copies = [Copy(device.allocate(PAGE), host.address, 100)]
    with pytest.raises(KeyboardInterrupt):
        slots.copy(0, copies)
    assert device.pinned == {}
    slots.copy(0, copies)
    assert device.pinned == {host.address: 6 * PAGE}
    slots.close()
    assert device.pinned == {}


@pytest.mark.parametrize("how", [{"align": 512}, {"stays": False}])
def test_slots_that_share_pages_or_may_lose_them_are_not_pinned(how):
    device, host = FakeUploadDevice(), Host(**how)
    host.slots(device).copy(0, [Copy(device.allocate(PAGE), host.address, 100)])
    assert (device.pin_tries, device.copy_count) == (0, 2)


def test_a_driver_that_refuses_is_asked_once_and_told_of_once(caplog):
    device, host = FakeUploadDevice(refuses=True), Host()
    slots = host.slots(device)
    for slot in (0, 1, 0):
        slots.copy(slot, [Copy(device.allocate(PAGE), host.address, 64)])
    assert (device.pin_tries, device.copy_count) == (1, 3)
    assert len(caplog.messages) == 1
