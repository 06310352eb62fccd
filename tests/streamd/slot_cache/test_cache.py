"""Each rule of docs/protocol.md by itself: hits and misses, pins, the grace period."""

import pytest

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
    floor.press(first, range(8))
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
    floor.press(other, range(8))
    assert 9 in floor.resident(0), "the client has not seen it yet"
    getattr(client, ending)()
    floor.press(other, range(8, 16))
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
    floor.press(other, range(16))
    assert 9 not in floor.resident(0)


def test_a_section_begun_while_the_daemon_looks_is_seen_before_its_epoch(floor):
    """Old pins must never be taken for those of a newer section."""
    client, other = floor.attach(0), floor.attach(1)
    epoch = floor.table.epoch
    client.enter()
    client.fetch(0, [9])
    floor.step()
    other.enter()
    other.fetch(0, [1])
    looks = []

    def begin_again():
        looks.append(floor.barrier_count)
        if len(looks) == 2:  # after the barrier: `published` of the first client has been read
            client.leave()
            floor.table.epoch += 1
            client.enter()

    floor.meanwhile = begin_again
    floor.step()
    assert client.area.section == 2
    seen = floor.cache.clients[0]
    assert (seen.published, seen.section, seen.pins) == (epoch, 2, set())


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
    floor.press(floor.attach(0), range(3))
    epoch, resident_count = floor.table.epoch, len(floor.resident(1))
    seen = []
    floor.meanwhile = lambda: seen.append((floor.table.epoch, len(floor.resident(1))))
    floor.attach(1)
    assert seen == [(epoch, resident_count - 1), (epoch + 1, resident_count - 1)]
    assert floor.cache.classes[0].limbo[-1][0] == floor.table.epoch


def test_the_clients_are_looked_at_behind_a_barrier(bench):
    client = bench.attach(0)
    client.enter()
    client.fetch(0, [1])
    before, looks = bench.barrier_count, []
    bench.meanwhile = lambda: looks.append(bench.barrier_count - before)
    bench.step()
    assert looks == [1, 1], "the barrier, then the only look"


def test_one_epoch_for_all_victims_of_a_step(bench):
    client = bench.attach(0)
    bench.press(client, range(6))
    client.enter()
    client.fetch(1, [6, 7])
    epoch, evictions = bench.table.epoch, bench.cache.counters.evictions
    bench.step()
    assert bench.table.epoch == epoch + 1
    assert bench.cache.counters.evictions == evictions + 2
