"""How the touched experts are divided into waves."""

import numpy as np
import pytest

from infer.blocks.moe import _waves

N_EXPERTS, TOP_K = 40, 4


class Source:
    def __init__(self, wave_experts, present, below=()):
        self._wave_experts = wave_experts
        self._present, self._below = present, below

    def wave_experts(self, layer):
        return self._wave_experts

    def absent(self, layer, experts):
        return ~np.isin(experts, self._present)

    def unread(self, layer, experts):
        return ~np.isin(experts, [*self._present, *self._below])


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


class Ahead:
    """The hinted ones are known to it."""

    def __init__(self, hinted):
        self._hinted = hinted
        self.chosen_of = {}

    def chosen(self, layer, experts):
        self.chosen_of[layer] = experts.tolist()
        return np.isin(experts, self._hinted)

    def advance(self, layer, waves):
        raise AssertionError("nothing is computed here")


def test_what_is_hinted_comes_first_of_its_kind(ids):
    """There, to be brought from the tier below, to be read: of each the hinted ones first."""
    source = Source(6, present=[3, 17, 20], below=[2, 5, 30])
    ahead = Ahead([20, 5, 11, 39])
    order = np.concatenate([wave.experts for wave in _waves(ids, source, 7, ahead)]).tolist()
    touched = np.unique(ids).tolist()
    assert ahead.chosen_of == {7: touched}
    assert {2, 3, 5, 11, 17, 20, 30, 39} <= set(touched)
    others = [e for e in touched if e not in (2, 3, 5, 11, 17, 20, 30, 39)]
    assert order == [20, 3, 17, 5, 2, 30, 11, 39, *others]


def test_a_layer_s_waves_are_hinted_before_they_come(gguf_factory, local_model, tmp_path):
    """As if experts with odd numbers were absent; see LocalModel."""
    from infer.kernels.reference_kernels import ReferenceKernels  # noqa: PLC0415

    path = gguf_factory.hy3_model().write(tmp_path / "model.gguf")
    events = []

    class Recording(local_model):
        def hint(self, layer, experts, layers_ahead):
            events.append(("hint", layer, tuple(experts.tolist()), layers_ahead))

        def read(self, layer, experts, use_counts, compute, meanwhile):
            events.append(("wave", layer, tuple(experts.tolist())))
            super().read(layer, experts, use_counts, compute, meanwhile)

    ids = np.random.default_rng(1).integers(0, 256, 24).tolist()
    model = Recording(path, lambda _bounds: ReferenceKernels(), wave_experts=3)
    model.model.prompt_foresight.guesses = False
    model.logits(ids)
    hinted = {}
    waves = [event for event in events if event[0] == "wave"]
    at = -1
    for kind, layer, experts, *ahead in events:
        if kind == "wave":
            at += 1
            odd = {expert for expert in experts if expert % 2}
            began_before = at > 0 and waves[at - 1][1] == layer
            assert odd == hinted.pop(at, set()) or not began_before
        else:
            wave = waves[at + ahead[0]]
            assert wave[1] == layer
            assert set(experts) <= set(wave[2])
            hinted.setdefault(at + ahead[0], set()).update(experts)
    assert not hinted
    assert any(event[0] == "hint" for event in events)
