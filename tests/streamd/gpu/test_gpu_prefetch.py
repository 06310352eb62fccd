"""Hints of GPU clients: a disk read first, then an upload; neither in the way of a demand."""

import random

import pytest
from gpu_bench import N_EXPERTS, N_LAYERS

from streamd.scheduling.scheduler import RETRY_MS
from streamd.tiers.uploads import AHEAD_LANE_COUNT


@pytest.fixture
def bench(make_bench):
    return make_bench(host_slots=96, gpu_slots=40)


def counters(bench):
    return bench.gpu.scheduler.prefetch.counters, bench.scheduler.prefetch.counters


def hint(bench, client, layer, *experts, ahead=1, upload_count=64):
    section = client.area.section + ahead
    bench.gpu.scheduler.hint(client.number, client.area, section, layer, experts, upload_count)


def read_all(bench):
    for slot in list(bench.reads):
        bench.finish_read(slot)


def settle(bench):
    """Whatever is on its way arrives."""
    for _ in range(6):
        bench.turn()
        read_all(bench)
        bench.device.finish(len(bench.device.queued))
    bench.turn()


def test_a_hint_is_read_then_uploaded_and_a_hit_by_then(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 5)
    bench.turn()
    assert [(grant.layer, grant.expert) for grant in bench.reads.values()] == [(1, 5)]
    assert not bench.gpu.cache.reading, "a GPU slot is for what can be uploaded"
    read_all(bench)
    bench.turn()
    assert len(bench.device.queued) == 1
    settle(bench)
    assert bench.table.gpu_slots[1, 5] >= 0
    client.area.enter(bench.table)
    client.area.uses[1, 5] += 1
    client.area.enter(bench.table)
    settle(bench)
    for tier in counters(bench):
        assert (tier.issued, tier.useful, tier.wasted, tier.late) == (1, 1, 0, 0)


def test_hints_that_wait_for_the_disk_cost_little_each_turn(bench, monkeypatch):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 5, 6)
    prefetch = bench.gpu.scheduler.prefetch
    looks = []
    wishes = prefetch.wishes
    monkeypatch.setattr(prefetch, "wishes", lambda *args: looks.append(0) or wishes(*args))
    for _ in range(20):
        bench.turn()
    assert len(looks) == 1, "the clock stands still"
    bench.now_ms += RETRY_MS
    bench.turn()
    assert len(looks) == 2
    bench.finish_read(next(iter(bench.reads)))
    bench.turn()
    assert len(bench.device.queued) == 1, "what has arrived goes on at once"


def test_a_demand_takes_over_what_is_being_read_for_a_hint(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 5)
    bench.turn()
    (slot,) = bench.reads
    client.ask(1, 5)
    settle_without_reads(bench)
    assert bench.promoted == [slot]
    assert len(bench.reads) == 1
    settle(bench)
    assert bench.rung == {0}
    gpu, host = counters(bench)
    assert (gpu.issued, gpu.demanded) == (0, 1)
    assert (host.issued, host.late) == (1, 1)


def settle_without_reads(bench):
    for _ in range(3):
        bench.turn()


def test_a_demand_takes_over_an_upload_that_waits(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 1, 2, 3, 4, ahead=2)
    bench.turn()
    read_all(bench)
    bench.turn()
    assert len(bench.device.queued) == AHEAD_LANE_COUNT < 4
    client.ask(1, 4)
    bench.turn()
    assert len(bench.device.queued) == AHEAD_LANE_COUNT + 1
    settle(bench)
    assert bench.rung == {0}
    gpu, _ = counters(bench)
    assert (gpu.issued, gpu.late) == (4, 1)
    assert bench.gpu.uploads.upload_count == 4


def hint_what_ram_has(bench, client, ahead=2):
    """Experts 1 to 6 of layer 1, hinted for a GPU slot while the first two of them are copied."""
    client.area.enter(bench.table)
    hint(bench, client, 1, *range(1, 7), ahead=ahead, upload_count=0)
    bench.turn()
    read_all(bench)
    hint(bench, client, 1, *range(1, 7), ahead=ahead)
    bench.turn()
    assert len(bench.device.queued) == AHEAD_LANE_COUNT


def copies(bench):
    """Experts whose copies are under way, in order."""
    lanes = {lane.number: lane.grant.expert for lane in bench.gpu.uploads._lanes if lane.copying}
    return [lanes[token] for token, _ in bench.device.queued]


def test_uploads_ahead_are_queued_behind_the_last_copy_that_is_waited_for(bench):
    client = bench.attach(0)
    hint_what_ram_has(bench, client)
    client.ask(1, 5, 6)
    bench.turn()
    assert copies(bench) == [1, 2, 5, 6]
    bench.device.finish(AHEAD_LANE_COUNT)
    bench.turn()
    assert copies(bench) == [5, 6, 3, 4], "the bus does not stand still behind the last one"
    settle(bench)
    assert bench.rung == {0}
    assert bench.gpu.uploads.upload_count == 6


def test_what_a_section_has_not_asked_for_is_not_uploaded_for_it_any_more(bench):
    """Its router has spoken: what was hinted for it and is not begun would be in vain."""
    client = bench.attach(0)
    hint_what_ram_has(bench, client, ahead=1)
    client.ask(1, 5, 6)
    bench.turn()
    bench.device.finish(AHEAD_LANE_COUNT)
    bench.turn()
    assert copies(bench) == [5, 6]
    settle(bench)
    gpu, _ = counters(bench)
    assert gpu.late + gpu.demanded == 2
    assert gpu.withdrawn + gpu.expired == 2
    assert gpu.wasted == AHEAD_LANE_COUNT
    assert bench.gpu.uploads.upload_count == AHEAD_LANE_COUNT + 2


def test_what_is_hinted_for_a_later_section_is_uploaded_when_this_one_has_asked(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 3, 4)
    section = client.area.section
    bench.gpu.scheduler.fetch(client.number, section, 0, [7])
    settle(bench)
    assert (bench.table.gpu_slots[1] >= 0).nonzero()[0].tolist() == [3, 4]


def test_an_idle_bus_has_one_upload_ahead_while_the_drive_brings_what_is_waited_for(bench):
    client = bench.attach(0)
    hint_what_ram_has(bench, client)
    client.ask(1, 6, 9)
    bench.turn()
    bench.device.finish(AHEAD_LANE_COUNT)
    bench.turn()
    assert copies(bench) == [6], "the bus is not idle"
    bench.device.finish()
    bench.turn()
    assert copies(bench) == [3]
    (slot,) = (slot for slot, grant in bench.reads.items() if grant.expert == 9)
    bench.finish_read(slot)
    assert copies(bench) == [3, 9]
    settle(bench)
    assert bench.rung == {0}


def test_what_is_only_likely_enough_to_be_read_is_not_uploaded(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 5, 6, 7, upload_count=1)
    settle(bench)
    assert (bench.table.gpu_slots[1] >= 0).nonzero()[0].tolist() == [5]
    assert (bench.table.host_slots[1] >= 0).nonzero()[0].tolist() == [5, 6, 7]
    gpu, host = counters(bench)
    assert (gpu.hinted, host.hinted) == (1, 3)


def test_no_upload_ahead_waits_for_a_read_that_nobody_demands(bench):
    """What was in RAM when it was given a GPU slot goes before it gets a lane."""
    client = bench.attach(0)
    hint_what_ram_has(bench, client)
    gone = bench.table.host_slots[1, 3]
    bench.scheduler._judge(gone)
    slots = bench.host.class_of_slot(gone)
    bench.host.eviction.take_out([(slots, gone)])
    bench.device.finish(AHEAD_LANE_COUNT)
    bench.turn()
    assert copies(bench) == [4, 5]
    assert not bench.reads
    client.ask(1, 3)
    settle(bench)
    assert bench.rung == {0}
    assert bench.table.gpu_slots[1, 3] >= 0


def test_hints_that_have_passed_are_not_uploaded(bench):
    client = bench.attach(0)
    client.area.enter(bench.table)
    hint(bench, client, 1, 1, 2, 3, 4)
    bench.turn()
    for _ in range(3):
        client.area.enter(bench.table)
    read_all(bench)
    settle(bench)
    gpu, host = counters(bench)
    assert (gpu.issued, gpu.expired) == (0, 4)
    assert host.wasted == 4
    assert bench.gpu.uploads.upload_count == 0


def test_an_idle_gpu_is_filled_from_the_host_tier(bench):
    bench.gpu.cache.heat.policy.heat[[3, 70, 71]] = [1, 3, 2]
    bench.scheduler.cache.heat.policy.heat[[3, 70]] = [1, 3]
    for _ in range(8):
        bench.now_ms += 250
        settle(bench)
    resident = {int(key) for key in (bench.table.gpu_slots.reshape(-1) >= 0).nonzero()[0]}
    assert resident == {3, 70}, "what is in the host tier, and hot on the GPU"
    assert bench.gpu.scheduler.backfill.slab_count == 2


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_hints_demands_and_ends(make_bench, seed):
    """Slabs are compared with the file after each event; whoever waits is served in the end."""
    rng = random.Random(seed)
    bench = make_bench(host_slots=56, gpu_slots=12)
    clients = [bench.attach(number) for number in range(2)]
    waiting = {}
    for _ in range(400):
        client = rng.choice(clients)
        dice = rng.random()
        if dice < 0.35:
            layer, experts = rng.randrange(N_LAYERS), rng.sample(range(N_EXPERTS), 2)
            client.ask(layer, *experts)
            waiting[client.number] = (layer, experts)
        elif dice < 0.5:
            layer = rng.randrange(N_LAYERS)
            hint(bench, client, layer, *rng.sample(range(N_EXPERTS), 4), ahead=rng.randrange(3))
        elif dice < 0.65 and bench.reads:
            rng.choice((bench.finish_read, bench.finish_read, bench.fail_read))(
                rng.choice(list(bench.reads))
            )
        elif dice < 0.75 and bench.device.queued:
            bench.device.finish()
        else:
            bench.now_ms += rng.choice([0, 1, 30])
            bench.turn()
    for client in clients:
        if client.number in waiting:
            client.ask(*[waiting[client.number][0], *waiting[client.number][1]])
    for _ in range(12):
        settle(bench)
        for client in clients:
            row = bench.table.gpu_slots[waiting[client.number][0]]
            if all(row[expert] >= 0 for expert in waiting[client.number][1]):
                client.area.leave()
    assert not bench.gpu.cache.waiting
    bench.now_ms += 5000
    settle(bench)
    for tier in counters(bench):
        verdicts = tier.useful + tier.late + tier.wasted + tier.failed + tier.withdrawn
        assert tier.issued == verdicts
        assert tier.hinted == tier.expired + tier.demanded + tier.issued
