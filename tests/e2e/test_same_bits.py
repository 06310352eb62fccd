"""The default arithmetic gives the same bits whatever is resident, however it is read, whoever else
is served."""

from pathlib import Path

import numpy as np
import pytest

from infer.commands.measure import BENCH_TEXT
from infer.config import ModelConfig
from infer.session import Session
from streamd.readers.probe import AUTO, ENGINES, FALLBACK, try_in_child

TOKEN_COUNT = 64
CHUNK = 16
IO_DEPTH = 8


@pytest.fixture(scope="module")
def ids(module_place, streaming_model) -> list[int]:
    with Session(ModelConfig(model=streaming_model)) as session:
        return session.tokenizer.encode(BENCH_TEXT)[:TOKEN_COUNT]


def _logits(model: Path, name: str, ids: list[int]) -> np.ndarray:
    """float32 [n, vocab]: three quarters as a prompt in chunks, the rest token by token."""
    with Session(ModelConfig(model=model, name=name, chunk=CHUNK)) as session:
        prompt_count = 3 * len(ids) // 4
        rows = [session.engine.logits(ids[:prompt_count])]
        rows += [session.engine.logits([token]) for token in ids[prompt_count:]]
    return np.concatenate(rows)


def _cache_bytes(plan: dict[str, int], share: float) -> int:
    return max(plan["floor_bytes"], int(share * plan["full_bytes"]))


@pytest.fixture(scope="module")
def reference(module_place, streaming_model, ids) -> np.ndarray:
    """With a slot for every expert."""
    daemon = module_place.daemon(streaming_model, "--name", "all")
    rows = _logits(streaming_model, daemon.name, ids)
    assert module_place.stats(daemon.name)["tiers"]["host"]["evictions"] == 0
    return rows


@pytest.mark.parametrize(
    ("share", "engine"),
    [(0.0, engine) for engine in ENGINES] + [(0.25, AUTO), (0.5, FALLBACK)],
)
def test_any_cache_size_and_reader(share, engine, module_place, streaming_model, ids, reference):
    if engine in ENGINES and (reason := try_in_child(engine, IO_DEPTH)):
        pytest.skip(f"{engine} does not work here: {reason}")
    budget = _cache_bytes(module_place.plan(streaming_model), share)
    daemon = module_place.daemon(
        streaming_model, "--host-cache", budget, "--io", engine, "--name", f"{engine}-{share}"
    )
    rows = _logits(streaming_model, daemon.name, ids)
    stats = module_place.stats(daemon.name)
    assert stats["tiers"]["host"]["evictions"] > 0
    assert engine in (AUTO, stats["io"]["engine"])
    np.testing.assert_array_equal(rows, reference)


def test_two_clients_at_once(module_place, streaming_model, ids, reference, tmp_path):
    floor_bytes = module_place.plan(streaming_model)["floor_bytes"]
    daemon = module_place.daemon(streaming_model, "--host-cache", floor_bytes, "--name", "two")
    words = ("--name", daemon.name, "--tokens", ",".join(map(str, ids)), "--chunk", CHUNK)
    files = [tmp_path / f"{number}.npy" for number in range(2)]
    clients = [module_place.start("infer", "logits", *words, "--out", file) for file in files]
    for client in clients:
        _, err = client.communicate()
        assert client.returncode == 0, err
    for file in files:
        np.testing.assert_array_equal(np.load(file), reference)
