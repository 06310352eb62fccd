"""A GPU's client with a compute lane: both attachments to one daemon, a layer at a time."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_gpu import FakeDevice
from gpu_daemon import NAME, Reader, daemon, stats

from infer.daemon.client import SlotClient
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.reference_kernels import ReferenceKernels
from infer.lane.compute_lane import ComputeLane
from infer.recorded.missing_experts import ROW, MissingExperts
from shared.wire import HOST_TIER

# A few slots more than the floor
GPU_BYTES = 6 << 20
LAYER_COUNT = 60


class Kernels(ReferenceKernels):
    def rouse(self):
        """There is nobody to wake."""


class World(Reader):
    """`token_layer` does what happens between a router's answer and the next graph."""

    def __init__(self, model) -> None:
        super().__init__(model)
        host = SlotClient(NAME, self.index, self.experts, HOST_TIER)
        self.top_k = self.experts.top_k
        layer = self.experts.classes[0].layers[0]
        self.width, self.d_ff = self.index.tensors[f"blk.{layer}.ffn_gate_exps.weight"].shape[:2]
        self.kernels = Kernels()
        self.lane = ComputeLane(host, self.kernels, self.width, None, pinned=False)
        host.waits = self.client.waits
        self.mail = torch.zeros((1, 1 + -(-self.top_k // 2)), dtype=torch.int64)
        self.addresses = torch.zeros((1, 4, self.top_k), dtype=torch.int64)
        self.hits = torch.zeros((1, 4, self.top_k), dtype=torch.int64)
        self.missing = MissingExperts(self.client, self, self.lane)
        self.counts = {"hit": 0, "fetched": 0, "computed": 0}

    def token_layer(self, layer: int, experts: np.ndarray) -> None:
        self.lane.x.normal_()
        self.mail.view(torch.int32)[0, 2 : 2 + self.top_k] = torch.from_numpy(experts)
        shape = ExpertFormat(*self.experts.part_types[layer].tolist(), self.width, self.d_ff)
        moe = SimpleNamespace(layer=layer, format=shape)
        done = np.zeros(self.top_k, bool)

        def check(kind: str, addresses: np.ndarray) -> None:
            for rank in addresses[0].nonzero()[0]:
                assert not done[rank], "each pair is computed once"
                done[rank] = True
                self.counts[kind] += 1
                parts = self.experts.extents(layer, int(experts[rank]))
                for start, part in zip(addresses[:ROW, rank].tolist(), parts, strict=True):
                    wanted = self.file[part.offset : part.offset + part.length].tobytes()
                    assert ctypes.string_at(start, part.length) == wanted

        self.client.enter()
        self.client.mapping.area.uses[layer, experts] += np.uint32(1)
        self.missing.bring(*(0, moe), lambda: check("hit", self.hits[0].numpy()), lambda: None)
        target = self.addresses[0].numpy()
        check("fetched", target)
        computed = target[ROW].nonzero()[0]
        assert not done[computed].any()
        assert np.array_equal(target[ROW, computed], self.lane.row_addresses[computed])
        if len(computed):
            expected = self.expected(shape, layer, experts[computed], computed)
            assert torch.equal(self.lane.rows[0, computed], expected[0, computed])
        done[computed] = True
        self.counts["computed"] += len(computed)
        assert done.all()
        self.client.leave()

    def expected(self, shape, layer, experts, ranks) -> torch.Tensor:
        own = [self.experts.extents(layer, int(expert)) for expert in experts]
        slabs = [[self.file[e.offset : e.offset + e.length].copy() for e in parts] for parts in own]
        at = [np.array([parts[part].ctypes.data for parts in slabs]) for part in range(3)]
        starts = np.arange(len(ranks) + 1, dtype=np.int32)
        batch = ExpertBatch(shape, ranks.astype(np.int32), starts, *at)
        return self.kernels.experts(self.lane.x, batch, torch.zeros_like(self.lane.rows))

    def close(self) -> None:
        self.lane.close()
        self.client.close()


@pytest.mark.parametrize("cpu_clients", [True, False])
def test_every_expert_is_computed_once_and_from_the_right_bytes(place, demo_model, cpu_clients):
    options = {"gpu_cache": GPU_BYTES, "cpu_clients": cpu_clients, "warm": False}
    with daemon(demo_model, FakeDevice(at_once=True), **options):
        world, rng = World(demo_model), np.random.default_rng(7)
        layers = [layer for c in world.experts.classes for layer in c.layers]
        weights = 1 / np.arange(1, world.experts.n_experts + 1)
        for turn in range(LAYER_COUNT):
            experts = rng.choice(len(weights), world.top_k, False, weights / weights.sum())
            world.token_layer(layers[turn % len(layers)], experts.astype(np.int32))
        values = stats()
        world.close()
    assert sum(world.counts.values()) == LAYER_COUNT * world.top_k
    assert min(world.counts.values()) > 0, world.counts
    assert world.lane.counters.computed == world.counts["computed"]
    assert len(values["clients"]) == 2
    assert values["tiers"]["gpu"]["uploads"] <= world.counts["fetched"] + world.counts["hit"]
