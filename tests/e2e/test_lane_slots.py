"""The compute lane reads host slots of a real daemon while others have them evicted and reused."""

import time

import numpy as np
import pytest
import torch

from infer.daemon.client import SlotClient
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.reference_kernels import ReferenceKernels
from infer.lane.compute_lane import ComputeLane
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import HOST_TIER

SECONDS = 2.0


class Kernels(ReferenceKernels):
    def rouse(self):
        """There is nobody to wake."""


class World:
    """A lane of a model's experts, without the model; every row is compared with the file's."""

    def __init__(self, model, name: str) -> None:
        self.index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(self.index)
        self.file = np.memmap(model, np.uint8, mode="r")
        host = SlotClient(name, self.index, self.experts, HOST_TIER)
        self.host = host
        layer = self.experts.classes[0].layers[0]
        gate = self.index.tensors[f"blk.{layer}.ffn_gate_exps.weight"]
        self.width, self.d_ff = gate.shape[:2]
        self.kernels = Kernels()
        self.lane = ComputeLane(host, self.kernels, self.width, None, pinned=False)
        for size_class in self.experts.classes:
            policy = self.lane.policy(size_class.layers[0])
            policy.share = lambda host_count, disk_count: (host_count, bool(disk_count % 2))

    def shape(self, layer: int) -> ExpertFormat:
        return ExpertFormat(*self.experts.part_types[layer].tolist(), self.width, self.d_ff)

    def expected(self, layer: int, experts, ranks) -> torch.Tensor:
        parts = [self.experts.extents(layer, int(expert)) for expert in experts]
        slabs = [[self.file[e.offset : e.offset + e.length].copy() for e in own] for own in parts]
        at = [np.array([own[part].ctypes.data for own in slabs], np.int64) for part in range(3)]
        starts = np.arange(len(ranks) + 1, dtype=np.int32)
        batch = ExpertBatch(self.shape(layer), ranks.astype(np.int32), starts, *at)
        return self.kernels.experts(self.lane.x, batch, torch.zeros_like(self.lane.rows))


@pytest.mark.slow
def test_rows_are_right_while_slots_are_reused(place, streaming_model):
    floor_bytes = place.plan(streaming_model)["floor_bytes"]
    daemon = place.daemon(streaming_model, "--host-cache", floor_bytes)
    words = (streaming_model, daemon.name, "--seconds", SECONDS + 4)
    reader = place.start("slab_reader.py", *words, "--seed", 1)
    world, rng = World(streaming_model, daemon.name), np.random.default_rng(5)
    lane, top_k = world.lane, world.experts.top_k
    layers = [layer for c in world.experts.classes for layer in c.layers]
    weights = 1 / np.arange(1, world.experts.n_experts + 1)
    computed_count = 0
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s or computed_count == 0:
        assert reader.poll() is None, "slots are reused only while the reader reads"
        layer = int(rng.choice(layers))
        experts = rng.choice(len(weights), top_k, replace=False, p=weights / weights.sum())
        lane.x.normal_()
        split = lane.split(layer, experts, np.zeros(top_k, np.uint32))
        if not len(split.computed):
            continue
        ranks = np.sort(rng.choice(top_k, len(split.computed), replace=False))
        assert lane.compute(world.shape(layer), ranks, lambda: None)
        expected = world.expected(layer, experts[split.computed], ranks)
        assert torch.equal(lane.rows[0, ranks], expected[0, ranks])
        computed_count += len(ranks)
    uses = int(world.host.mapping.area.uses.sum())
    stats = place.stats(daemon.name)
    reader.communicate(timeout=60)
    assert stats["tiers"]["host"]["evictions"] > 100
    assert lane.counters.computed == computed_count == uses
    assert lane.counters.discarded == 0
    mine = [c for c in stats["clients"] if c["hits"] + c["misses"] == computed_count]
    assert len(mine) == 1, "what the CPU has computed counts in the host tier"
    assert min(mine[0]["hits"], mine[0]["misses"]) > 0
    assert world.host.mapping.area.published == 2**64 - 1
    lane.close()


def test_a_daemon_without_room_says_which_option_gives_it(place, streaming_model):
    """Two clients are what the floor has room for; the lane is one more."""
    floor_bytes = place.plan(streaming_model)["floor_bytes"]
    daemon = place.daemon(streaming_model, "--host-cache", floor_bytes)
    index = GgufIndex.open(streaming_model)
    experts = ExpertIndex.from_gguf(index)
    clients = [SlotClient(daemon.name, index, experts) for _ in range(2)]
    with pytest.raises(Exception, match="larger --host-cache"):
        SlotClient(daemon.name, index, experts)
    for client in clients:
        client.close()
