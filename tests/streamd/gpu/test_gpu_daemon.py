"""A whole daemon over a fake GPU, and a client of its GPU tier: real sockets, disk and protocol."""

import json
import mmap
import threading
import time

import numpy as np
import pytest
from fake_gpu import FakeDevice, FakeLane
from gpu_daemon import NAME, Reader, daemon, floor_bytes, stats

from infer.resident.resident_weights import open_streamed
from shared.errors import GpuError, GpuNotShared, NoGpuTier, PlanError, ReadFailed
from shared.experts import resident_tensors
from shared.resident import gpu_resident_layout
from shared.runtime_dir import Endpoints
from shared.stats_view import render_stats
from shared.streamed import chosen_layers, kept_tensors
from shared.wire import GPU_TIER, HOST_TIER, Hint, Stop
from streamd.ask import ask
from streamd.config import StreamdConfig
from streamd.daemon import Daemon

PATIENCE_S = 20.0


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
            reader.compare(tensor, mapping.resident_address + placed.payload_offset)
        reader.client.close()


def test_streamed_layers_are_copied_from_what_the_client_gets(place, demo_model):
    """The other tensors are in GPU memory; a pass of the model brings each layer in its turn."""
    with daemon(demo_model, FakeDevice(at_once=True), gpu_resident=2 << 20):
        reader = Reader(demo_model)
        mapping = reader.client.mapping
        layouts = chosen_layers(reader.index, mapping.attached.streamed_layers)
        assert len(layouts) == 4, "two of six layers have 1.7 MB"
        kept = gpu_resident_layout(kept_tensors(reader.index, layouts))
        for placed in kept.tensors:
            reader.compare(placed.tensor, mapping.resident_address + placed.payload_offset)
        streamed = open_streamed(reader.index, mapping, "fake GPU", FakeLane)
        for layer in range(reader.experts.n_layers):
            streamed.enter(layer)
            for placed in layouts[layer].tensors if layer in layouts else ():
                reader.compare(placed.tensor, streamed.addresses[layer] + placed.payload_offset)
            streamed.leave(layer)
        values = stats()
        text = render_stats(values)
        host = Reader(demo_model, HOST_TIER)
        assert open_streamed(host.index, host.client.mapping, "cpu") is None
        for each in (reader, host):
            each.client.close()
    layer_bytes = sum(layout.total_bytes for layout in layouts.values())
    assert values["tiers"]["gpu"]["streamed_layers"] == 4
    assert values["tiers"]["gpu"]["streamed_bytes"] == layer_bytes
    assert "of 4 layers" in text


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
    with daemon(demo_model, FakeDevice(), gpu_cache=0), pytest.raises(NoGpuTier, match="no gpu"):
        Reader(demo_model)


@pytest.mark.parametrize("options", [{}, {"device": "cuda:0"}, {"gpu_cache": 1 << 30}])
def test_a_gpu_that_cannot_be_shared_leaves_the_host_tier(place, demo_model, options, caplog):
    """Also where it was asked for: clients upload for themselves then."""

    def not_shared(ordinal):
        raise GpuNotShared("this GPU cannot share its memory", "use Linux itself")

    config = StreamdConfig(model=demo_model, name=NAME, **options)
    with Daemon(config, Endpoints.of(NAME), not_shared) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        with pytest.raises(GpuNotShared, match="this GPU cannot share its memory"):
            Reader(demo_model)
        reader = Reader(demo_model, HOST_TIER)
        reader.read(reader.experts.classes[0].layers[0], [0, 3])
        align = reader.client.mapping.attached.align
        reader.client.close()
        ask(NAME, Stop())
        thread.join()
    assert align % mmap.PAGESIZE == 0, "slots can be pinned one by one"
    assert "no GPU tier: this GPU cannot share its memory; a client of the GPU keeps" in caplog.text


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


def prefetch_of(tier):
    return stats()["tiers"][tier]["prefetch"]


@pytest.mark.parametrize("tier", [GPU_TIER, HOST_TIER])
def test_what_is_hinted_is_there_before_it_is_asked_for(place, demo_model, tier):
    with daemon(demo_model, FakeDevice(at_once=True)):
        reader = Reader(demo_model, tier)
        layer = reader.experts.classes[0].layers[0]
        reader.client.hint(layer, np.array([2, 3, 5]), 1)
        deadline_s = time.monotonic() + PATIENCE_S
        while reader.client.absent(layer, np.array([2, 3, 5])).any():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        reader.read(layer, [2, 3])
        assert reader.client.lookups == (2, 0)
        reader.read(layer, [7])
        deadline_s = time.monotonic() + PATIENCE_S
        while prefetch_of(tier)["useful"] + prefetch_of(tier)["wasted"] < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        counters = prefetch_of(tier)
        assert (counters["hinted"], counters["issued"]) == (3, 3)
        assert (counters["useful"], counters["wasted"]) == (2, 1)
        assert counters["useful_bytes"] == 2 * reader.experts.classes[0].slab_bytes
        reader.client.close()


def test_a_hint_for_ram_alone(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True)):
        reader = Reader(demo_model, GPU_TIER)
        layer, experts = reader.experts.classes[0].layers[0], np.array([2, 3, 5])
        reader.client.hint(layer, experts, 1, 1)
        deadline_s = time.monotonic() + PATIENCE_S
        while reader.client.unread(layer, experts).any() or reader.client.absent(layer, [2])[0]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert reader.client.absent(layer, experts).tolist() == [False, True, True]
        assert prefetch_of(GPU_TIER)["hinted"] == 1
        reader.client.close()


def test_clients_see_how_idle_the_drive_is(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True)):
        reader = Reader(demo_model, GPU_TIER)
        layer, moments = reader.experts.classes[0].layers[0], []
        for expert in range(0, 12, 2):
            reader.read(layer, [expert, expert + 1])
            moments.append(reader.client.drive_us)
            time.sleep(0.01)
        idle_us, now_us = (moments[-1][at] - moments[0][at] for at in (0, 1))
        assert 0 < idle_us < now_us
        assert now_us >= 5 * 10_000
        reader.client.close()


def test_hints_are_never_answered(place, demo_model):
    """Whatever they say."""
    with daemon(demo_model, FakeDevice(at_once=True)):
        reader = Reader(demo_model, HOST_TIER)
        layer = reader.experts.classes[0].layers[0]
        ticket = reader.client.mapping.attached.ticket
        for hint in (
            Hint(ticket, 1, -1, [1], 1),
            Hint(ticket, 1, 10**6, [1], -5),
            Hint(ticket, 2**63, layer, [-1, 10**9, 3, 3], 10**9),
        ):
            reader.client._connection.hint(hint)
        reader.read(layer, [1, 3])
        assert prefetch_of(HOST_TIER)["hinted"] <= 1
        reader.client.close()
