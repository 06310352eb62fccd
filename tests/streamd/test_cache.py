"""Each rule of docs/protocol.md by itself, with as few clients and slots as show it."""

import numpy as np
import pytest
from cache_bench import DEADLINE_MS, CacheBench

from shared.errors import DaemonBusy, PlanError, RequestError
from shared.residency import MAX_CLIENTS


@pytest.fixture
def bench():
    """Two clients fit: sections of 2 experts, 8 slots, 32 experts in two layers."""
    return CacheBench()


@pytest.fixture
def floor():
    """Two clients fit: sections of 1 expert, 4 slots, 32 experts in two layers."""
    return CacheBench(class_slots=(4,), waves=(1,))


def press(bench, client, experts, layer=1):
    """Section after section wants another expert: what is cold and free to go has to go."""
    for expert in experts:
        bench.now_ms += 10
        client.enter()
        client.look_up(layer, [expert])
        client.fetch(layer, [expert])
        bench.step()
        bench.finish_all()
    client.leave()


# Hits and misses


def test_a_hit_needs_nothing_of_the_daemon(bench):
    client = bench.attach(0)
    slots = bench.has_read(client, 0, [3, 5])
    bench.meanwhile = lambda: pytest.fail("the daemon took notice")
    client.enter()
    assert client.look_up(0, [5, 3]) == slots[::-1]
    client.leave()
    assert not bench.cache.waiting
    assert bench.step().grants == []
    assert bench.cache.counters.misses == 2


def test_a_miss_is_given_a_slot_and_appears_when_it_is_read(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(1, [7])
    assert bench.cache.waiting
    grants = bench.step().grants
    assert [(grant.layer, grant.expert) for grant in grants] == [(1, 7)]
    assert not bench.cache.waiting
    assert client.look_up(1, [7]) == [-1], "it is still being read"
    assert bench.finish(grants[0].slot) == [0]
    assert client.look_up(1, [7]) == [grants[0].slot]


def test_nobody_waits_nothing_happens(bench):
    client = bench.attach(0)
    client.enter()
    step = bench.step()
    assert (step.grants, step.ring) == ([], set())


def test_no_more_reads_begin_than_there_is_room_for(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(0, [1, 2])
    assert bench.step(room_count=0).grants == []
    assert len(bench.step(room_count=1).grants) == 1
    assert len(bench.step(room_count=1).grants) == 1
    assert not bench.cache.waiting


def test_what_is_resident_is_given_without_room(bench):
    client, other = bench.attach(0), bench.attach(1)
    bench.has_read(other, 0, [1])
    client.enter()
    client.fetch(0, [1])
    assert bench.step(room_count=0).ring == {0}


# Joined reads, reads that fail


def test_a_second_client_joins_a_read(bench):
    first, second = bench.attach(0), bench.attach(1)
    first.enter()
    second.enter()
    first.fetch(0, [4])
    (grant,) = bench.step().grants
    second.fetch(0, [4])
    step = bench.step()
    assert (step.grants, step.ring) == ([], set())
    assert bench.cache.counters.joined_reads == 1
    assert sorted(bench.finish(grant.slot)) == [0, 1]


def test_two_clients_that_ask_at_once_are_given_one_slot(bench):
    clients = [bench.attach(number) for number in (0, 1)]
    for client in clients:
        client.enter()
        client.fetch(0, [4])
    (grant,) = bench.step().grants
    assert sorted(bench.finish(grant.slot)) == [0, 1]


def test_a_fetch_for_what_has_become_live_meanwhile_is_rung_and_pinned(floor):
    first, second = floor.attach(0), floor.attach(1)
    (slot,) = floor.has_read(first, 0, [4])
    second.enter()
    second.fetch(0, [4])
    step = floor.step()
    assert (step.grants, step.ring) == ([], {1})
    press(floor, first, range(8))
    assert second.look_up(0, [4]) == [slot]


def test_a_failed_read_frees_its_slot_and_names_who_asked(bench):
    first, second = bench.attach(0), bench.attach(1)
    section, other_section = first.enter(), second.enter()
    second.leave()
    other_section = second.enter()
    first.fetch(1, [4])
    second.fetch(1, [4])
    (grant,) = bench.step().grants
    free_count = bench.spare_slots()
    layer, expert, asked = bench.fail(grant.slot)
    assert (layer, expert) == (1, 4)
    assert sorted(asked) == [(0, section), (1, other_section)]
    assert bench.spare_slots() == free_count + 1
    assert first.look_up(1, [4]) == [-1]
    first.fetch(1, [4])  # the section may ask again
    assert [(g.layer, g.expert) for g in bench.step().grants] == [(1, 4)]


def test_a_read_that_nobody_waits_for_any_more_is_published_all_the_same(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(0, [4])
    (grant,) = bench.step().grants
    client.enter()
    client.fetch(0, [5])
    (other,) = bench.step().grants
    assert bench.finish(grant.slot) == []
    assert client.look_up(0, [4]) == [grant.slot]
    assert bench.fail(other.slot) == (0, 5, [(0, 2)])


# Pins


@pytest.mark.parametrize("ending", ["leave", "enter"])
def test_a_granted_miss_is_pinned_until_its_section_ends(floor, ending):
    client, other = floor.attach(0), floor.attach(1)
    client.enter()
    client.fetch(0, [9])
    floor.step()
    floor.finish_all()
    press(floor, other, range(8))
    assert 9 in floor.resident(0), "the client has not seen it yet"
    getattr(client, ending)()
    press(floor, other, range(8, 16))
    assert 9 not in floor.resident(0)


def test_a_pin_is_held_once_however_often_it_is_asked_for(floor):
    client, other = floor.attach(0), floor.attach(1)
    client.enter()
    client.fetch(0, [9])
    floor.step()
    client.fetch(0, [9])
    floor.step()
    floor.finish_all()
    client.fetch(0, [9])
    assert floor.step().ring == {0}
    client.leave()
    press(floor, other, range(16))
    assert 9 not in floor.resident(0)


# Grace period


def test_a_retired_slot_is_not_reused_while_its_readers_may_be_there(floor):
    reader, other = floor.attach(0), floor.attach(1)
    (slot,) = floor.has_read(reader, 0, [9])
    reader.enter()
    assert reader.look_up(0, [9]) == [slot]
    other.enter()
    given = []
    for expert in range(4):  # two of these sections have to wait for the reader
        other.enter()
        other.fetch(1, [expert])
        given += [grant.slot for grant in floor.step().grants]
        floor.finish_all()
    assert 9 not in floor.resident(0), "it is out of the table, and readable"
    assert slot not in given
    assert floor.cache.waiting
    reader.leave()
    for expert in range(4, 8):
        other.enter()
        other.fetch(1, [expert])
        given += [grant.slot for grant in floor.step().grants]
        floor.finish_all()
    assert slot in given


def test_the_order_of_table_epoch_and_barriers(floor):
    """Out of the table; barrier; epoch and stamp; barrier."""
    press(floor, floor.attach(0), range(3))
    epoch, resident_count = floor.table.epoch, len(floor.resident(1))
    seen = []
    floor.meanwhile = lambda: seen.append((floor.table.epoch, len(floor.resident(1))))
    floor.attach(1)
    assert seen == [(epoch, resident_count - 1), (epoch + 1, resident_count - 1)]
    assert floor.cache.classes[0].limbo[-1][0] == floor.table.epoch


def test_one_epoch_for_all_victims_of_a_step(bench):
    client = bench.attach(0)
    press(bench, client, range(6))
    client.enter()
    client.fetch(1, [6, 7])
    epoch, evictions = bench.table.epoch, bench.cache.counters.evictions
    bench.step()
    assert bench.table.epoch == epoch + 1
    assert bench.cache.counters.evictions == evictions + 2


# Reserve and age


def test_the_older_section_finds_its_share_whatever_the_younger_takes(bench):
    old, young = bench.attach(0), bench.attach(1)
    press(bench, young, range(6))
    old.enter()
    for expert in range(0, 12, 2):
        young.enter()
        young.fetch(0, [expert, expert + 1])
        bench.step()
        bench.finish_all()
    assert bench.cache.waiting, "the younger has to wait for the older"
    old.fetch(1, [14, 15])
    assert {(grant.layer, grant.expert) for grant in bench.step().grants} == {(1, 14), (1, 15)}
    bench.finish_all()
    old.leave()
    assert len(bench.step().grants) == 2


def test_of_sections_of_one_epoch_that_of_the_smaller_number_is_older(bench):
    second, first = bench.attach(1), bench.attach(0)
    for client in (second, first):
        client.enter()
        client.fetch(client.number, [1, 2])
    assert first.area.published == second.area.published
    assert [grant.layer for grant in bench.step(room_count=2).grants] == [0, 0]


def test_the_reserve_is_whole_also_while_slots_are_given(floor):
    """Two clients give up their sections during a step and begin others before its epoch ends.

    Had the step given slots that it was still to retire, the sections begun would be of the old
    epoch, the reserve of the new one: neither could be served before it ended.
    """
    clients = [floor.attach(0), floor.attach(1)]
    press(floor, clients[0], range(8))
    for client in clients:
        client.enter()
        client.fetch(0, [client.number])

    def begin_again():
        floor.meanwhile = None
        clients[1].leave()
        clients[0].enter()

    floor.meanwhile = begin_again
    floor.step()
    clients[0].fetch(0, [8])
    floor.step()
    floor.finish_all()
    assert clients[0].look_up(0, [8])[0] >= 0


def test_a_class_that_holds_everything_never_evicts():
    bench = CacheBench(class_slots=(32,), waves=(16,))
    clients = [bench.attach(number) for number in range(MAX_CLIENTS)]
    for layer in (0, 1):
        slots = bench.has_read(clients[0], layer, range(16))
        for client in clients[1:3]:
            client.enter()
            assert client.look_up(layer, range(16)) == slots
    assert bench.cache.counters.evictions == 0
    assert bench.table.epoch == 1
    assert bench.cache.classes[0].used_count == 32


def test_each_size_class_has_its_own_slots_and_reserve():
    bench = CacheBench(class_slots=(8, 4), waves=(2, 1), layer_class=(0, -1, 1))
    client = bench.attach(0)
    (slot,) = bench.has_read(client, 2, [3])
    assert 8 <= slot < 12
    press(bench, client, range(16), layer=0)
    assert bench.resident(2) == {3}
    assert all(0 <= slot < 8 for slot in bench.table.host_slots[0] if slot >= 0)


# Attaching, leaving


def test_a_client_too_many_is_refused_with_the_remedy(bench):
    for number in (0, 1):
        bench.attach(number)
    with pytest.raises(PlanError, match="8 slots, 3 clients need 12") as refusal:
        bench.attach(2)
    assert "--host-cache" in refusal.value.remedy
    assert "end another client" in refusal.value.remedy
    assert list(bench.cache.clients) == [0, 1]
    bench.cache.detach(0)
    bench.attach(2)


def test_the_smallest_class_decides_who_fits():
    bench = CacheBench(class_slots=(32, 16, 2), waves=(16, 2, 1), layer_class=(0, 0, 1, 2))
    bench.attach(0)
    with pytest.raises(PlanError, match="2 slots, 2 clients need 4"):
        bench.attach(1)


def test_a_client_comes_while_everything_is_being_read_into(floor):
    client = floor.attach(0)
    for expert in range(3):  # given up one after another
        client.enter()
        client.fetch(0, [expert])
        floor.step()
    assert len(floor.reads) == 3
    with pytest.raises(DaemonBusy, match="being read into"):
        floor.attach(1)
    floor.finish_all()
    floor.attach(1)


def test_a_newcomer_finds_its_reserve_made(bench):
    client = bench.attach(0)
    press(bench, client, range(10))
    before = bench.spare_slots()
    bench.attach(1)
    assert before < 4 <= bench.spare_slots()
    assert bench.table.revoked[1] == 0


def test_a_number_is_used_again_without_its_past(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(0, [1])
    bench.cache.revoke(0)
    assert bench.table.revoked[0] == 1
    newcomer = bench.attach(0)
    assert bench.table.revoked[0] == 0
    assert not bench.cache.waiting
    assert len(bench.has_read(newcomer, 0, [1, 2])) == 2


def wait_for_a_slot(bench, client):
    client.enter()
    client.fetch(0, [1])


def wait_for_a_read(bench, client):
    wait_for_a_slot(bench, client)
    bench.step()


def hold_a_pin(bench, client):
    wait_for_a_read(bench, client)
    bench.finish_all()


@pytest.mark.parametrize(
    "state",
    [
        lambda bench, client: None,
        lambda bench, client: client.enter(),
        wait_for_a_slot,
        wait_for_a_read,
        hold_a_pin,
    ],
    ids=["idle", "entered", "waits for a slot", "waits for a read", "holds a pin"],
)
@pytest.mark.parametrize("ending", ["detach", "revoke"])
def test_a_client_ends_in_any_state(floor, state, ending):
    client, other = floor.attach(0), floor.attach(1)
    press(floor, other, range(6))
    state(floor, client)
    getattr(floor.cache, ending)(0)
    assert not floor.cache.waiting
    floor.finish_all()
    press(floor, other, range(16), layer=0)
    assert floor.cache.counters.revocations == (ending == "revoke")
    assert floor.cache.classes[0].pin_count.sum() <= 1


def test_what_a_client_counted_outlives_it(bench):
    client, other = bench.attach(0), bench.attach(1)
    for area, tokens in ((client.area, 5), (other.area, 7)):
        area.count_lookups(3, 1)
        area.count_tokens(tokens)
    bench.cache.detach(0)
    bench.cache.revoke(1)
    assert bench.cache.counters.departed_hits == 6
    assert bench.cache.counters.departed_tokens == 12


# Requests that are refused or dropped


@pytest.mark.parametrize("layer", [-1, 1, 3, 2**40])
def test_a_layer_without_experts_is_refused(layer):
    bench = CacheBench(class_slots=(8, 8), waves=(2, 2), layer_class=(0, -1, 1))
    client = bench.attach(0)
    client.enter()
    with pytest.raises(RequestError, match=f"layer {layer} has no routed experts"):
        client.fetch(layer, [0])
    assert not bench.cache.waiting


@pytest.mark.parametrize("expert", [-1, 16, 2**70])
def test_an_unknown_expert_is_refused(bench, expert):
    client = bench.attach(0)
    client.enter()
    with pytest.raises(RequestError, match=r"beyond 0\.\.15 of layer 1"):
        client.fetch(1, [3, expert])
    assert not bench.cache.waiting
    assert bench.cache.counters.misses == 0


def test_more_than_a_section_may_need_is_refused(bench):
    client = bench.attach(0)
    client.enter()
    with pytest.raises(RequestError, match="more than 2 experts"):
        client.fetch(0, [1, 2, 3])
    client.fetch(0, [1, 1, 2, 2])
    client.fetch(0, [2, 1])
    with pytest.raises(RequestError, match="more than 2 experts"):
        client.fetch(0, [3])
    bench.step()
    client.fetch(0, [1, 2])
    with pytest.raises(RequestError, match="more than 2 experts"):
        client.fetch(1, [1])
    client.enter()
    client.fetch(1, [1, 2])
    assert len(bench.step().grants) == 2


def test_a_fetch_of_a_section_that_is_over_is_dropped(bench):
    client = bench.attach(0)
    late = client.enter()
    client.enter()
    client.fetch(0, [1])
    client.fetch(0, [2, 3], section=late)
    assert [grant.expert for grant in bench.step().grants] == [1]
    client.fetch(0, [4])
    client.leave()
    assert bench.step().grants == []
    assert not bench.cache.waiting


def test_a_section_that_the_client_has_not_begun_gets_nothing(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(0, [1], section=99)
    assert bench.step().grants == []
    assert not bench.cache.waiting
    client.fetch(0, [1])
    assert bench.step().grants != []


# Who holds up another


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
    return bench.cache.stalled_clients(DEADLINE_MS)


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
    bench.has_read(reader, 0, [9])
    reader.enter()
    other.enter()
    other.fetch(1, [0])
    bench.step(room_count=0)
    bench.now_ms += 10 * DEADLINE_MS
    bench.step(room_count=0)
    assert bench.cache.waiting
    assert bench.cache.stalled_clients(DEADLINE_MS) == []


# Who is evicted


def test_the_coldest_are_evicted():
    bench = CacheBench(class_slots=(20,), waves=(2,), layer_class=(0, 0), n_experts=32)
    client = bench.attach(0)
    for expert in range(0, 18, 2):
        bench.has_read(client, 0, [expert, expert + 1])
    uses = np.random.default_rng(5).permutation(18)
    for expert, count in enumerate(uses):
        client.has_used(0, expert, int(count))
    for expert in range(4):
        client.has_used(1, expert, 100)
    bench.now_ms += 1000
    bench.has_read(client, 1, [0, 1])
    bench.has_read(client, 1, [2, 3])
    gone = set(range(18)) - bench.resident(0)
    assert gone == set(np.argsort(uses)[: len(gone)].tolist())
    assert len(gone) == 4


def test_hot_experts_survive_a_scan():
    bench = CacheBench(class_slots=(16,), waves=(2,), layer_class=(0, 0), n_experts=64)
    client = bench.attach(0)
    hot = {1, 2, 3, 4, 5, 6}
    for expert in sorted(hot):
        bench.has_read(client, 0, [expert])
        client.has_used(0, expert, 20)
    press(bench, client, range(64))
    press(bench, client, range(64))
    assert hot <= bench.resident(0)


def test_what_has_grown_cold_makes_room():
    bench = CacheBench(class_slots=(16,), waves=(2,), layer_class=(0, 0), n_experts=64)
    client = bench.attach(0)
    bench.has_read(client, 0, [1])
    client.has_used(0, 1, 20)
    for _ in range(8):
        client.has_used(1, 63, 128 * 32)  # half-lives go by
        press(bench, client, range(16, 48))
    assert 1 not in bench.resident(0)
