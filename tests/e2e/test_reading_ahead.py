"""Guesses change nothing but what is in the slots: the same bits with any setting of --prefetch."""

import json
from pathlib import Path

import numpy as np
import pytest

from infer.commands.measure import BENCH_TEXT
from infer.config import ModelConfig
from infer.session import Session

PROMPT_COUNT, DECODED_COUNT = 12, 24


@pytest.fixture(scope="module")
def small_daemon(module_place, streaming_model) -> str:
    """Its cache holds a quarter of the experts; its name."""
    plan = module_place.plan(streaming_model)
    budget = max(plan["floor_bytes"], plan["full_bytes"] // 4)
    return module_place.daemon(streaming_model, "--host-cache", budget, "--name", "small").name


def _decode(model: Path, name: str, prefetch: str) -> tuple[np.ndarray, dict[str, int]]:
    """Logits float32 [n, vocab] of a prompt and of greedy tokens; the prefetch's counters."""
    with Session(ModelConfig(model=model, name=name, prefetch=prefetch)) as session:
        engine = session.engine
        rows = [engine.extend(session.tokenizer.encode(BENCH_TEXT)[:PROMPT_COUNT])]
        rows += [engine.extend([7, 11])]  # a short chunk is guessed for as well
        for _ in range(DECODED_COUNT):
            rows.append(engine.extend([int(rows[-1].argmax())]))
        return np.stack(rows), engine.prefetch.values() if engine.prefetch else {}


@pytest.fixture(scope="module")
def reference(streaming_model, small_daemon) -> np.ndarray:
    rows, counters = _decode(streaming_model, small_daemon, "off")
    assert not counters
    return rows


@pytest.mark.parametrize("prefetch", ["auto", "1", "3"])
def test_same_bits(prefetch, streaming_model, small_daemon, reference, module_place):
    before = module_place.stats(small_daemon)["tiers"]["host"]["prefetch"]["hinted"]
    rows, counters = _decode(streaming_model, small_daemon, prefetch)
    np.testing.assert_array_equal(rows, reference)
    assert counters["predicted"] > 0
    if prefetch != "auto":  # which may find that it costs more than it brings
        assert 0 < counters["used"] <= counters["hinted"]
        assert module_place.stats(small_daemon)["tiers"]["host"]["prefetch"]["hinted"] > before


def test_bench_tells_what_it_brought(streaming_model, small_daemon, module_place):
    words = ("--name", small_daemon, "-p", 8, "-n", 16, "--warmup", 0)
    done = module_place.run("infer", "bench", "--prefetch", "2", "--json", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["prefetch"]
    assert told["depth"] == 2
    assert 0 < told["recalled"] <= told["within"] <= told["predicted"]
    assert told["recall"] == told["recalled"] / told["predicted"]
    done = module_place.run("infer", "bench", "--prefetch", "off", "--json", *words)
    assert "prefetch" not in json.loads(done.stdout)
