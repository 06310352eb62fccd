"""Demand, prefetch and backfill over one disk, in simulated time: see prefetch_world.py."""

import pytest
from prefetch_world import SLAB_BYTES, PrefetchWorld, hopeless, perfect

from streamd.scheduling.backfill import MAX_HOPELESS, MAX_UNDERWAY
from streamd.scheduling.prefetch import HINT_AGE_MS
from streamd.scheduling.scheduler import MAX_WISHES


def decode(foresight=None, slot_count=64, client_count=1, **options):
    world = PrefetchWorld(slot_count)
    for seed in range(client_count):
        world.decoder(foresight=foresight, seed=seed, **options)
    world.run()
    world.idle(2 * HINT_AGE_MS)
    return world


def check_books(world):
    """Every prefetch has exactly one verdict, and every read was somebody's."""
    counters = world.scheduler.prefetch.counters
    assert counters.hinted == counters.expired + counters.demanded + counters.issued
    verdicts = counters.useful + counters.late + counters.wasted + counters.failed
    assert counters.issued == verdicts + counters.withdrawn
    assert not world.scheduler.prefetch.pending
    assert not world.cache.ahead
    assert counters.issued_bytes == SLAB_BYTES * verdicts
    assert counters.useful_bytes == SLAB_BYTES * counters.useful
    assert counters.wasted_bytes == SLAB_BYTES * counters.wasted
    assert counters.late_bytes == SLAB_BYTES * counters.late
    return counters


def test_hints_that_are_right_take_the_reads_under_the_computing():
    blind, seeing = decode(), decode(perfect)
    assert blind.scheduler.prefetch.counters.issued == 0
    counters = check_books(seeing)
    assert counters.useful > 100
    assert counters.wasted == 0
    waited_ms, blind_ms = (world.decoders[0].waited_ms for world in (seeing, blind))
    assert waited_ms < 0.5 * blind_ms
    assert seeing.decoders[0].hits > blind.decoders[0].hits


def test_hints_that_are_wrong_cost_little_time_and_no_hits():
    blind, misled = decode(), decode(hopeless)
    counters = check_books(misled)
    assert counters.wasted > 100
    assert counters.useful == 0
    hit_rates = [w.decoders[0].hits / w.decoders[0].lookups for w in (blind, misled)]
    assert hit_rates[1] > hit_rates[0] - 0.05, "the hot set is still there"
    assert misled.decoders[0].waited_ms < 1.3 * blind.decoders[0].waited_ms


def test_the_smallest_cache_leaves_nothing_to_hints():
    world = decode(perfect, slot_count=4)
    assert check_books(world).issued == 0
    counters = world.scheduler.prefetch.counters
    assert counters.hinted == counters.demanded + counters.expired > 0


def test_clients_share_fairly():
    world = decode(perfect, client_count=3, slot_count=96)
    check_books(world)
    waits_ms = [decoder.waited_ms for decoder in world.decoders]
    assert max(waits_ms) < 1.5 * min(waits_ms)


def test_one_that_hints_a_lot_does_not_crowd_out_another():
    world = PrefetchWorld(slot_count=96)
    greedy, modest = world.decoder(), world.decoder()
    for decoder in (greedy, modest):
        decoder.area.enter(world.table)
    for layer in range(1, 5):
        world.scheduler.hint(greedy.number, greedy.area, layer, layer, range(32), 32)
    world.scheduler.hint(modest.number, modest.area, 1, 5, [3, 4], 2)
    wishes = world.scheduler.prefetch.wishes(MAX_WISHES, lambda key: True)
    assert len(wishes) == MAX_WISHES
    assert {5 * 32 + 3, 5 * 32 + 4} <= set(wishes[:4])


@pytest.fixture
def world():
    return PrefetchWorld()


@pytest.fixture
def client(world):
    decoder = world.decoder()
    decoder.area.enter(world.table)
    return decoder


def hint(world, client, layer, experts, ahead=1):
    section = client.area.section + ahead
    world.scheduler.hint(client.number, client.area, section, layer, experts, len(experts))


def test_a_demand_joins_a_prefetch_and_takes_it_to_the_front(world, client):
    hint(world, client, 2, range(8))
    world.scheduler.step()
    assert world.tier.read_count == 8
    section = client.area.enter(world.table)
    world.cache.fetch(client.number, section, 2, [7])
    world.scheduler.step()
    world.idle(1.0)
    assert world.table.host_slots[2, 7] >= 0, "it was the last of eight"
    assert (world.table.host_slots[2, :7] < 0).any()
    assert world.scheduler.prefetch.counters.late == 1
    assert world.tier.read_count == 8
    world.idle(10)
    client.area.enter(world.table)
    world.idle(10)
    assert check_books(world).wasted == 7


def test_a_hint_expires_when_its_layer_has_passed(world, client):
    hint(world, client, 2, [1, 2, 3, 4, 5, 6, 7, 8])
    world.scheduler.step()
    for _ in range(2):
        client.area.enter(world.table)
    world.scheduler.step()
    counters = world.scheduler.prefetch.counters
    assert counters.withdrawn > 0, "what the disk had not begun"
    assert world.cache.ahead, "what it had begun lands"
    world.idle(5)
    check_books(world)
    assert counters.wasted + counters.withdrawn == 8


def test_a_hint_that_comes_too_late_is_none(world, client):
    for _ in range(3):
        client.area.enter(world.table)
    hint(world, client, 2, [1], ahead=-1)
    assert not world.scheduler.waiting


def test_a_hint_grows_old(world, client):
    hint(world, client, 2, [1])
    world.idle(HINT_AGE_MS / 2)
    assert world.scheduler.prefetch.pending
    world.idle(HINT_AGE_MS)
    assert check_books(world).wasted == 1


def test_used_before_it_passed_is_useful(world, client):
    hint(world, client, 2, [1, 9])
    world.idle(5)
    client.area.enter(world.table)
    client.area.uses[2, 1] += 1
    client.area.enter(world.table)
    world.idle(5)
    counters = check_books(world)
    assert (counters.useful, counters.wasted) == (1, 1)


def test_hints_of_a_client_that_has_gone_are_forgotten(world, client):
    hint(world, client, 2, [1])
    world.idle(5)
    world.scheduler.forget(client.number)
    world.cache.detach(client.number)
    world.idle(5)
    check_books(world)


def test_what_makes_no_sense_is_ignored(world, client):
    for layer, experts in ((-1, [1]), (8, [1]), (2, [-1, 32, 2**40])):
        hint(world, client, layer, experts)
    assert not world.scheduler.waiting


def test_what_is_there_is_not_hinted(world, client):
    hint(world, client, 2, [1])
    world.idle(5)
    client.area.enter(world.table)
    client.area.enter(world.table)
    world.idle(5)
    hint(world, client, 2, [1])
    assert not world.scheduler.prefetch.pending


def test_a_newcomer_takes_what_is_held_for_others():
    world = PrefetchWorld(slot_count=9)
    client = world.decoder()
    client.area.enter(world.table)
    hint(world, client, 2, [1])
    world.idle(5)
    assert len(world.cache.ahead) == 1
    world.decoder()
    assert not world.cache.ahead
    check_books(world)


def test_a_newcomer_takes_what_is_on_its_way_for_others_when_it_lands():
    world = PrefetchWorld(slot_count=8)
    client = world.decoder()
    client.area.enter(world.table)
    hint(world, client, 2, [1])
    world.scheduler.step()
    world.decoder()
    assert len(world.cache.ahead) == 1, "the disk has begun"
    world.idle(5)
    assert not world.cache.ahead
    assert check_books(world).wasted == 1


def test_an_idle_tier_fills_with_what_is_hot_and_stops_when_asked():
    world = PrefetchWorld(slot_count=64)
    world.cache.heat.policy.heat[:40] = range(40)
    world.idle(1.0)
    assert world.tier.read_count == 0, "not quiet for long enough"
    world.idle(40.0)
    assert 0 < world.tier.read_count <= 39
    client = world.decoder()
    section = client.area.enter(world.table)
    read_count = world.tier.read_count
    world.cache.fetch(client.number, section, 7, [1])
    world.scheduler.step()
    assert world.tier.read_count == read_count + 1
    world.idle(300.0)
    client.area.leave()
    assert world.scheduler.backfill.slab_count == 39
    assert not world.cache.ahead
    resident = set((world.table.host_slots.reshape(-1) >= 0).nonzero()[0].tolist())
    assert set(range(1, 40)) <= resident


def test_backfill_evicts_nothing():
    world = decode(slot_count=32)
    evictions = world.cache.counters.evictions
    world.idle(1000.0)
    assert world.cache.counters.evictions == evictions


def test_the_hottest_come_first():
    world = PrefetchWorld(slot_count=64)
    world.cache.heat.policy.heat[[7, 3, 200]] = [1, 3, 2]
    world.idle(21)
    world.disk.now_ms += 1
    order = list(world.cache.reading) or [
        int(key) for key in (world.table.host_slots.reshape(-1) >= 0).nonzero()[0]
    ]
    assert sorted(order) == [3, 7, 200]
    slots = world.table.host_slots.reshape(-1)
    assert slots[3] < slots[200] < slots[7], "slots are given in order"


def test_backfill_leaves_a_drive_alone_that_fails():
    world = PrefetchWorld(slot_count=128)
    world.cache.heat.policy.heat[:100] = 1
    world.disk.is_broken = True
    world.idle(1000.0)
    assert MAX_HOPELESS <= world.tier.read_count < MAX_HOPELESS + MAX_UNDERWAY
    assert world.scheduler.backfill.slab_count == 0
    assert not world.scheduler.waiting


def test_a_failed_prefetch_is_counted_and_its_slot_free_again(world, client):
    world.disk.is_broken = True
    hint(world, client, 2, [1])
    world.idle(10.0)
    assert check_books(world).failed == 1
    assert world.cache.classes[0].spare_count == 64


def test_backfill_does_not_try_again_and_again_where_nothing_may_be_held():
    """The smallest cache for two clients: its slots are FREE, and all of them are the clients'."""
    world = PrefetchWorld(slot_count=8)
    for _ in range(2):
        world.decoder()
    world.cache.heat.policy.heat[:40] = 1
    world.idle(500.0)
    assert world.tier.read_count == 0
    assert not world.scheduler.waiting


def test_backfill_in_a_small_tier_goes_on_when_what_it_brings_has_landed():
    world = PrefetchWorld(slot_count=8)
    world.decoder()
    world.cache.heat.policy.heat[:40] = 1
    world.idle(100.0)
    assert world.scheduler.backfill.slab_count == 6, "all but the reserve"
    assert not world.scheduler.waiting


def test_what_a_client_that_leaves_has_not_used_is_wasted(world, client):
    client.area.uses[2, 1] += 5
    hint(world, client, 2, [1])
    world.idle(5)
    world.scheduler.forget(client.number)
    world.cache.detach(client.number)
    world.idle(5)
    assert check_books(world).wasted == 1


def test_who_waits_is_served_before_anything_is_done_about_hints():
    """In the turn in which it is heard: what was hinted has time until the next one."""
    world = PrefetchWorld(slot_count=64)
    decoder = world.decoder()
    section = decoder.area.enter(world.table)
    world.scheduler.hint(decoder.number, decoder.area, section + 1, 2, [7, 8], 2)
    world.cache.fetch(decoder.number, section, 1, [3])
    world.scheduler.step()
    assert sorted(world.cache.reading) == [1 * 32 + 3]
    world.scheduler.step()
    assert sorted(world.cache.reading) == [1 * 32 + 3, 2 * 32 + 7, 2 * 32 + 8]
