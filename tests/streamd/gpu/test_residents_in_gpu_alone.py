"""With --cpu-clients off no host memory holds what the GPU holds, and the slots may have it."""

import pytest
from fake_gpu import FakeDevice, FakeLane
from gpu_daemon import NAME, Reader, daemon, stats

from infer.daemon.attachment import attach
from infer.resident.resident_weights import open_streamed
from shared import shm
from shared.daemon_options import DaemonOptions
from shared.errors import GpuError
from shared.experts import resident_tensors
from shared.resident import gpu_resident_layout, resident_layout
from shared.streamed import chosen_layers, kept_tensors
from shared.wire import HOST_TIER
from streamd.tiers.pages import page_report

# What is mapped in pages of 2 MiB where the machine has them, for each tensor apart.
SLACK_BYTES = 4 << 20


def _held_bytes(running):
    return page_report(shm.address(running.model.resident_region.memory)).resident_bytes


def test_the_gpu_has_all_tensors_and_the_host_none(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True), cpu_clients=False) as running:
        reader = Reader(demo_model)
        mapping = reader.client.mapping
        layout = gpu_resident_layout(resident_tensors(reader.index))
        for placed in layout.tensors:
            reader.compare(placed.tensor, mapping.resident_address + placed.payload_offset)
        reader.read_all()
        assert _held_bytes(running) <= SLACK_BYTES < layout.total_bytes
        assert stats()["resident_bytes"] == 0
        reader.client.close()


def test_the_host_keeps_what_is_copied_for_every_token(place, demo_model):
    gpu = FakeDevice(at_once=True)
    with daemon(demo_model, gpu, cpu_clients=False, gpu_resident=2 << 20) as running:
        reader = Reader(demo_model)
        mapping = reader.client.mapping
        layouts = chosen_layers(reader.index, mapping.attached.streamed_layers)
        assert len(layouts) == 4
        for placed in gpu_resident_layout(kept_tensors(reader.index, layouts)).tensors:
            reader.compare(placed.tensor, mapping.resident_address + placed.payload_offset)
        streamed = open_streamed(reader.index, mapping, "fake GPU", FakeLane)
        for layer, layout in layouts.items():
            streamed.enter(layer)
            for placed in layout.tensors:
                reader.compare(placed.tensor, streamed.addresses[layer] + placed.payload_offset)
            streamed.leave(layer)
        names = {placed.tensor.name for each in layouts.values() for placed in each.tensors}
        whole = resident_layout(resident_tensors(reader.index), mapping.attached.host_align)
        assert stats()["resident_bytes"] == whole.only(names).held_bytes < whole.total_bytes
        assert _held_bytes(running) <= whole.only(names).held_bytes + SLACK_BYTES
        reader.client.close()


def test_who_computes_on_a_cpu_is_told_and_who_reads_experts_is_served(place, demo_model):
    with daemon(demo_model, FakeDevice(at_once=True), cpu_clients=False):
        reader = Reader(demo_model, HOST_TIER)
        reader.read_all()
        for device in ("cpu", "auto"):
            with pytest.raises(GpuError, match="in GPU memory alone") as refusal:
                attach(NAME, reader.index, reader.experts, DaemonOptions(device=device))
            assert "--cpu-clients on" in refusal.value.remedy
        assert len(stats()["clients"]) == 1
        reader.client.close()


@pytest.mark.parametrize("options", [{"cpu_clients": True}, {"cpu_clients": False, "gpu_cache": 0}])
def test_otherwise_a_cpu_finds_all_of_them(place, demo_model, options):
    with daemon(demo_model, FakeDevice(at_once=True), **options):
        reader = Reader(demo_model, HOST_TIER)
        client = attach(NAME, reader.index, reader.experts, DaemonOptions(device="cpu"))
        layout = resident_layout(resident_tensors(reader.index), client.mapping.attached.align)
        for placed in layout.tensors:
            reader.compare(placed.tensor, client.mapping.resident_address + placed.payload_offset)
        for each in (reader.client, client):
            each.close()
