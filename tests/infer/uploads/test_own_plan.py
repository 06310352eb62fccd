"""What a client takes of a GPU for itself, by the rule that a daemon plans with."""

import numpy as np
import pytest
from fake_upload_device import FakeUploadDevice
from uploading_bench import Reader, daemon

from infer.uploads.open_client import plan_own
from shared.daemon_options import DaemonOptions
from shared.errors import GpuError, PlanError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.gpu_plan import DAEMON_CONTEXT_BYTES, KERNEL_BYTES

GIB = 1 << 30


@pytest.fixture
def plan(demo_model):
    index = GgufIndex.open(demo_model)
    experts = ExpertIndex.from_gguf(index)
    return lambda free_bytes=8 * GIB, **options: plan_own(
        index, experts, DaemonOptions(ctx=256, **options), free_bytes
    )


def test_all_experts_have_slots_where_they_fit(plan):
    found = plan()
    assert found.layout.class_slot_counts == (80, 16)
    assert found.streamed.layers == ()


def test_what_the_client_computes_with_is_left(plan):
    reserve_bytes = plan().reserve_bytes
    few = plan(reserve_bytes + KERNEL_BYTES + (17 << 20))
    assert sum(few.layout.class_slot_counts) < 96
    assert few.taken_bytes + reserve_bytes + KERNEL_BYTES <= few.free_bytes


def test_a_limit_counts_our_own_context_too(plan):
    limit = DAEMON_CONTEXT_BYTES + plan().reserve_bytes + KERNEL_BYTES + (17 << 20)
    found = plan(vram=limit)
    assert found.free_bytes == limit - DAEMON_CONTEXT_BYTES
    assert sum(found.layout.class_slot_counts) < 96


@pytest.mark.parametrize("gpu_cache", [0, 1 << 20])
def test_too_little_is_refused(plan, gpu_cache):
    with pytest.raises(PlanError, match="at least"):
        plan(gpu_cache=gpu_cache)


def test_memory_that_is_not_had_is_an_error_and_the_host_is_left(place, demo_model):
    with daemon(demo_model) as running:
        with pytest.raises(GpuError, match="out of memory"):
            Reader(demo_model, FakeUploadDevice(budget_bytes=1 << 20))
        reader = Reader(demo_model, FakeUploadDevice())
        stats = reader.client.stats()
        assert [client["client"] for client in stats["clients"]] == [0]
        assert np.array_equal(running.model.table.gpu_slots, np.full((7, 16), -1))
        reader.close()
