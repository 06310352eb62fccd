"""What is let go of when attaching or letting go is itself broken off, or the GPU has failed."""

import errno
import gc
import os
import time

import numpy as np
import pytest
import torch
import zmq
from fake_upload_device import FakeEvent, FakeUploadDevice
from uploading_bench import NAME, Reader, daemon

from infer.daemon.client import SlotClient
from infer.uploads.cuda_device import CudaUploadDevice
from infer.uploads.slot_cache_integrity import check_integrity
from shared.errors import GpuError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import HOST_TIER


def descriptor_count():
    gc.collect()  # mappings hold some
    return len(os.listdir("/proc/self/fd"))


def comes_back_to(count):
    """The daemon, which is in this process too, hangs up a moment later."""
    end_s = time.monotonic() + 10
    while descriptor_count() > count and time.monotonic() < end_s:
        time.sleep(0.02)
    return descriptor_count() == count


class FailedDevice(FakeUploadDevice):
    """Once it has failed, whoever waits for it is told."""

    has_failed = False

    def event(self):
        device = self

        class Event(FakeEvent):
            def synchronize(self):
                if device.has_failed:
                    raise RuntimeError("unspecified launch failure")
                super().synchronize()

        return Event()


@pytest.mark.parametrize("how", ["close", "detach"])
def test_the_daemon_is_let_go_of_though_the_gpu_has_failed(place, demo_model, how):
    device = FailedDevice()
    with daemon(demo_model):
        reader = Reader(demo_model, device)
        layer = reader.experts.classes[0].layers[0]

        def fail():
            device.has_failed = True

        with pytest.raises(RuntimeError, match="launch failure"):
            reader.client.read(layer, np.array([1, 2], np.int32), 1, lambda *_: None, fail)
        with pytest.raises(RuntimeError, match="launch failure"):
            getattr(reader.client, how)()
        assert not reader.client._host.attached
        assert device.pinned == {}
        device.has_failed = False
        reader.close()


@pytest.mark.parametrize("where", ["before", "after"])
def test_ctrl_c_while_it_attaches_again_leaves_one_attachment(
    place, demo_model, monkeypatch, where
):
    device = FakeUploadDevice(late_copies=True)
    with daemon(demo_model):
        reader = Reader(demo_model, device)
        client = reader.client
        layer = reader.experts.classes[0].layers[0]
        reader.read(layer, [1, 2])
        before = descriptor_count()
        attach_again = client._host.attach_again

        def interrupted():
            if where == "after":
                attach_again()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client._host, "attach_again", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.attach_again()
        assert not client.attached
        client.attach()  # as infer.daemon.lifeline does it
        assert comes_back_to(before)
        reader.read(layer, [1, 2, 3])
        assert len(client.stats()["clients"]) == 1
        check_integrity(client.cache)
        reader.close()


@pytest.fixture
def host(place, demo_model):
    index = GgufIndex.open(demo_model)
    with daemon(demo_model):
        client = SlotClient(NAME, index, ExpertIndex.from_gguf(index), HOST_TIER)
        yield client
        client.close()


def test_a_client_that_cannot_have_a_socket_is_not_half_attached(host, monkeypatch):
    before = descriptor_count()
    host.detach()

    listen = host._connection._listen

    def none_left():
        listen()
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(host._connection, "_listen", none_left)
        with pytest.raises(zmq.ZMQError):
            host.attach()
    assert not host.attached
    host.attach()
    assert comes_back_to(before)
    assert len(host.rows) == host.experts.n_layers


def test_ctrl_c_before_the_memory_is_noted_leaves_nothing_attached(host, monkeypatch):
    before = descriptor_count()

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host, "_note_mapping", interrupted)
        with pytest.raises(KeyboardInterrupt):
            host.attach_again()
    assert not host.attached
    host.attach()
    assert comes_back_to(before)
    assert len(host.rows) == host.experts.n_layers


def test_what_the_daemon_has_handed_over_is_not_our_children_s(host):
    assert not os.get_inheritable(host._connection._doorbell)


def test_what_is_left_of_a_detach_that_was_broken_off_goes_with_the_next_attach(host, monkeypatch):
    before = descriptor_count()

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(host._connection._channels, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            host.detach()
    assert not host.attached
    host.attach()
    assert comes_back_to(before)
    assert len(host.stats()["clients"]) == 1


def test_memory_that_this_process_has_given_up_is_free(monkeypatch):
    """torch keeps it until it is told."""
    free = {"bytes": 1}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.update(bytes=7))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free["bytes"], 9))
    device = CudaUploadDevice.__new__(CudaUploadDevice)  # without a driver
    device._device = torch.device("cuda:0")
    assert device.free_bytes() == 7


@pytest.mark.parametrize(("count", "remedy"), [(1, "give cuda:0, or"), (3, "cuda:0 to cuda:2")])
def test_a_gpu_that_is_not_there_is_told(monkeypatch, count, remedy):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(GpuError, match=f"cuda:5: there is no such GPU, torch sees {count}") as told:
        CudaUploadDevice(5)
    assert remedy in told.value.remedy


def test_a_gpu_that_is_full_is_told(monkeypatch):
    def full(_device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", full)
    with pytest.raises(GpuError, match="cuda:0 cannot be used: CUDA out of memory"):
        CudaUploadDevice(0)
