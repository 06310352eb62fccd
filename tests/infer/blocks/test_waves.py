"""How the touched experts are divided into waves."""

import itertools

import numpy as np
import pytest

from infer.blocks.moe import _waves

N_EXPERTS, TOP_K = 40, 4


class Source:
    def __init__(self, wave_experts, present):
        self._wave_experts = wave_experts
        self._present = present

    def wave_experts(self, layer):
        return self._wave_experts

    def absent(self, layer, experts):
        return ~np.isin(experts, self._present)


@pytest.fixture
def ids():
    rng = np.random.default_rng(0)
    rows = [rng.choice(N_EXPERTS, TOP_K, replace=False) for _ in range(25)]
    return np.array(rows, np.int32)


@pytest.mark.parametrize("width", [4, 7, 39, 40, 100])
def test_each_pair_meets_its_expert_once(width, ids):
    waves = _waves(ids, Source(width, [1, 5, 9]), 0)
    met = {}
    for wave in waves:
        assert len(wave.experts) <= width
        for place, expert in enumerate(wave.experts):
            pairs = wave.pairs[wave.group_start[place] : wave.group_start[place + 1]]
            assert len(pairs)
            met |= dict.fromkeys(pairs.tolist(), expert)
    assert [met[pair] for pair in range(ids.size)] == ids.ravel().tolist()
    assert sum(len(wave.pairs) for wave in waves) == ids.size
    touched = [expert for wave in waves for expert in wave.experts]
    assert sorted(touched) == np.unique(ids).tolist(), "each in one wave"


def test_what_is_there_comes_first(ids):
    present = [3, 17, 20, 31, 38]
    order = np.concatenate([wave.experts for wave in _waves(ids, Source(6, present), 0)])
    touched = np.unique(ids)
    there = [expert for expert in touched if expert in present]
    assert order[: len(there)].tolist() == there
    assert order[len(there) :].tolist() == [e for e in touched if e not in present]


def test_the_next_wave_is_hinted_before_this_one_is_computed(gguf_factory, local_model, tmp_path):
    """As if experts with odd numbers were absent; see LocalModel."""
    from infer.kernels.reference_kernels import ReferenceKernels  # noqa: PLC0415

    path = gguf_factory.hy3_model().write(tmp_path / "model.gguf")
    events = []

    class Recording(local_model):
        def hint(self, layer, experts, layers_ahead):
            assert layers_ahead == 1
            events.append(("hint", layer, tuple(experts.tolist())))

        def read(self, layer, experts, use_counts, compute, meanwhile):
            def computing(places, addresses):
                events.append(("compute", layer, tuple(experts.tolist())))
                compute(places, addresses)

            super().read(layer, experts, use_counts, computing, meanwhile)

    ids = np.random.default_rng(1).integers(0, 256, 24).tolist()
    width = 3
    Recording(path, lambda _bounds: ReferenceKernels(), wave_experts=width).logits(ids)
    computed = [event for event in dict.fromkeys(events) if event[0] == "compute"]
    for before, after in itertools.pairwise(computed):
        absent = tuple(expert for expert in after[2] if expert % 2)
        if after[1] == before[1] and absent:
            assert events.index(("hint", after[1], absent)) < events.index(before)
    assert any(event[0] == "hint" for event in events)
