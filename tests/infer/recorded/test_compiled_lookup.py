"""The compiled answer to a router does what a section's begin does, in the same memory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import infer.recorded.router_answers as router_answers
from infer.recorded.router_answers import RouterAnswers
from shared.errors import ClientRevoked
from shared.residency import NONE_EPOCH, ClientArea, ResidencyTable, TableShape

SHAPE = TableShape(3, 8)
TOP_K, LAYER, NUMBER = 4, 1, 5


class World:
    """A client's mapping over memory of this process, and mailboxes that are not pinned."""

    def __init__(self) -> None:
        self.table = ResidencyTable(bytearray(SHAPE.table_bytes), SHAPE)
        self.table.initialise()
        self.table.epoch = 7
        self.area = ClientArea(bytearray(SHAPE.area_bytes), SHAPE)
        self.area.initialise()
        self.stretches = 4096 * np.arange(1, 31, dtype=np.int64).reshape(10, 3)
        self.mail = torch.zeros((1, 1 + TOP_K // 2), dtype=torch.int64)
        self.addresses = torch.full((1, 4, TOP_K), 5, dtype=torch.int64)
        mapping = SimpleNamespace(
            table=self.table,
            area=self.area,
            attached=SimpleNamespace(client=NUMBER),
            part_deltas=np.zeros((3, 8, 3), np.int64),
        )
        client = SimpleNamespace(
            mapping=mapping,
            rows=self.table.gpu_slots,
            stretches=self.stretches,
            experts=SimpleNamespace(top_k=TOP_K),
        )
        self.answers = RouterAnswers(client, self, [LAYER])

    def route(self, step: int, ids: list[int]) -> None:
        self.mail.view(torch.int32)[0, 2:] = torch.tensor(ids, dtype=torch.int32)
        self.mail[0, 0] = step


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(router_answers, "SPINS", 100)
    return World()


def test_hits_and_misses(world):
    world.table.gpu_slots[LAYER, [2, 6, 0]] = 9, 4, 3
    world.answers.begin_step(1)
    world.route(1, [6, 3, 0, 2])
    assert world.answers.answer(0) == 1
    expected = np.zeros((4, TOP_K), np.int64)
    for rank, slot in ((0, 4), (2, 3), (3, 9)):
        expected[:3, rank] = world.stretches[slot]
    assert np.array_equal(world.addresses[0].numpy(), expected)
    assert world.area.uses[LAYER].tolist() == [1, 0, 1, 1, 0, 0, 1, 0]
    assert world.area.uses.sum() == TOP_K
    assert (world.area.hits, world.area.misses) == (3, 1)
    assert (world.area.published, world.area.section) == (7, 1)


def test_each_answer_is_a_section_in_the_present_epoch(world):
    world.table.gpu_slots[LAYER] = 0
    world.answers.begin_step(1)
    world.route(1, [0, 1, 2, 3])
    assert world.answers.answer(0) == 0
    world.table.epoch = 12
    world.answers.begin_step(2)
    world.route(2, [0, 1, 2, 3])
    assert world.answers.answer(0) == 0
    assert (world.area.published, world.area.section) == (12, 2)


def test_no_answer_before_the_ids_of_this_step(world):
    world.answers.begin_step(3)
    world.route(2, [0, 1, 2, 3])
    assert world.answers.answer(0) is None
    assert (world.area.published, world.area.section) == (NONE_EPOCH, 0)
    assert world.area.uses.sum() == 0


def test_revoked_before_the_next_section(world):
    world.answers.begin_step(1)
    world.route(1, [0, 1, 2, 3])
    world.table.revoked[NUMBER] = 1
    with pytest.raises(ClientRevoked):
        world.answers.answer(0)
    assert world.area.section == 0
    world.table.revoked[NUMBER] = 0
    world.table.revoked[NUMBER + 1] = 1
    assert world.answers.answer(0) == TOP_K
