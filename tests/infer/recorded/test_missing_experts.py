"""What happens between a router's answer and the next graph, with stand-ins for daemon and GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infer.daemon.sections import Section
from infer.daemon.waits import Waits
from infer.kernels.interface import ExpertFormat
from infer.lane.compute_lane import ComputeLane
from infer.recorded.missing_experts import ROW, MissingExperts
from shared.errors import ClientRevoked, DaemonBusy, ReadFailed
from shared.residency import NONE_EPOCH, ClientArea, ResidencyTable, TableShape

SHAPE, TOP_K, LAYER, WIDTH = TableShape(3, 16), 6, 1, 8
FORMAT = ExpertFormat(0, 0, 0, WIDTH, 4)
IDS = [3, 9, 4, 12, 0, 7]
EXPERTS = SimpleNamespace(
    top_k=TOP_K,
    classes=(SimpleNamespace(slab_bytes=1000),),
    layer_class=np.zeros(SHAPE.n_layers, np.int32),
)


class Tier:
    """A SlotClient of one plane: addresses are first + 1000 * slot + part; fetched experts come one
    by one, into slot 100 + expert."""

    def __init__(
        self, name: str, table: ResidencyTable, plane: np.ndarray, log: list, first: int
    ) -> None:
        self.name = name
        self.area = ClientArea(bytearray(SHAPE.area_bytes), SHAPE)
        self.area.initialise()
        self.experts, self.rows, self.waits = EXPERTS, plane, Waits()
        self.mapping = SimpleNamespace(area=self.area, table=table)
        self.log, self.first = log, first
        self.fails = self.revoked = self.crowded = False
        self.attached_count = 0

    def absent(self, layer, experts):
        return self.rows[layer][experts] < 0

    def enter(self):
        self.area.enter(self.mapping.table)

    def want(self, layer, experts, use_counts) -> Section:
        self.area.uses[layer, experts] += np.uint32(use_counts)
        section = self.ask(layer, experts)
        self.area.count_lookups(len(section.present), len(section.missing))
        return section

    def ask(self, layer, experts) -> Section:
        row = self.rows[layer]
        slots = row[experts]
        present, missing = (slots >= 0).nonzero()[0], (slots < 0).nonzero()[0]
        if len(missing):
            self.log.append((f"{self.name} fetch", experts[missing].tolist()))
        return Section(1, layer, experts, row, slots, present, missing, 0.0, len(missing))

    def wait_some(self, section):
        if self.fails:
            raise ReadFailed("the disk did not deliver")
        arrived, section.missing = section.missing[:1], section.missing[1:]
        expert = int(section.experts[arrived[0]])
        self.log.append((f"{self.name} arrived", expert))
        section.slots[arrived] = 100 + expert
        return arrived

    def addresses(self, section, places):
        return self.first + 1000 * section.slots[places, np.newaxis] + np.arange(3)

    def check_revoked(self):
        if self.revoked:
            raise ClientRevoked("revoked")

    def attach_again(self):
        self.area.leave()  # a new attachment has another area
        if self.crowded:
            raise DaemonBusy("full")
        self.revoked = False
        self.attached_count += 1

    def leave(self):
        self.area.leave()

    def close(self):
        self.log.append("closed")


class Kernels:
    """A row is full of its expert's gate address."""

    def __init__(self, log: list, world) -> None:
        self.log, self.world = log, world

    def rouse(self):
        """There is nobody to wake."""

    def experts(self, x, batch, out, exact=False):
        host = self.world.host
        assert host.area.published != NONE_EPOCH, "slots are read in a section"
        assert (batch.up - batch.gate == 1).all()
        assert (batch.down - batch.gate == 2).all()
        assert batch.group_start.tolist() == list(range(len(batch.pairs) + 1))
        self.log.append(("compute", batch.pairs.tolist()))
        for rank, gate in zip(batch.pairs, batch.gate, strict=True):
            out[0, rank] = float(gate)
        return out


class World:
    """host: experts in host slots; gpu: in GPU slots; each in the slot of its own number. reads:
    whether the CPU gets what has to be read."""

    def __init__(self, host=(), gpu=(), lane=True, reads=False) -> None:
        self.log: list = []
        self.table = ResidencyTable(bytearray(SHAPE.table_bytes), SHAPE)
        self.table.initialise()
        self.table.host_slots[LAYER, list(host)] = list(host)
        self.table.gpu_slots[LAYER, list(gpu)] = list(gpu)
        self.gpu = Tier("gpu", self.table, self.table.gpu_slots, self.log, 0)
        self.host = Tier("host", self.table, self.table.host_slots, self.log, 500_000)
        self.lane = None
        if lane:
            self.lane = ComputeLane(self.host, Kernels(self.log, self), WIDTH, None, pinned=False)
            self.lane.policy(LAYER).share = lambda host_count, *_: (min(host_count, 2), reads)
        self.mail = torch.zeros((2, 1 + TOP_K // 2), dtype=torch.int64)
        self.mail.view(torch.int32)[1, 2:] = torch.tensor(IDS, dtype=torch.int32)
        self.addresses = torch.full((2, 4, TOP_K), 77, dtype=torch.int64)
        self.hits = torch.full((2, 4, TOP_K), 77, dtype=torch.int64)
        self.missing = MissingExperts(self.gpu, self, self.lane)

    def bring(self) -> np.ndarray:
        """The addresses [4, top_k] that the next graph gets."""
        moe = SimpleNamespace(layer=LAYER, format=FORMAT)
        self.missing.bring(
            *(1, moe), lambda: self.log.append("hits"), lambda: self.log.append("meanwhile")
        )
        assert self.host.area.published == NONE_EPOCH, "the section has ended"
        assert (self.addresses[0] == 77).all(), "another router's"
        return self.addresses[1].numpy()


def gpu_addresses(*ranks: int) -> np.ndarray:
    """Of fetched experts at these ranks; 0 elsewhere."""
    expected = np.zeros((3, TOP_K), np.int64)
    for rank in ranks:
        expected[:, rank] = 1000 * (100 + IDS[rank]) + np.arange(3)
    return expected


def test_without_a_lane_all_that_is_missing_is_fetched():
    world = World(host=IDS, gpu=[9, 0], lane=False)
    got = world.bring()
    assert np.array_equal(got[:ROW], gpu_addresses(0, 2, 3, 5))
    assert not got[ROW].any()
    hits = world.hits[1].numpy()
    assert hits[1].tolist() == [0, 9001, 0, 0, 1, 0]
    assert world.log[:3] == [("gpu fetch", [3, 4, 12, 7]), "hits", "meanwhile"]


def test_the_coldest_in_host_slots_are_computed_while_the_others_come():
    world = World(host=[3, 4, 12], gpu=[9])
    world.gpu.area.uses[LAYER, [3, 4, 12]] = 5, 1, 3
    got = world.bring()
    assert world.log == [
        ("gpu fetch", [3, 0, 7]), "hits", ("compute", [2, 3]), "meanwhile",
        ("gpu arrived", 3), ("gpu arrived", 0), ("gpu arrived", 7),
    ]  # fmt: skip
    assert np.array_equal(got[:ROW], gpu_addresses(0, 4, 5))
    assert got[ROW].nonzero()[0].tolist() == [2, 3]
    rows, first = world.lane.rows[0], world.lane.rows.data_ptr()
    for rank, expert in ((2, 4), (3, 12)):
        assert got[ROW, rank] == first + 4 * WIDTH * rank
        assert (rows[rank] == 500_000 + 1000 * expert).all()
    assert world.host.area.uses[LAYER].nonzero()[0].tolist() == [4, 12]
    assert world.host.area.hits == 2
    values = world.lane.values()
    assert (values["computed"], values["computed_bytes"], values["fetched"]) == (2, 2000, 3)
    assert values["is_on"]


def test_what_is_read_for_the_cpu_never_crosses_the_bus():
    world = World(host=[3, 4, 12], gpu=[9], reads=True)
    world.gpu.area.uses[LAYER, [3, 4, 12]] = 5, 1, 3
    got = world.bring()
    assert world.log == [
        ("host fetch", [0, 7]), ("gpu fetch", [3]), "hits", ("compute", [2, 3]), "meanwhile",
        ("host arrived", 0), ("compute", [4]), ("host arrived", 7), ("compute", [5]),
        ("gpu arrived", 3),
    ]  # fmt: skip
    assert np.array_equal(got[:ROW], gpu_addresses(0))
    assert got[ROW].nonzero()[0].tolist() == [2, 3, 4, 5]
    for rank, slot in ((2, 4), (3, 12), (4, 100), (5, 107)):
        assert (world.lane.rows[0, rank] == 500_000 + 1000 * slot).all()
    assert world.host.area.uses[LAYER].nonzero()[0].tolist() == [0, 4, 7, 12]
    assert (world.host.area.hits, world.host.area.misses) == (2, 2)


def test_a_failed_read_for_the_cpu_ends_the_section_too():
    world = World(reads=True)
    world.host.fails = True
    with pytest.raises(ReadFailed):
        world.bring()
    assert world.host.area.published == NONE_EPOCH


def test_where_all_is_computed_nothing_is_asked_for():
    world = World(host=[7], gpu=[3, 9, 4, 12, 0])
    got = world.bring()
    assert world.log == ["hits", ("compute", [5]), "meanwhile"]
    assert not got[:ROW].any()
    assert got[ROW].nonzero()[0].tolist() == [5]


def test_what_is_in_no_host_slot_is_left_to_the_daemon():
    world = World(gpu=[9])
    got = world.bring()
    assert np.array_equal(got[:ROW], gpu_addresses(0, 2, 3, 4, 5))
    assert not got[ROW].any()
    assert world.host.area.uses.sum() == 0


def test_rows_read_in_a_revoked_section_are_fetched_instead():
    world = World(host=IDS)
    world.host.revoked = True
    got = world.bring()
    assert np.array_equal(got[:ROW], gpu_addresses(*range(TOP_K)))
    assert not got[ROW].any()
    assert world.host.attached_count == 1
    assert (world.lane.counters.computed, world.lane.counters.discarded) == (0, 2)
    assert world.lane.is_on
    assert world.bring()[ROW].any(), "it goes on with the new attachment"


def test_a_host_client_that_finds_no_room_again_is_done_without():
    world = World(host=IDS)
    world.host.revoked = world.host.crowded = True
    assert np.array_equal(world.bring()[:ROW], gpu_addresses(*range(TOP_K)))
    assert not world.lane.is_on
    world.log.clear()
    assert not world.bring()[ROW].any()
    assert not [entry for entry in world.log if entry[0] == "compute"]


def test_a_failed_fetch_ends_the_section_too():
    world = World(host=[3])
    world.gpu.fails = True
    with pytest.raises(ReadFailed):
        world.bring()
    assert world.host.area.published == NONE_EPOCH


def test_own_work_while_something_is_on_its_way_is_no_idle_time_of_the_disk():
    world = World(host=[3, 4])
    world.bring()
    assert world.gpu.waits.overlapped_s > 0
    alone = World(host=[7], gpu=[3, 9, 4, 12, 0])
    alone.bring()
    assert alone.gpu.waits.overlapped_s == 0


def test_a_trial_switches_the_lane():
    world = World(host=IDS)
    world.lane._trial = SimpleNamespace(on=False, token_done=lambda token_s: None)
    assert not world.bring()[ROW].any()
    world.lane._trial.on = True
    assert world.bring()[ROW].any()
    world.lane.close()
    assert world.log[-1] == "closed"
