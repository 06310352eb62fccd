"""What fits into a budget, checked against arithmetic done in another way."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.arena import slot_bytes
from shared.errors import PlanError
from shared.experts import ExpertIndex, SizeClass
from shared.sizes import parse_size
from shared.slot_plan import FLOOR_CLIENTS, WAVE_DIVISOR
from streamd.planning.plan import AUTO_SHARE, plan_host

ALIGN = 4096
PLENTY = 1 << 50


def a_model(*classes, n_experts=16, top_k=2):
    """An expert index of nothing but classes: (layer count, bytes of gate, up and down)."""
    sized = tuple(
        SizeClass(number, (part, part, part), tuple(range(layers)), layers * n_experts)
        for number, (layers, part) in enumerate(classes)
    )
    nothing = np.empty(0, np.int32)
    return ExpertIndex(8, n_experts, top_k, sized, nothing, nothing, nothing, nothing)


def slot_sizes(experts):
    return [slot_bytes(c.part_bytes, ALIGN) for c in experts.classes]


def plan(experts, budget_bytes, resident_bytes=0, available_bytes=PLENTY, process_bytes=0):
    return plan_host(experts, ALIGN, budget_bytes, resident_bytes, process_bytes, available_bytes)


models = st.builds(
    lambda classes, n_experts, top_k: a_model(
        *classes, n_experts=n_experts, top_k=min(top_k, n_experts)
    ),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5_000_000)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 7, 64, 256]),
    st.integers(1, 8),
)


@given(models, st.floats(0, 1.2))
def test_what_every_plan_keeps_to(experts, share):
    sizes = slot_sizes(experts)
    full_bytes = sum(c.expert_count * size for c, size in zip(experts.classes, sizes, strict=True))
    floors = [min(c.expert_count, 2 * FLOOR_CLIENTS * experts.top_k) for c in experts.classes]
    floor_bytes = sum(floor * size for floor, size in zip(floors, sizes, strict=True))
    budget_bytes = floor_bytes + int(share * (full_bytes - floor_bytes))
    planned = plan(experts, budget_bytes)
    counts = planned.layout.class_slot_counts
    assert (planned.floor_bytes, planned.full_bytes) == (floor_bytes, full_bytes)
    assert planned.layout.total_bytes <= budget_bytes
    shares = []
    for c, count, floor, wave in zip(
        experts.classes, counts, floors, planned.wave_experts, strict=True
    ):
        assert floor <= count <= c.expert_count
        if count == c.expert_count:
            assert wave == experts.n_experts
        else:
            assert wave == max(experts.top_k, count // WAVE_DIVISOR)
            assert 2 * wave * FLOOR_CLIENTS <= count, "two clients fit"
            if count > floor:
                shares.append((count / c.expert_count, 1 / c.expert_count))
    for low, low_slot in shares:
        for high, _ in shares:
            assert high - low < low_slot * 1.000001, "the same share of each class, to a slot"
    if budget_bytes >= full_bytes:
        assert planned.layout.total_bytes == full_bytes
    else:
        unused_bytes = budget_bytes - planned.layout.total_bytes
        assert unused_bytes < sum(sizes), "nor is more than a slot of each class left unused"


@given(st.integers(8, 1000))
def test_a_budget_of_so_many_slots_gives_so_many(count):
    experts = a_model((100, 1000))
    (size,) = slot_sizes(experts)
    assert plan(experts, count * size).layout.class_slot_counts == (count,)
    assert plan(experts, count * size - 1 + size).layout.class_slot_counts == (count,)


def test_a_small_class_is_raised_to_its_floor():
    experts = a_model((50, 1_000_000), (1, 4_000_000), n_experts=64, top_k=4)
    big, small = slot_sizes(experts)
    planned = plan(experts, 100 * big + 16 * small)
    assert planned.layout.class_slot_counts == (100, 16)


def test_below_the_floor_the_refusal_says_what_would_do():
    experts = a_model((3, 1_500_000), (2, 900_000))
    with pytest.raises(PlanError, match=r"cannot hold the .* this model needs") as refusal:
        plan(experts, 1_000_000)
    wanted = re.search(r"--host-cache (\w+)", refusal.value.remedy)[1]
    planned = plan(experts, parse_size(wanted))
    assert planned.layout.total_bytes >= planned.floor_bytes
    with pytest.raises(PlanError):
        plan(experts, planned.floor_bytes - 1)


def test_beyond_the_memory_there_is():
    experts = a_model((3, 1_500_000))
    full_bytes = plan(experts, PLENTY).full_bytes
    resident_bytes = 10 << 20
    process_bytes = 96 << 20
    needed_bytes = full_bytes + resident_bytes + process_bytes
    plan(experts, PLENTY, resident_bytes, needed_bytes, process_bytes)
    what = r"10\.5 MB of resident tensors and 101 MB for the daemon's process do not fit"
    with pytest.raises(PlanError, match=what) as refusal:
        plan(experts, PLENTY, resident_bytes, needed_bytes - 1, process_bytes)
    assert "smaller --host-cache" in refusal.value.remedy


def test_the_automatic_budget_is_a_share_of_what_is_left():
    experts = a_model((20, 1_500_000), n_experts=64)
    available_bytes = 500 << 20
    planned = plan(experts, None, 100 << 20, available_bytes, process_bytes=40 << 20)
    assert planned.budget_bytes == int(AUTO_SHARE * (360 << 20))
    assert planned.process_bytes == 40 << 20
    assert planned.available_bytes == available_bytes
    assert plan(experts, None).budget_bytes == planned.full_bytes, "but no more than is of use"
    with pytest.raises(PlanError, match="cannot hold"):
        plan(experts, None, 100 << 20, 50 << 20)
