"""The profile of a whole model computed without a daemon: each part's kernels, and no time lost."""

import re
import time
from types import SimpleNamespace

import pytest

from infer.commands.bench_profile import profile_lines, profile_round
from infer.generation.decoding import Decoding
from infer.generation.sampler import Sampler, SamplerConfig
from infer.kernels.reference_kernels import ReferenceKernels
from infer.profiling.part_names import (
    ATTENTION,
    BETWEEN,
    DENSE,
    EMBEDDING,
    EXPERTS,
    GPU,
    HEAD,
    LAUNCHES,
    NORMS,
    ROUTER,
    SAMPLING,
    SECTIONS,
    SHARED,
)
from infer.profiling.step_profile import StepProfile

SLOW_S = 0.005
COMPUTED = {ATTENTION, ROUTER, EXPERTS, SHARED, DENSE, NORMS, EMBEDDING, HEAD}


@pytest.fixture
def engine(gguf_factory, local_model, tmp_path):
    """As much of an Engine as a profile looks at; each section takes a while by itself."""

    class Slow(local_model):
        graphs = lane = None

        @property
        def client(self):
            return self

        def read(self, *arguments):
            time.sleep(SLOW_S)
            super().read(*arguments)

        def begin(self):
            raise AssertionError("only recorded steps take a section step by step")

        wait_some = ask = addresses = begin

    kernels = ReferenceKernels()
    slow = Slow(gguf_factory.hy3_model().write(tmp_path / "m.gguf"), lambda _bounds: kernels)
    slow.kernels = kernels
    return slow


@pytest.fixture
def profile(engine):
    greedy = Sampler(SamplerConfig(temperature=0))
    return profile_round(engine, Decoding(engine), [1, 2, 3], 4, greedy)


def test_every_part_is_there_and_they_add_up(profile):
    assert set(profile["prefill"]["parts_s"]) == {*COMPUTED, SECTIONS, BETWEEN}
    assert set(profile["decode"]["parts_s"]) == {*COMPUTED, SECTIONS, SAMPLING, BETWEEN}
    for phase in profile.values():
        assert sum(phase["parts_s"].values()) == pytest.approx(
            phase["wall_s"],
            rel=0.03,
            abs=0.02,  # of a clock that others are served by meanwhile
        )


def test_a_section_has_its_own_time_and_not_what_is_computed_in_it(engine, profile):
    sections = sum(hasattr(layer.ffn, "router") for layer in engine.model.layers)
    assert profile["decode"]["parts_s"][SECTIONS] > 4 * sections * SLOW_S
    assert profile["decode"]["parts_s"][EXPERTS] > 0


def test_nothing_stays_replaced(engine, profile):
    assert not {"linear", "experts", "read", "wait_some"} & {*vars(engine.kernels)}
    assert not {"read", "wait_some"} & {*vars(engine.client)}


def test_an_error_puts_back_what_was_replaced(engine):
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        StepProfile(engine).prefill(fails)
    assert "linear" not in vars(engine.kernels)


def test_recorded_steps_count_themselves(engine):
    """What launching and waiting took since the profile began is no time of Python's."""
    engine.graphs = SimpleNamespace(spent_s={LAUNCHES: 5.0, GPU: 7.0})

    def step():
        time.sleep(SLOW_S)
        engine.graphs.spent_s = {LAUNCHES: 5.0 + SLOW_S / 4, GPU: 7.0 + SLOW_S / 2}

    parts_s = StepProfile(engine).decode(step, Decoding(engine))
    assert parts_s[LAUNCHES] == pytest.approx(SLOW_S / 4)
    assert parts_s[GPU] == pytest.approx(SLOW_S / 2)
    assert SLOW_S / 4 <= parts_s[BETWEEN] < sum(parts_s.values())


def test_the_table_names_each_part_once(profile):
    lines = profile_lines(profile)
    assert sorted(line[:20].strip() for line in lines[1:-2]) == sorted(profile["decode"]["parts_s"])
    assert lines[-1].startswith("wall clock")
    assert all(re.search(r"\d +\d+\.\d%", line) for line in lines[1:]), "numbers keep apart"
