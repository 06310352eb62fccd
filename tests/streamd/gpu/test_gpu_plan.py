"""What fits on the GPU."""

import pytest
from gpu_bench import some_experts

from shared.errors import PlanError
from streamd.gpu_plan import CLIENT_CONTEXT_BYTES, plan_gpu

MIB = 1 << 20
RESERVE_BYTES = 256 * MIB
RESIDENT_BYTES = 3 * MIB + 1
GRANULARITY_BYTES = 1 << 12
SLOT_BYTES = 256 * 2 + 256 * 2 + 256 * 2  # three parts of at most 256 bytes, and as much room
FLOOR_BYTES = 8 * SLOT_BYTES  # top-2 of two clients, in use and in reserve


def plan(budget_bytes, free_bytes=8 << 30):
    return plan_gpu(
        some_experts(), budget_bytes, RESIDENT_BYTES, free_bytes, GRANULARITY_BYTES, RESERVE_BYTES
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
