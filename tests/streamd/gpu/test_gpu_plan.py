"""What fits on the GPU."""

import re
from dataclasses import replace

import pytest
from gpu_bench import some_experts

from shared.errors import PlanError
from shared.gpu_plan import CLIENT_CONTEXT_BYTES, DAEMON_CONTEXT_BYTES, plan_gpu
from shared.layer_choice import Residents
from shared.sizes import parse_size

MIB = 1 << 20
RESERVE_BYTES = 256 * MIB
RESIDENT_BYTES = 3 * MIB + 1
GRANULARITY_BYTES = 1 << 12
SLOT_BYTES = 256 * 2 + 256 * 2 + 256 * 2  # three parts of at most 256 bytes, and as much room
FLOOR_BYTES = 8 * SLOT_BYTES  # top-2 of two clients, in use and in reserve


def plan(budget_bytes, free_bytes=8 << 30):
    return plan_gpu(
        some_experts(),
        budget_bytes,
        Residents(RESIDENT_BYTES),
        free_bytes,
        GRANULARITY_BYTES,
        RESERVE_BYTES,
    )


def test_everything_fits():
    found = plan(None)
    assert found.layout.slot_count == 128
    assert found.taken_bytes <= 8 << 30


@pytest.mark.parametrize("budget_bytes", [FLOOR_BYTES + GRANULARITY_BYTES, 33_333, 100_000])
def test_the_budget_is_never_exceeded(budget_bytes):
    found = plan(budget_bytes)
    resident_bytes = -(-RESIDENT_BYTES // GRANULARITY_BYTES) * GRANULARITY_BYTES
    assert found.layout.total_bytes <= found.taken_bytes - resident_bytes <= budget_bytes
    assert found.layout.slot_count >= 8


@pytest.mark.parametrize("slots_too_few", [1, 5])
def test_less_than_the_floor_is_refused(slots_too_few):
    with pytest.raises(PlanError, match="at least") as caught:
        plan(FLOOR_BYTES - slots_too_few * SLOT_BYTES)
    assert "--gpu-cache" in caught.value.remedy


def test_what_the_client_needs_is_left_free():
    kept_bytes = CLIENT_CONTEXT_BYTES + RESERVE_BYTES + RESIDENT_BYTES
    free_bytes = kept_bytes + 20 * SLOT_BYTES + GRANULARITY_BYTES
    found = plan(None, free_bytes)
    assert 8 <= found.layout.slot_count <= 20 + GRANULARITY_BYTES // SLOT_BYTES
    assert found.taken_bytes + CLIENT_CONTEXT_BYTES + RESERVE_BYTES <= free_bytes


def test_a_budget_beyond_what_is_free_is_refused():
    kept_bytes = CLIENT_CONTEXT_BYTES + RESERVE_BYTES + RESIDENT_BYTES
    with pytest.raises(PlanError, match="do not fit"):
        plan(100 * SLOT_BYTES, kept_bytes + 50 * SLOT_BYTES)


def test_resident_tensors_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match="resident tensors"):
        plan(None, 700 * MIB)


def plan_within(vram_bytes, free_bytes=8 << 30):
    return plan_gpu(
        some_experts(),
        None,
        Residents(RESIDENT_BYTES),
        free_bytes,
        GRANULARITY_BYTES,
        RESERVE_BYTES,
        vram_bytes,
    )


def test_daemon_and_client_together_keep_to_vram():
    others_bytes = DAEMON_CONTEXT_BYTES + CLIENT_CONTEXT_BYTES + RESERVE_BYTES
    vram_bytes = others_bytes + RESIDENT_BYTES + 20 * SLOT_BYTES + 2 * GRANULARITY_BYTES
    found = plan_within(vram_bytes)
    assert 15 <= found.layout.slot_count <= 20 + 2 * GRANULARITY_BYTES // SLOT_BYTES
    assert found.taken_bytes + others_bytes <= vram_bytes


def test_vram_beyond_what_is_free_changes_nothing():
    assert plan_within(1 << 40) == plan(None)


def test_vram_below_the_floor_is_refused_with_what_would_do():
    with pytest.raises(PlanError, match="at least: the daemon's context 553 MB") as caught:
        plan_within(600 * MIB)
    wanted = re.search(r"--vram (\w+)", caught.value.remedy)[1]
    assert plan_within(parse_size(wanted)).layout.slot_count >= 8
    with pytest.raises(PlanError, match="--vram"):
        plan_within(parse_size(wanted) - MIB)


def test_a_card_that_is_full_is_not_blamed_on_vram():
    with pytest.raises(PlanError, match="that are free"):
        plan_within(8 << 30, free_bytes=700 * MIB)


LAYER_BYTES = 40 * MIB
# The eight layers of a model with experts, and one as large as two of them.
RESIDENTS = Residents(RESIDENT_BYTES + 10 * LAYER_BYTES, dict.fromkeys(range(8), LAYER_BYTES))


def plan_streamed(layers_of_room, residents=RESIDENTS, budget_bytes=None):
    """On a card with room for so many layers besides what must be there and the least slots."""
    kept_bytes = CLIENT_CONTEXT_BYTES + RESERVE_BYTES + RESIDENT_BYTES + 2 * LAYER_BYTES
    free_bytes = kept_bytes + round(layers_of_room * LAYER_BYTES) + 2 * FLOOR_BYTES + 3 * MIB // 2
    return plan_gpu(
        some_experts(), budget_bytes, residents, free_bytes, GRANULARITY_BYTES, RESERVE_BYTES
    )


@pytest.mark.parametrize(
    ("layers_of_room", "streamed_count"), [(8, 0), (7.5, 3), (7, 3), (4.5, 6), (3, 7), (2, 8)]
)
def test_as_few_layers_are_streamed_as_leave_the_slots_their_least(layers_of_room, streamed_count):
    """Two buffers are as large as two layers, so one or two streamed layers free nothing."""
    found = plan_streamed(layers_of_room)
    assert len(found.streamed.layers) == streamed_count
    assert found.streamed.streamed_bytes == streamed_count * LAYER_BYTES
    assert found.streamed.buffers_bytes == (2 * LAYER_BYTES if streamed_count else 0)
    assert found.layout.slot_count >= (16 if streamed_count else 8)
    client_bytes = CLIENT_CONTEXT_BYTES + RESERVE_BYTES + found.streamed.buffers_bytes
    assert found.taken_bytes + client_bytes <= found.free_bytes


def test_below_what_streaming_all_layers_takes_it_is_refused():
    with pytest.raises(PlanError, match="at least"):
        plan_streamed(1.9)


def test_a_gpu_cache_that_is_given_has_its_slots_before_the_layers():
    assert plan_streamed(8).streamed.layers == ()
    assert len(plan_streamed(8, budget_bytes=100 * SLOT_BYTES).streamed.layers) == 0
    spacious = plan_streamed(4.5, budget_bytes=100 * SLOT_BYTES)
    assert spacious.layout.slot_count >= 90


@pytest.mark.parametrize(("wanted", "streamed_count"), [(0, 8), (1, 7), (2.9, 6), (7, 1), (8, 0)])
def test_what_is_wanted_is_kept_and_no_more(wanted, streamed_count):
    residents = replace(RESIDENTS, wanted_bytes=round(wanted * LAYER_BYTES))
    assert len(plan_streamed(10, residents).streamed.layers) == streamed_count
