"""Who may have a FREE slot: the arithmetic alone, on clients and slots made by hand."""

import numpy as np
import pytest

from shared.residency import NONE_EPOCH, ClientArea, TableShape
from shared.slots import ClassSlots
from streamd.slot_cache.cache_client import CacheClient
from streamd.slot_cache.reserve import AHEAD_DIVISOR, MAX_AHEAD_SLOTS, Reserve

SHAPE = TableShape(1, 64)
WAVE = 3


def a_client(number, published=NONE_EPOCH, pins=()):
    area = ClientArea(bytearray(SHAPE.area_bytes), SHAPE)
    client = CacheClient(number, area, 0.0)
    client.published = published
    client.pins = set(pins)
    return client


def reserve_of(*clients):
    return Reserve({client.number: client for client in clients})


@pytest.fixture
def slots():
    """Slots 10..39, all FREE, for 64 experts."""
    return ClassSlots(10, 30, 64, WAVE)


def into_limbo(slots, count, stamp):
    for _ in range(count):
        slot = slots.take(int(np.max(slots.key)) + 1)
        slots.publish(slot)
        slots.retire(slot, stamp)


def test_the_reserve_counts_every_client(slots):
    clients = [a_client(0), a_client(1, published=5)]
    assert reserve_of().count(slots) == 0
    assert reserve_of(*clients).count(slots) == 2 * WAVE


def test_every_older_section_has_a_share_less_its_pins(slots):
    me = a_client(3, published=7)
    older = a_client(5, published=6, pins=[10, 11])
    oldest = a_client(1, published=2)
    younger = a_client(0, published=8)
    outside = a_client(2)
    reserve = reserve_of(me, older, oldest, younger, outside)
    assert reserve.share_of_older(slots, oldest) == 0
    assert reserve.share_of_older(slots, older) == WAVE
    assert reserve.share_of_older(slots, me) == WAVE + 1
    assert reserve.share_of_older(slots, younger) == WAVE + 1 + WAVE


def test_pins_in_another_class_take_nothing_off(slots):
    me, older = a_client(0, published=2), a_client(1, published=1, pins=[9, 40, 41])
    assert reserve_of(me, older).share_of_older(slots, me) == WAVE


def test_in_one_epoch_the_smaller_number_is_older(slots):
    low, high = a_client(0, published=4), a_client(1, published=4)
    reserve = reserve_of(high, low)
    assert reserve.share_of_older(slots, low) == 0
    assert reserve.share_of_older(slots, high) == WAVE


def test_a_slot_is_given_only_beyond_the_share_and_the_reserve(slots):
    reserve = reserve_of(a_client(0), a_client(1))
    while slots.spare_count > 2 * WAVE:
        assert reserve.may_give(slots, share_of_older=0)
        slots.take(int(np.max(slots.key)) + 1)
    assert len(slots.free) == 2 * WAVE
    assert not reserve.may_give(slots, share_of_older=0), "the reserve"
    slots.reclaim(NONE_EPOCH)
    into_limbo(slots, 2, stamp=9)
    reserve = reserve_of(a_client(0))
    assert reserve.may_give(slots, share_of_older=2 * WAVE - 3)
    assert not reserve.may_give(slots, share_of_older=2 * WAVE - 2), "older sections"


def test_where_every_expert_has_its_slot_nothing_is_kept():
    slots = ClassSlots(0, 64, 64, wave_experts=64)
    clients = [a_client(number, published=number) for number in range(3)]
    reserve = reserve_of(*clients)
    assert reserve.count(slots) == 0
    assert reserve.share_of_older(slots, clients[2]) == 0
    for key in range(64):
        assert reserve.may_give(slots, share_of_older=0)
        slots.take(key)


def test_only_who_keeps_slots_in_limbo_holds_up(slots):
    """Of three older sections one began before the newest slots were retired."""
    early, late = a_client(0, published=5), a_client(1, published=6)
    me, younger = a_client(2, published=6), a_client(3, published=6)
    reserve = reserve_of(early, late, me, younger)
    assert not reserve.is_held_up(me, early, slots), "nothing is in LIMBO"
    into_limbo(slots, len(slots.free) - 2 * WAVE, stamp=6)
    assert len(slots.free) == reserve.share_of_older(slots, me)
    assert reserve.is_held_up(me, early, slots)
    assert not reserve.is_held_up(me, late, slots), "it began after they were retired"
    assert not reserve.is_held_up(me, younger, slots)
    assert not reserve.is_held_up(early, me, slots)
    slots.reclaim(6)
    into_limbo(slots, len(slots.free) - 2 * WAVE, stamp=7)
    assert reserve.is_held_up(me, late, slots)
    assert not reserve.is_held_up(me, younger, slots), "it takes nothing from an older one"
    slots.reclaim(7)
    assert not reserve.is_held_up(me, early, slots), "there are enough FREE ones"


def test_reading_ahead_leaves_every_client_its_share(slots):
    """Of those in no section too."""
    clients = [a_client(0), a_client(1, published=5, pins=[10, 11, 99])]
    assert reserve_of(*clients).share_of_all(slots) == WAVE + 1
    slots.holds_all = True
    assert reserve_of(*clients).share_of_all(slots) == 0


@pytest.mark.parametrize(
    ("slot_count", "client_count", "room_count"),
    [
        (30, 0, 30 // AHEAD_DIVISOR),
        (30, 4, 30 // AHEAD_DIVISOR),
        (26, 4, 2),  # beyond the floor of 2 x 3 x 4
        (24, 4, 0),
        (5, 0, 1),
        (10_000, 1, MAX_AHEAD_SLOTS),
    ],
)
def test_reading_ahead_has_a_share_of_what_is_beyond_the_floor(
    slot_count, client_count, room_count
):
    slots = ClassSlots(10, slot_count, 10**6, WAVE)
    reserve = reserve_of(*map(a_client, range(client_count)))
    assert reserve.room_ahead(slots, ()) == room_count
    assert reserve.room_ahead(slots, {10, 11, 9}) == room_count - 2, "9 is of another class"
