"""A client keeps to its share of a GPU's memory, and takes more only where that is allowed."""

from types import SimpleNamespace

import pytest
import torch

from infer.engine import Engine
from infer.gpu_memory import limit_memory, within_memory
from shared.client_memory import FIXED_BYTES, OUTSIDE_BYTES
from shared.errors import GpuError

CUDA = torch.device("cuda:0")


class Fits:
    """What does not fit the first `failures` times."""

    def __init__(self, failures):
        self.failures, self.calls = failures, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "logits"


@pytest.fixture
def fractions(monkeypatch):
    """Those that are set."""
    found = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append(share)
    )
    return found


def test_the_limit_is_lifted_before_anything_is_refused(fractions):
    work = Fits(1)
    assert within_memory(CUDA, False, work) == "logits"
    assert (work.calls, fractions) == (2, [1.0])


@pytest.mark.parametrize(("strict", "calls"), [(True, 1), (False, 2)])
def test_what_does_not_fit_is_refused(fractions, strict, calls):
    work = Fits(5)
    with pytest.raises(GpuError, match="does not hold") as refusal:
        within_memory(CUDA, strict, work)
    assert "--chunk" in refusal.value.remedy
    assert work.calls == calls
    assert fractions == [1.0] * (calls - 1)


@pytest.mark.parametrize("strict", [True, False])
def test_whatever_an_engine_computes_keeps_to_it(fractions, strict):
    """Prompts, single tokens and drafts all go through redo_if_lost."""
    engine = Engine.__new__(Engine)
    attached = SimpleNamespace(client_limited=strict)
    engine.device = CUDA
    engine.client = SimpleNamespace(mapping=SimpleNamespace(attached=attached))
    engine._lifeline = SimpleNamespace(redo_if_lost=lambda compute: compute())
    if strict:
        with pytest.raises(GpuError):
            engine.redo_if_lost(Fits(1))
    else:
        assert engine.redo_if_lost(Fits(1)) == "logits"
    assert fractions == [1.0] * (not strict)


def test_the_limit_is_beside_what_is_there(fractions, monkeypatch):
    total = 16 << 30
    properties = type("Properties", (), {"total_memory": total})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    limit_memory(CUDA, 1 << 29)
    expected = (1 << 30) + (1 << 29) + FIXED_BYTES - OUTSIDE_BYTES
    assert fractions == [pytest.approx(expected / total)]
    limit_memory(CUDA, total)
    assert fractions[1] == 1.0


def test_a_cpu_has_no_such_limit(fractions):
    limit_memory(torch.device("cpu"), 1 << 29)
    assert fractions == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_the_allocator_keeps_is_let_go_of_first():
    torch.cuda.empty_cache()
    size = FIXED_BYTES - OUTSIDE_BYTES
    limit_memory(CUDA, size)  # room for two
    try:
        for part in (size // 8, size // 4, size // 2, size, 3 * size // 2):
            torch.empty(part, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.memory_reserved(CUDA) <= torch.cuda.memory_allocated(CUDA) + 2 * size
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * size, dtype=torch.uint8, device=CUDA)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
        torch.cuda.empty_cache()
