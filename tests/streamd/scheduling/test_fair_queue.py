"""Owners take turns."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from streamd.scheduling.fair_queue import FairQueue


def drain(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_owners_take_turns_and_their_items_stay_in_order():
    queue = FairQueue()
    for owner, items in ((1, "abcd"), (2, "x"), (3, "uv")):
        for item in items:
            queue.append(owner, item)
    assert "".join(drain(queue)) == "axubvcd"


def test_a_turn_may_be_several_items():
    queue = FairQueue(lambda first, second: first[0] == second[0])
    for item in ("a1", "a2", "b1"):
        queue.append(1, item)
    for item in ("x1", "x2"):
        queue.append(2, item)
    assert drain(queue) == ["a1", "a2", "x1", "x2", "b1"]


def test_what_is_put_first_comes_first():
    queue = FairQueue()
    queue.append(1, "a")
    queue.append(2, "b")
    queue.append_first(2, "now")
    queue.append_first(3, "sooner")
    assert queue.first() == "sooner"
    assert drain(queue) == ["sooner", "now", "a", "b"]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["append", "first", "pop", "remove"]), st.integers(0, 3))
)


@given(EVENTS)
def test_nothing_is_lost_and_nobody_waits_more_than_a_round(events):
    queue, inside, passed = FairQueue(), {}, Counter()
    for number, (event, owner) in enumerate(events):
        if event == "append":
            queue.append(owner, (owner, number))
            inside.setdefault(owner, []).append((owner, number))
        elif event == "first":
            queue.append_first(owner, (owner, number))
            inside.setdefault(owner, []).insert(0, (owner, number))
            passed.clear()
        elif event == "remove":
            removed = queue.remove(lambda item, owner=owner: item[0] == owner)
            assert removed == inside.pop(owner, [])
        elif len(queue):
            item = queue.pop()
            assert item == inside[item[0]].pop(0)
            passed[item[0]] = 0
            passed.update(o for o, items in inside.items() if items and o != item[0])
            assert max(passed.values()) < 4, "one of four owners waits for three others at most"
        inside = {o: items for o, items in inside.items() if items}
        passed = Counter({o: n for o, n in passed.items() if o in inside})
        assert len(queue) == sum(map(len, inside.values()))
        assert sorted(queue) == sorted(item for items in inside.values() for item in items)
