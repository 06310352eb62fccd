"""What `infer bench` says of its prompt: each expert touched is read at most once a chunk."""

import json

import pytest


@pytest.mark.parametrize(("chunk", "chunk_count"), [("40", 3), ("auto", 1)])
def test_the_prompt_of_a_benchmark(chunk, chunk_count, place, demo_model):
    cache = place.plan(demo_model)["floor_bytes"]
    words = ("--model", demo_model, "--host-cache", cache, "--chunk", chunk, "--device", "cpu")
    done = place.run("infer", "bench", *words, "-p", "100", "-n", "1", "--json")
    assert done.returncode == 0, done.stderr
    prompt = json.loads(done.stdout)["prompt"]
    assert prompt["chunks"] == chunk_count
    # Six layers of 16 experts; nothing is hot at the start, and the floor holds few of them.
    assert 6 * 8 * chunk_count < prompt["experts"] <= 6 * 16 * chunk_count
    assert 0 < prompt["absent"] <= prompt["experts"]
    assert 0.5 < prompt["reads_per_expert"] <= 1
    assert prompt["slabs"] == round(prompt["reads_per_expert"] * prompt["experts"])
    assert prompt["uploads"] == prompt["uploaded_bytes"] == 0
