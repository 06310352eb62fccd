"""The host cache: who is said to hold up another client, and who is not."""

import pytest
from cache_bench import DEADLINE_MS, CacheBench

from streamd.slot_cache.stalls import stalled_clients


@pytest.fixture
def held_up(floor):
    """A reader has a hit in its section; another, younger one lacks a slot for its sake."""
    reader, other = floor.attach(0), floor.attach(1)
    floor.has_read(reader, 0, [9])
    reader.enter()
    reader.look_up(0, [9])
    for expert in range(4):
        other.enter()
        other.fetch(1, [expert])
        floor.step()
        floor.finish_all()
    assert floor.cache.waiting
    return floor, reader, other


def stalled_after(bench, elapsed_ms):
    bench.now_ms += elapsed_ms
    bench.step()
    return stalled_clients(bench.cache, bench.now_ms, DEADLINE_MS)


def test_a_still_client_that_holds_up_another_is_stalled_at_the_deadline(held_up):
    bench, reader, _ = held_up
    assert stalled_after(bench, DEADLINE_MS - 1) == []
    assert stalled_after(bench, 1) == [reader.number]
    bench.cache.revoke(reader.number)
    assert bench.table.revoked[reader.number] == 1
    assert len(bench.step().grants) == 1


def test_one_that_moves_is_not_stalled(held_up):
    bench, reader, _ = held_up
    assert stalled_after(bench, DEADLINE_MS - 1) == []
    reader.enter()
    assert stalled_after(bench, DEADLINE_MS - 1) == []


def test_one_that_holds_up_nobody_is_not_stalled(floor):
    reader, other = floor.attach(0), floor.attach(1)
    floor.has_read(reader, 0, [9])
    reader.enter()
    assert stalled_after(floor, 10 * DEADLINE_MS) == []
    other.enter()
    other.fetch(1, [0])
    assert stalled_after(floor, 10 * DEADLINE_MS) == []
    assert len(floor.reads) == 1, "there was a slot for the other"


def test_the_deadline_runs_from_when_the_other_began_to_wait(held_up):
    bench, reader, other = held_up
    bench.cache.detach(other.number)
    assert stalled_after(bench, 10 * DEADLINE_MS) == []
    other = bench.attach(other.number)
    other.enter()
    other.fetch(1, [15])
    assert stalled_after(bench, 0) == []
    assert bench.cache.waiting
    assert stalled_after(bench, DEADLINE_MS) == [reader.number]


def test_the_deadline_runs_from_the_request_not_from_its_section():
    bench = CacheBench(class_slots=(6,), waves=(1,))
    reader, other, third = (bench.attach(number) for number in range(3))
    reader.enter()
    bench.press(other, range(6))
    other.enter()
    third.enter()
    third.fetch(0, [0])
    bench.step(room_count=0)  # all three are looked at
    bench.cache.detach(third.number)
    bench.now_ms += 10 * DEADLINE_MS
    other.fetch(1, [15])
    assert stalled_after(bench, 0) == []
    assert bench.cache.waiting
    assert stalled_after(bench, DEADLINE_MS) == [reader.number]


def test_one_that_waits_for_a_slab_itself_is_not_stalled(floor):
    reader, other = floor.attach(0), floor.attach(1)
    reader.enter()
    reader.fetch(0, [9])
    (grant,) = floor.step().grants
    for expert in range(4):
        other.enter()
        other.fetch(1, [expert])
        floor.step()
        for slot in set(floor.reads) - {grant.slot}:
            floor.finish(slot)
    assert floor.cache.waiting
    assert stalled_after(floor, 10 * DEADLINE_MS) == []
    floor.finish(grant.slot)
    assert stalled_after(floor, DEADLINE_MS - 1) == [], "it has only just got it"
    assert stalled_after(floor, 1) == [reader.number]


def test_the_younger_is_not_to_blame(held_up):
    bench, reader, _ = held_up
    reader.fetch(0, [1])
    bench.step()
    bench.finish_all()
    assert bench.cache.waiting
    assert stalled_after(bench, 10 * DEADLINE_MS) == [reader.number]


def test_nobody_is_to_blame_for_a_busy_disk(bench):
    reader, other = bench.attach(0), bench.attach(1)
    bench.press(other, range(5))
    reader.enter()
    other.enter()
    other.fetch(1, [5])
    bench.step(room_count=0)
    bench.now_ms += 10 * DEADLINE_MS
    bench.step(room_count=0)
    slots = bench.cache.classes[0]
    assert bench.cache.waiting
    assert slots.limbo[-1][0] > reader.area.published
    assert stalled_clients(bench.cache, bench.now_ms, DEADLINE_MS) == []
