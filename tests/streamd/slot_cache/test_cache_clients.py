"""The host cache: clients that come and go, and requests that are refused or dropped."""

import pytest
from cache_bench import CacheBench

from shared.errors import DaemonBusy, PlanError, RequestError

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
    bench.press(client, range(10))
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
    floor.press(other, range(6))
    state(floor, client)
    getattr(floor.cache, ending)(0)
    assert not floor.cache.waiting
    floor.finish_all()
    floor.press(other, range(16), layer=0)
    assert floor.cache.counters.revocations == (ending == "revoke")
    assert floor.cache.classes[0].pin_count.sum() <= 1


def test_the_flag_is_set_before_the_barrier_that_precedes_reuse(bench):
    client = bench.attach(0)
    client.enter()
    flags = []
    bench.meanwhile = lambda: flags.append(int(bench.table.revoked[0]))
    bench.cache.revoke(0)
    assert flags == [1]


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
