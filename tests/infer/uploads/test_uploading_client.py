"""A client with slots of its own, over a real daemon: what is read there is what the file has."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_upload_device import FakeUploadDevice
from uploading_bench import Reader, daemon, least_cache


@pytest.mark.parametrize("late_kernels", [False, True], ids=["kernels early", "kernels late"])
@pytest.mark.parametrize("late_copies", [False, True], ids=["copies early", "copies late"])
@pytest.mark.parametrize("refuses", [False, True], ids=["pinned", "not pinned"])
def test_every_slab_comes_whole_whatever_runs_first(
    place, demo_model, late_copies, late_kernels, refuses
):
    device = FakeUploadDevice(late_copies, late_kernels, refuses)
    with daemon(demo_model, host_cache=10 << 20):
        reader = Reader(demo_model, device, least_cache(demo_model))
        reader.read_all()
        reader.read_all()
        reader.close()
    expert_count = sum(c.expert_count for c in reader.experts.classes)
    hits, misses = reader.client.lookups
    assert reader.compared == hits + misses == 2 * expert_count
    assert reader.client.cache.eviction_count > 0
    assert device.pinned == {}
    assert (device.pin_tries > 1) != refuses


def test_what_a_section_has_found_it_keeps_though_it_is_the_coldest(place, demo_model):
    device = FakeUploadDevice(late_kernels=True)
    with daemon(demo_model):
        reader = Reader(demo_model, device, least_cache(demo_model))
        cold, *hot = reader.experts.classes[0].layers
        slot_count = reader.client.cache.slot_count(cold)
        others = [(layer, expert) for layer in hot for expert in range(reader.experts.n_experts)]
        reader.read(cold, [0])
        for _ in range(4):
            for layer, expert in others[: slot_count - 1]:
                reader.read(layer, [expert])
        assert reader.client.cache.eviction_count == 0
        reader.read(cold, [0, 1, 2, 3])
        assert reader.client.cache.eviction_count == 3
        reader.close()


def test_several_clients_at_once(place, demo_model):
    """Their host slots are taken back as soon as their sections end: no copy may be later."""
    with daemon(demo_model, host_cache=10 << 20):
        readers = [
            Reader(demo_model, FakeUploadDevice(True, late_kernels), least_cache(demo_model))
            for late_kernels in (False, True)
        ]

        def work(seed):
            reader, rng = readers[seed], np.random.default_rng(seed)
            layers = [layer for c in reader.experts.classes for layer in c.layers]
            for _ in range(200):
                layer = int(rng.choice(layers))
                count = rng.integers(1, reader.client.wave_experts(layer) + 1)
                reader.read(layer, rng.permutation(reader.experts.n_experts)[:count])
            return reader.client.lookups

        with ThreadPoolExecutor(len(readers)) as threads:
            lookups = list(threads.map(work, range(len(readers))))
        for reader, counted in zip(readers, lookups, strict=True):
            reader.close()
            assert reader.compared == sum(counted)
            assert min(counted) > 0
