"""Uploads: their order, what they keep from being overwritten, and how they fail."""

import random

import numpy as np
import pytest
from gpu_bench import N_EXPERTS, N_LAYERS

from shared.errors import PlanError
from shared.residency import ClientArea
from streamd.slot_cache.grants import Grant
from streamd.slot_cache.stalls import stalled_clients
from streamd.tiers.gpu_tier import LINGER_MS
from streamd.tiers.uploads import LANE_COUNT

HOST_CLIENT = 7


def host_client(bench):
    area = ClientArea(bytearray(bench.shape.area_bytes), bench.shape)
    area.initialise()
    bench.host.attach(HOST_CLIENT, area)
    return area


def test_a_miss_is_read_then_copied_then_published(bench):
    client = bench.attach(0)
    client.ask(1, 5)
    bench.turn()
    assert [(grant.layer, grant.expert) for grant in bench.reads.values()] == [(1, 5)]
    assert not bench.device.queued
    bench.finish_read(next(iter(bench.reads)))
    assert len(bench.device.queued) == 1
    assert bench.table.gpu_slots[1, 5] == -1
    assert bench.rung == set()
    bench.device.finish()
    bench.turn()
    assert bench.table.gpu_slots[1, 5] >= 0
    assert bench.rung == {0}
    bench.check_slab(1, 5)


def test_what_is_in_a_host_slot_is_copied_without_a_read(bench):
    first, second = bench.attach(0), bench.attach(1)
    bench.bring(first, 0, 1, 2)
    for expert in range(3, 11):
        bench.bring(first, 0, expert)
    assert bench.table.gpu_slots[0, 1] == -1, "evicted from the GPU, still in the host tier"
    second.ask(0, 1)
    bench.turn()
    bench.turn()
    assert not bench.reads
    assert len(bench.device.queued) == 1
    bench.device.finish()
    bench.turn()
    bench.check_slab(0, 1)


def crowd_host_tier(bench, area):
    """A host client asks for more experts than the tier holds; how many reads it was given."""
    read_count = 0
    for expert in range(1, N_EXPERTS, 2):
        section = area.enter(bench.table)
        bench.host.fetch(HOST_CLIENT, section, 1, [expert - 1, expert])
        for _ in range(3):
            bench.turn()
            read_count += len(bench.reads)
            for slot in list(bench.reads):
                bench.finish_read(slot)
    return read_count


def start_copy(bench, client):
    client.ask(0, 0)
    bench.turn()
    bench.finish_read(next(iter(bench.reads)))
    assert len(bench.device.queued) == 1


def test_a_host_slot_is_not_reused_while_a_copy_reads_it(make_bench):
    bench = make_bench(host_slots=40)
    client, area = bench.attach(0), host_client(bench)
    start_copy(bench, client)
    assert crowd_host_tier(bench, area) > 20
    assert bench.host.waiting, "slots wait for the copy to end"
    bench.device.finish()
    bench.turn()
    bench.check_slab(0, 0)
    bench.turn()
    assert not bench.host.waiting


def test_the_drive_is_asked_before_more_than_one_copy_is_begun(make_bench):
    bench = make_bench(host_slots=96, gpu_slots=40)
    client = bench.attach(0)
    client.area.enter(bench.table)
    bench.gpu.scheduler.hint(client.number, client.area, 2, 0, [1, 2, 3], 0)
    bench.turn()
    for slot in list(bench.reads):
        bench.finish_read(slot)
    client.ask(0, 1, 2)
    bench.attach(1).ask(0, 3, 20)
    bench.gpu.scheduler.step()
    bench.gpu.uploads.enter_lanes()
    assert [lane.wanted for lane in bench.host.asking] == [{20}], "20 has to be read"
    assert len(bench.device.queued) == 1
    bench.gpu.uploads.enter_lanes()
    assert [lane.wanted for lane in bench.host.asking] == [{20}], "it has been asked for"
    bench.turn()
    assert len(bench.device.queued) == 3


def test_what_was_put_out_after_a_lane_had_seen_it_is_copied_all_the_same(make_bench):
    """Of two hits one is copied at once; the other's slab goes before its copy begins."""
    bench = make_bench(host_slots=40, gpu_slots=8)
    client, area = bench.attach(0), host_client(bench)
    bench.bring(client, 0, 1, 2)
    for expert in range(3, 13):
        bench.bring(client, 0, expert)
    assert all(bench.table.gpu_slots[0, [1, 2]] < 0)
    client.ask(0, 1, 2)
    bench.gpu.scheduler.step()
    bench.gpu.uploads.enter_lanes()
    for expert in range(20, N_EXPERTS):
        section = area.enter(bench.table)
        bench.host.fetch(HOST_CLIENT, section, 1, [expert])
        bench.scheduler.step()
        for slot in list(bench.reads):
            bench.scheduler.landed(slot)
            del bench.reads[slot]
    assert bench.table.host_slots[0, 2] < 0
    bench.turn()
    assert len(bench.device.queued) == 2
    bench.device.finish(2)
    bench.turn()
    bench.check_slab(0, 2)
    assert bench.rung == {0}


def test_a_gpu_that_refuses_all_copies_keeps_nobody_waiting(make_bench):
    """There are more demands than lanes: the loop turns on at once until all have been told."""
    bench = make_bench(host_slots=128, gpu_slots=128)
    clients = [bench.attach(number) for number in range(28)]
    for expert in range(2 * len(clients)):
        slot = bench.host.classes[0].take(expert)
        bench.host.reading[expert] = slot
        bench.submit(Grant(slot, 0, expert))
        bench.finish_read(slot)
    bench.device.refuses_copies = True
    for number, client in enumerate(clients):
        client.ask(0, 2 * number, 2 * number + 1)
    turn_count = 0
    while not turn_count or bench.gpu.is_busy():
        bench.now_ms += 10 * LINGER_MS
        bench.turn()
        turn_count += 1
    assert len(bench.told) == 2 * len(clients)
    assert turn_count > 1, "more than there are lanes for"


def test_a_lane_is_never_found_stalled(make_bench):
    bench = make_bench(host_slots=40)
    client, area = bench.attach(0), host_client(bench)
    start_copy(bench, client)
    crowd_host_tier(bench, area)
    bench.now_ms += 1e6
    bench.host.step(1000)
    assert bench.host.waiting
    assert stalled_clients(bench.host, bench.now_ms, 1.0) == []


def test_a_gpu_slot_is_not_reused_before_its_readers_have_left(bench):
    slow, quick = bench.attach(0), bench.attach(1)
    bench.bring(slow, 0, 0, 1)
    slow.area.enter(bench.table)
    held = bench.table.gpu_slots[0, [0, 1]].tolist()
    for expert in range(2, 6, 2):
        quick.ask(0, expert, expert + 1)
        for _ in range(4):
            bench.turn()
            for slot in list(bench.reads):
                bench.finish_read(slot)
            bench.device.finish(len(bench.device.queued))
        bench.turn()
        quick.area.leave()
    for expert in range(6, 20):
        quick.ask(1, expert)
        bench.turn()
        assert not {grant.slot for grant in queued_grants(bench)} & set(held)
        quick.area.leave()
    slow.area.leave()
    for expert in range(20, 26):
        bench.bring(quick, 1, expert)
    assert set(held) & set(bench.table.gpu_slots[1, 20:26].tolist()), "reused afterwards"


def queued_grants(bench):
    lanes = bench.gpu.uploads._lanes
    return [lane.grant for lane in lanes if lane.grant is not None]


def test_a_client_dies_during_its_upload(bench):
    dying, living = bench.attach(0), bench.attach(1)
    dying.ask(0, 3)
    bench.turn()
    bench.finish_read(next(iter(bench.reads)))
    bench.gpu.cache.detach(0)
    living.ask(0, 3)
    bench.turn()
    assert not bench.reads, "it joins the upload that is under way"
    bench.device.finish()
    bench.turn()
    assert bench.rung == {1}
    bench.check_slab(0, 3)


def test_a_client_dies_before_its_read(bench):
    dying, living = bench.attach(0), bench.attach(1)
    dying.ask(0, 3)
    bench.turn()
    bench.gpu.cache.detach(0)
    bench.finish_read(next(iter(bench.reads)))
    bench.device.finish()
    bench.turn()
    bench.bring(living, 0, 3)


def test_who_asked_is_told_of_a_failed_read(bench):
    client, other = bench.attach(0), bench.attach(1)
    section, other_section = client.ask(1, 4, 5), other.ask(1, 4)
    bench.turn()
    broken = next(slot for slot, grant in bench.reads.items() if grant.expert == 4)
    bench.fail_read(broken)
    assert sorted(bench.told) == [(0, section, 1, 4), (1, other_section, 1, 4)]
    bench.finish_read(next(iter(bench.reads)))
    bench.device.finish()
    bench.turn()
    bench.check_slab(1, 5)
    client.area.leave()
    bench.bring(other, 1, 4)


@pytest.mark.parametrize("at_submit", [True, False])
def test_who_asked_is_told_of_a_failed_copy(bench, at_submit):
    client = bench.attach(0)
    section = client.ask(0, 9)
    bench.turn()
    bench.device.refuses_copies = at_submit
    bench.finish_read(next(iter(bench.reads)))
    if not at_submit:
        bench.device.fail()
    bench.turn()
    assert bench.told == [(0, section, 0, 9)]
    assert bench.table.gpu_slots[0, 9] == -1
    bench.device.refuses_copies = False
    client.area.leave()
    bench.bring(client, 0, 9)


def test_more_uploads_than_lanes_wait_their_turn(make_bench):
    bench = make_bench(host_slots=64, gpu_slots=N_LAYERS * N_EXPERTS)
    client = bench.attach(0)
    client.ask(0, *range(LANE_COUNT + 5))
    bench.turn()
    assert len(bench.reads) == LANE_COUNT
    bench.finish_read(next(iter(bench.reads)))
    bench.turn()
    assert len(bench.reads) == LANE_COUNT - 1, "a lane is free when its copy is done"
    bench.device.finish()
    bench.turn()
    assert len(bench.reads) == LANE_COUNT


def test_slots_are_pinned_once_and_let_go_at_the_end(bench):
    client = bench.attach(0)
    for _ in range(2):
        for expert in range(30):
            bench.bring(client, 0, expert)
    assert bench.device.pin_tries == len(bench.device.pinned) <= 48
    bench.gpu.uploads.close()
    assert bench.device.pinned == {}


def test_refused_pins_are_not_asked_for_again(bench):
    bench.device.refuses_pins = True
    client = bench.attach(0)
    for expert in range(10):
        bench.bring(client, 0, expert)
    assert bench.device.pin_tries == 1
    bench.gpu.uploads.close()


def test_the_lanes_need_their_host_slots(make_bench):
    with pytest.raises(PlanError, match="host cache has 20 slots"):
        make_bench(host_slots=20)


@pytest.mark.parametrize("seed", range(8))
def test_random_walks(make_bench, seed):
    """Reads and copies end, fail and overtake each other; every named slab is the file's."""
    rng = random.Random(seed)
    bench = make_bench(host_slots=rng.choice([36, 44]), gpu_slots=rng.choice([8, 9, 12]))
    clients = {number: bench.attach(number) for number in range(2)}
    for _ in range(150):
        dice = rng.random()
        number = rng.randrange(2)
        if dice < 0.3:
            clients[number].area.leave()
            experts = rng.sample(range(rng.choice([6, N_EXPERTS])), 2)
            clients[number].ask(rng.randrange(N_LAYERS), *experts)
        elif dice < 0.6 and bench.reads:
            slot = rng.choice(sorted(bench.reads))
            (bench.fail_read if rng.random() < 0.1 else bench.finish_read)(slot)
        elif dice < 0.8 and bench.device.queued:
            (bench.device.fail if rng.random() < 0.1 else bench.device.finish)()
        elif dice < 0.82:
            bench.gpu.cache.detach(number)
            clients[number] = bench.attach(number)
        bench.turn()
    for client in clients.values():
        client.area.leave()
    for client in clients.values():
        bench.bring(client, 0, 0, 1)
    assert np.count_nonzero(bench.table.gpu_slots >= 0) > 2


def test_it_is_busy_for_a_while_after_the_last_copy(bench):
    """So that the main loop does not go to sleep just before the next fetch."""
    client = bench.attach(0)
    assert not bench.gpu.is_busy()
    client.ask(0, 5)
    bench.turn()
    for slot in list(bench.reads):
        bench.finish_read(slot)
    bench.turn()
    assert bench.gpu.is_busy()
    bench.device.finish()
    bench.turn()
    bench.now_ms += LINGER_MS / 2
    assert bench.gpu.is_busy()
    bench.now_ms += LINGER_MS
    assert not bench.gpu.is_busy()


def test_an_upload_counts_as_one_use_of_the_host_slab_whichever_lane_it_takes(bench):
    client = bench.attach(0)
    bench.bring(client, 0, 5, 6)
    uses_of = bench.scheduler.cache.heat.uses_of
    assert (uses_of(5), uses_of(6), uses_of(7)) == (1, 1, 0)
    bench.scheduler.cache.heat.refresh()
    bench.now_ms += 1000
    bench.scheduler.cache.heat.refresh()
    assert bench.scheduler.cache.heat.policy.heat[[5, 6, 7]].tolist() == [1, 1, 0]
