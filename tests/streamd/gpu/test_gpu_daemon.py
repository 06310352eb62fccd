"""A whole daemon over a fake GPU, and a client of its GPU tier: real sockets, disk and protocol."""

import ctypes
import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from fake_gpu import FakeDevice

from infer.client import SlotClient
from infer.mapping import TierMemory
from shared import shm
from shared.errors import GpuError, PlanError, ReadFailed
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.resident import gpu_resident_layout
from shared.runtime_dir import Endpoints
from shared.stats_view import render_stats
from shared.wire import GPU_TIER, HOST_TIER, Stats, StatsRequest, Stop
from streamd.ask import ask
from streamd.config import StreamdConfig
from streamd.daemon import Daemon
from streamd.plan import Demand

NAME = "gpu-test"


def map_fake(attached, arena_fd, resident_fd):
    """What infer.gpu_mapping does, with a fake GPU's memory."""
    arena = shm.map_readonly(arena_fd, attached.arena_bytes)
    resident = shm.map_readonly(resident_fd, attached.resident_bytes)
    return TierMemory("cuda:0", True, shm.address(arena), shm.address(resident), (arena, resident))


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    """Sockets of our own; the paths of sockets may not be long."""
    directory = tmp_path_factory.mktemp("run", numbered=True)
    directory.chmod(0o700)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(directory))
    monkeypatch.setattr("infer.connection.map_gpu_tier", map_fake)


@contextmanager
def daemon(model, gpu, **options):
    """A daemon in a thread of this process, over a fake GPU."""
    config = StreamdConfig(model=model, name=NAME, **options)
    with Daemon(config, Endpoints.of(NAME), lambda ordinal: gpu) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        try:
            yield running
        finally:
            ask(NAME, Stop())
            thread.join()


class Reader:
    def __init__(self, model, tier=GPU_TIER):
        self.index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(self.index)
        self.client = SlotClient(NAME, self.index, self.experts, tier)
        self.file = np.memmap(model, np.uint8, mode="r")

    def read(self, layer, experts):
        """Compare slabs with the file while they may be read."""

        def compare(places, addresses):
            for place, starts in zip(places, addresses.tolist(), strict=True):
                expert = experts[place]
                parts = self.experts.extents(layer, expert)
                for start, part in zip(starts, parts, strict=True):
                    wanted = self.file[part.offset : part.offset + part.length].tobytes()
                    assert ctypes.string_at(start, part.length) == wanted

        self.client.read(layer, np.array(experts), 1, compare)

    def read_all(self):
        """Every expert of the model, a section at a time."""
        for size_class in self.experts.classes:
            for layer in size_class.layers:
                wave = self.client.wave_experts(layer)
                for first in range(0, self.experts.n_experts, wave):
                    self.read(layer, list(range(first, min(first + wave, self.experts.n_experts))))


def stats():
    answer = ask(NAME, StatsRequest())
    assert isinstance(answer, Stats)
    return answer.values


def floor_bytes(model):
    return Demand.of(ExpertIndex.from_gguf(GgufIndex.open(model)), 256).floor_bytes


def test_every_slab_arrives_through_a_small_gpu_cache(place, demo_model):
    device = FakeDevice(at_once=True)
    with daemon(demo_model, device, gpu_cache=floor_bytes(demo_model) + (1 << 16)):
        reader = Reader(demo_model)
        reader.read_all()
        reader.read_all()
        values = stats()
        reader.client.close()
    gpu = values["tiers"]["gpu"]
    expert_count = sum(c.expert_count for c in reader.experts.classes)
    slab_bytes = sum(c.expert_count * c.slab_bytes for c in reader.experts.classes)
    assert gpu["hits"] + gpu["misses"] == 2 * expert_count
    assert gpu["uploads"] == gpu["misses"] > expert_count
    assert gpu["uploaded_bytes"] > slab_bytes
    assert gpu["evictions"] > 0
    assert gpu["slots_used"] <= gpu["slots"]
    host = values["tiers"]["host"]
    assert host["hits"] + host["misses"] == gpu["misses"], "an upload is a lookup of the host tier"
    assert [client["client"] for client in values["clients"]] == [0]
    assert "fake GPU" in render_stats(json.loads(json.dumps(values)))
    assert device.closed
    assert device.pinned == {}


def test_resident_tensors_are_there_at_aligned_addresses(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True)):
        reader = Reader(demo_model)
        mapping = reader.client.mapping
        for placed in gpu_resident_layout(resident_tensors(reader.index)).tensors:
            tensor = placed.tensor
            assert placed.payload_offset % 256 == 0
            held = ctypes.string_at(
                mapping.resident_address + placed.payload_offset, tensor.byte_count
            )
            assert held == reader.file[tensor.offset : tensor.offset + tensor.byte_count].tobytes()
        reader.client.close()


def test_clients_of_both_tiers_at_once(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True)):
        readers = [Reader(demo_model, tier) for tier in (GPU_TIER, HOST_TIER, GPU_TIER)]
        addresses = {reader.client.mapping.arena_address for reader in readers}
        assert len(addresses) == 3
        for layer in readers[0].experts.classes[0].layers:
            for reader in readers:
                reader.read(layer, [0, 3, 5])
        assert len(stats()["clients"]) == 3
        for reader in readers:
            reader.client.close()


def test_a_failed_copy_reaches_the_client(place, demo_model):
    device = FakeDevice(at_once=True)
    with daemon(demo_model, device):
        reader = Reader(demo_model)
        layer = reader.experts.classes[0].layers[0]
        device.refuses_copies = True
        with pytest.raises(GpuError, match="CUDA_ERROR_UNKNOWN"):
            reader.read(layer, [1])
        device.refuses_copies = False
        reader.read(layer, [1])
        reader.client.close()


def test_a_failed_read_reaches_the_client(place, demo_model, monkeypatch):
    with daemon(demo_model, FakeDevice(at_once=True)) as running:
        reader = Reader(demo_model)
        layer = reader.experts.classes[0].layers[0]
        with monkeypatch.context() as patch:
            patch.setattr(
                running.model.tier, "arrived", lambda slot, error: ReadFailed("bad sector")
            )
            with pytest.raises(ReadFailed, match="bad sector"):
                reader.read(layer, [2])
        running.model.tier._grants.clear()
        reader.read(layer, [2])
        reader.client.close()


def test_without_a_gpu_tier_a_gpu_client_is_refused(place, demo_model):
    with daemon(demo_model, FakeDevice(), gpu_cache=0), pytest.raises(GpuError, match="no gpu"):
        Reader(demo_model)


def test_auto_does_without_a_gpu_that_is_too_small(place, demo_model):
    device = FakeDevice(free_bytes=1 << 20)
    with daemon(demo_model, device):
        assert device.closed
        assert stats()["tiers"]["gpu"]["slots"] == 0


def test_a_gpu_that_is_asked_for_must_do(place, demo_model):
    device = FakeDevice(free_bytes=1 << 20)
    with pytest.raises(PlanError), daemon(demo_model, device, device="cuda:0"):
        pass
    assert device.closed
