"""The host cache: what is kept for whom, and who has to go."""

import numpy as np
import pytest
from cache_bench import CacheBench

from shared.residency import MAX_CLIENTS
from shared.scan import USE_PARTS, use_parts
from streamd.slot_cache.grants import Wishes

# Reserve and age


def test_the_older_section_finds_its_share_whatever_the_younger_takes(bench):
    old, young = bench.attach(0), bench.attach(1)
    bench.press(young, range(6))
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


def test_room_goes_to_the_oldest_section_first(bench):
    young, old = bench.attach(0), bench.attach(1)
    old.enter()
    bench.press(young, range(5))
    young.enter()
    assert old.area.published < young.area.published
    young.fetch(0, [1])
    old.fetch(0, [2])
    assert [grant.expert for grant in bench.step(room_count=1).grants] == [2]


def test_a_slot_that_the_reserve_cannot_spare_waits_for_a_read_to_end(floor):
    client = floor.attach(0)
    for expert in range(3):  # given up one after another, and still being read
        client.enter()
        client.fetch(0, [expert])
        assert len(floor.step().grants) == 1
    client.enter()
    client.fetch(0, [3])
    assert floor.step().grants == []
    assert floor.spare_slots() == 1
    floor.finish(min(floor.reads))
    assert [grant.expert for grant in floor.step().grants] == [3]


def test_nothing_is_evicted_for_what_has_a_slot_or_will_have(floor):
    first, second = floor.attach(0), floor.attach(1)
    floor.has_read(first, 0, [1])
    first.enter()
    first.fetch(0, [2])
    floor.step()
    evictions = floor.cache.counters.evictions
    for expert in (1, 2):
        second.enter()
        second.fetch(0, [expert])
        floor.step()
    assert floor.cache.counters.evictions == evictions


def test_the_reserve_is_whole_also_while_slots_are_given(floor):
    """Two clients give up their sections during a step and begin others before its epoch ends.

    Had the step given slots that it was still to retire, the sections begun would be of the old
    epoch, the reserve of the new one: neither could be served before it ended.
    """
    clients = [floor.attach(0), floor.attach(1)]
    floor.press(clients[0], range(8))
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


def test_hints_take_nothing_from_a_demand_while_a_newcomer_lacks_room(bench):
    client = bench.attach(0)
    bench.press(client, range(8))
    hints = Wishes(prefetch=(14, 15))
    while not bench.cache.ahead:
        bench.step(wishes=hints)
    bench.attach(1)
    (slots,) = bench.cache.classes
    assert bench.cache.reserve.room_ahead(slots, bench.cache.ahead) < 0
    client.enter()
    client.fetch(1, [12])
    granted = [grant.expert for _ in range(3) for grant in bench.step(wishes=hints).grants]
    assert granted == [12]


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


def test_a_class_that_holds_everything_makes_nobody_wait():
    bench = CacheBench(class_slots=(32,), waves=(16,))
    old, young = bench.attach(0), bench.attach(1)
    old.enter()
    for layer in (0, 1):
        bench.has_read(young, layer, range(16))
    assert old.look_up(1, range(16)) == bench.table.host_slots[1].tolist()


def test_each_size_class_has_its_own_slots_and_reserve():
    bench = CacheBench(class_slots=(8, 4), waves=(2, 1), layer_class=(0, -1, 1))
    client = bench.attach(0)
    (slot,) = bench.has_read(client, 2, [3])
    assert 8 <= slot < 12
    bench.press(client, range(16), layer=0)
    assert bench.resident(2) == {3}
    assert all(0 <= slot < 8 for slot in bench.table.host_slots[0] if slot >= 0)


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
    bench.press(client, range(64))
    bench.press(client, range(64))
    assert hot <= bench.resident(0)


@pytest.mark.parametrize("token_count", [600, 2000, 8000])
def test_a_long_prompt_does_not_put_out_what_decoding_uses(token_count):
    """Two layers of 64 experts, top-2; a third of them fit, less what sections have in reserve.

    Decoding chooses among twelve a layer; then a prompt of which each expert gets its part.
    """
    n_experts, top_k, hot_count = 64, 2, 12
    bench = CacheBench(class_slots=(44,), waves=(2,), layer_class=(0, 0), n_experts=n_experts)
    client, other = bench.attach(0), bench.attach(1)
    rng = np.random.default_rng(1)

    def section(who, layer, experts, use_count, parts):
        bench.now_ms += 10
        who.enter()
        missing = set(experts) - bench.resident(layer)
        who.area.count_uses(layer, np.array(experts), use_count, parts)
        if missing:
            who.fetch(layer, missing)
            bench.step()
            bench.finish_all()
        who.leave()
        return len(missing)

    def decode(token_count):
        return sum(
            section(client, layer, rng.choice(hot_count, 2, replace=False).tolist(), 1, USE_PARTS)
            for _ in range(token_count)
            for layer in (0, 1)
        )

    decode(200)
    assert decode(50) == 0
    parts = use_parts(token_count, top_k, n_experts)
    use_count = token_count * top_k // n_experts
    for layer in (0, 1):
        for first in range(0, n_experts, 2):
            section(other, layer, [first, first + 1], use_count, parts)
    assert decode(50) <= 2


def test_the_uses_of_one_that_has_left_count_on():
    bench = CacheBench(class_slots=(16,), waves=(2,), layer_class=(0, 0), n_experts=64)
    client, other = bench.attach(0), bench.attach(1)
    bench.has_read(client, 0, [1])
    client.has_used(0, 1, 20)
    bench.cache.detach(0)
    bench.press(other, range(64))
    assert 1 in bench.resident(0)


def test_what_has_grown_cold_makes_room():
    bench = CacheBench(class_slots=(16,), waves=(2,), layer_class=(0, 0), n_experts=64)
    client = bench.attach(0)
    bench.has_read(client, 0, [1])
    client.has_used(0, 1, 20)
    for _ in range(8):
        client.has_used(1, 63, 128 * 32)  # half-lives go by
        bench.press(client, range(16, 48))
    assert 1 not in bench.resident(0)
