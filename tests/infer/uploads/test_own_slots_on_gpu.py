"""On a real GPU: a client's own slots give the bits that the daemon's give, and those of a CPU
within what exact arithmetic differs."""

import gguf_glm
import numpy as np
import pytest
import torch
from uploading_bench import NAME, daemon

from infer.config import ModelConfig
from infer.engine import Engine
from infer.resident.streamed_layers import StreamedLayers
from infer.session import Session
from infer.uploads.slot_cache_integrity import check_integrity
from shared.gguf_index import GgufIndex

# Long enough for matrices to be dequantised, and for several waves.
PROMPT, DECODED = [20 + 7 * n % 300 for n in range(200)], list(range(40, 60))
SMALL = {"demo": 6 << 20, "glm": 2 << 20}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(params=["demo", "glm"])
def model(request, tmp_path):
    """Its name, and its file."""
    if request.param == "demo":
        return "demo", request.getfixturevalue("demo_model")
    index_layers = (True, True, False, True, False, False, True, False)
    glm = gguf_glm.glm_model(n_layers=8, index_layers=index_layers)
    return "glm", glm.write(tmp_path / "glm.gguf")


def rows_of(engine):
    """Logits of a prompt, and of tokens one at a time: by calls, then recorded."""
    rows = []
    for tap in (lambda *_: None, None):
        engine.kv.truncate(0)
        rows.append(engine.logits(PROMPT))
        rows += [engine.extend([token], tap)[np.newaxis] for token in DECODED]
    return np.concatenate(rows)


def rows_of_own_slots(path, device="cuda:0", **options):
    """Beside a daemon that has no GPU tier."""
    config = ModelConfig(model=path, device=device, ctx=512, **options)
    engine = Engine(GgufIndex.open(path), NAME, config)
    try:
        rows = rows_of(engine)
        if device != "cpu":
            assert engine.has_own_slots
            assert engine.graphs.times.token_count == len(DECODED)
            check_integrity(engine.client.cache)
        if options.get("gpu_resident") == 0:
            assert isinstance(engine.model.turns, StreamedLayers)
        return rows
    finally:
        engine.close()


@pytest.mark.parametrize("exact", [False, True])
def test_the_bits_are_those_of_the_daemons_slots(place, model, exact):
    name, path = model
    config = ModelConfig(
        model=path,
        device="cuda:0",
        exact=exact,
        gpu_cache=SMALL[name],
        host_cache=10 << 20,
        ctx=512,
    )
    with Session(config) as session:
        assert not session.engine.has_own_slots
        expected = rows_of(session.engine)
    # Slots that can be pinned, and then some that share pages, perhaps.
    for daemon_options in ({}, {"gpu_cache": 0}):
        with daemon(path, host_cache=10 << 20, **daemon_options):
            for options in (
                {"gpu_cache": SMALL[name]},
                {},
                {"gpu_cache": SMALL[name], "gpu_resident": 0},
            ):
                assert np.array_equal(rows_of_own_slots(path, exact=exact, **options), expected)


def test_the_logits_are_those_of_a_cpu(place, model):
    name, path = model
    with daemon(path, host_cache=10 << 20):
        on_cpu = rows_of_own_slots(path, "cpu", exact=True)
        on_gpu = rows_of_own_slots(path, exact=True, gpu_cache=SMALL[name])
    assert np.abs(on_gpu - on_cpu).max() < 1e-3
    assert np.array_equal(on_gpu.argmax(1), on_cpu.argmax(1))


def test_the_daemons_memory_is_pinned_for_reading(place, demo_model):
    """If this driver refuses that, uploads take a way round, and this says so."""
    with daemon(demo_model):
        config = ModelConfig(model=demo_model, device="cuda:0", ctx=512)
        engine = Engine(GgufIndex.open(demo_model), NAME, config)
        try:
            engine.logits(PROMPT)
            assert any(engine.client._slots._slots._pinned)
        finally:
            engine.close()
