"""What scripts rely on: the files and the JSON that `infer`'s commands write.

The commands run in this process, which has torch already; each attaches to one daemon.
"""

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import infer.cli

IDS = [0, 3, 1262, 345, 270]


@pytest.fixture(scope="module")
def daemon(module_place, demo_model) -> Any:
    return module_place.daemon(demo_model)


@pytest.fixture
def infer_prints(daemon, demo_model, monkeypatch, capsys) -> Callable[..., str]:
    """Runs a command on the demo model; what it prints on stdout."""

    def run(command: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["infer", command, *map(str, words)])
        assert infer.cli.main() == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return run


def test_tokenize(infer_prints, demo_model):
    text = "<think:opensource>hello"
    plain = json.loads(infer_prints("tokenize", "--model", demo_model, text))
    special = json.loads(infer_prints("tokenize", "--special", text))
    assert len(special) < len(plain), "a control token is one token"
    assert plain[-2:] == special[-2:] == json.loads(infer_prints("tokenize", "hello"))


def test_logits(infer_prints, demo_model, tmp_path):
    out, dump = tmp_path / "l.npy", tmp_path / "d.npz"
    tokens = ",".join(map(str, IDS))
    words = ("--model", demo_model, "--tokens", tokens, "--exact", "--out", out)
    assert infer_prints("logits", *words) == ""
    rows = np.load(out)
    assert (rows.dtype, rows.shape) == (np.float32, (len(IDS), 8192))
    infer_prints("logits", *words, "--chunk", 2, "--dump", dump)
    np.testing.assert_allclose(np.load(out), rows, rtol=0, atol=1e-4)
    taken = np.load(dump)
    width = taken["hidden.0"].shape[1]
    assert {taken[f"hidden.{layer}"].shape for layer in range(8)} == {(len(IDS), width)}
    assert taken["router_logits.6"].shape == (len(IDS), 16)
    assert taken["router_idx.6"].shape == (len(IDS), 4)


def test_perplexity(infer_prints, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("The old man looked out of the window.")
    values = json.loads(infer_prints("perplexity", "--file", text, "--json"))
    assert values.keys() == {"tokens", "mean_nll", "perplexity"}
    assert 1 < values["mean_nll"] < 10
    assert values["perplexity"] == pytest.approx(math.exp(values["mean_nll"]))
    human = infer_prints("perplexity", "--file", text)
    assert human.startswith(f"{values['tokens']} tokens, mean nll {values['mean_nll']:.5f}")


def test_bench(infer_prints):
    values = json.loads(infer_prints("bench", "-p", 16, "-n", 8, "--json"))
    assert {"prefill_tps", "decode_tps", "startup_s", "hits", "misses"} <= values.keys()
    assert values["hits"] + values["misses"] > 0
    assert "decode" in infer_prints("bench", "-p", 4, "-n", 2, "--warmup", 0)


def test_bench_by_part(infer_prints):
    profile = json.loads(infer_prints("bench", "-p", 32, "-n", 16, "--profile", "--json"))[
        "profile"
    ]
    for phase, count in (("prefill", 32), ("decode", 16)):
        parts_s, wall_s = profile[phase]["parts_s"], profile[phase]["wall_s"]
        assert profile[phase]["tokens"] == count
        assert sum(parts_s.values()) == pytest.approx(wall_s, rel=0.05, abs=0.03)
        assert min(parts_s.values()) >= 0
        assert {"attention", "router", "experts", "shared expert", "output head"} <= parts_s.keys()
    human = infer_prints("bench", "-p", 4, "-n", 2, "--warmup", 0, "--profile")
    assert "daemon waits" in human or "sections of slots" in human
    assert "wall clock" in human


def test_inspect(infer_prints, demo_model):
    values = json.loads(infer_prints("inspect", demo_model, "--json"))
    assert (values["architecture"], values["experts_per_layer"], values["top_k"]) == (
        "hy_v3",
        16,
        4,
    )
    human = infer_prints("inspect", demo_model)
    assert "hy_v3" in human
    named = [line.split()[0] for line in human.splitlines() if not line.startswith(" ")]
    assert named == list(values)
