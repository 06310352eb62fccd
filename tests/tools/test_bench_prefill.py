"""What tools/bench_prefill.py makes of its readings."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_prefill
import prefill_runs
import pytest
from prefill_runs import PromptResult, Prompts

from infer.commands.prompt_reads import PromptReads

PROJECT_DIR = Path(__file__).resolve().parents[2]


def _result(**values) -> PromptResult:
    plain = {
        "tokens": 600, "count": 2, "chunk": 600, "tps": 300.0, "seconds": 2.0, "experts": 90,
        "absent": 60, "reads_per_expert": 0.9, "uploads_per_expert": 0.0, "disk_mb": 2.0,
        "pcie_mb": 0.0,
    }  # fmt: skip
    return PromptResult(**plain | values)


def test_the_least_bound_counts():
    assert _result().judged(1000.0, None, None).bound_tps == 500
    row = _result().judged(1000.0, None, 400.0)
    assert (row.bound_by, row.bound_tps, row.ratio, row.compute_tps) == ("compute", 400, 0.75, 400)
    row = _result(pcie_mb=4.0).judged(1000.0, 1400.0, 400.0)
    assert (row.bound_by, row.bound_tps) == ("pcie", 350)
    assert row.ratio == pytest.approx(300 / 350)


def test_what_nothing_is_known_of_is_not_judged():
    row = _result(disk_mb=0.0).judged(1000.0, None, None)
    assert (row.bound_by, row.ratio) == ("", 0.0)


def test_prompts_are_the_same_each_time():
    prompts = Prompts([7, 30], 2)
    first, second = prompts.of(30, 256)
    assert [first, second] == list(prompts.of(30, 256))
    assert first != second
    assert len(first) == 30
    assert max(first + second) < 256


def test_the_warm_up_brings_no_prompt_s_experts(monkeypatch):
    computed = []

    def timed(_engine, ids):
        computed.append(ids)
        return 1.0, PromptReads(1, 10, 4, 4, 400, 0, 0)

    monkeypatch.setattr(prefill_runs, "_timed", timed)
    engine = SimpleNamespace(shape=SimpleNamespace(vocab_size=256), chunk=16)
    prompts = Prompts([7, 30], 2)
    rows = prompts.measure(engine, in_place=False)
    assert [(row.tokens, row.chunk, row.tps) for row in rows] == [(7, 7, 7.0), (30, 16, 30.0)]
    warm_up, measured = computed[:2], computed[2:]
    assert measured == [*prompts.of(7, 256), *prompts.of(30, 256)]
    assert [len(ids) for ids in warm_up] == [7, 16], "each size of chunk"
    assert not any(ids in measured for ids in warm_up)


def test_words_that_are_no_numbers_are_told(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_prefill", "--model", "m.gguf", "--prompts", "8,x"])
    with pytest.raises(SystemExit):
        bench_prefill.main()
    assert "'x' is no whole number" in capsys.readouterr().err


def test_a_run(tmp_path, demo_model, monkeypatch):
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    out = tmp_path / "out.json"
    words = ("--model", demo_model, "--device", "cpu", "--host-cache", "6M", "--json", out)
    command = [sys.executable, PROJECT_DIR / "tools" / "bench_prefill.py", *words]
    done = subprocess.run(
        [*command, "--prompts", "8,60", "--count", "1", "--csv", tmp_path / "out.csv"],
        check=False, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    for row in values["prompts"]:
        assert 0 < row["reads_per_expert"] <= 1
        assert row["compute_tps"] > 0
        assert row["bound_tps"] <= row["compute_tps"]
    memory = values["memory"]
    assert 4e6 < memory["daemon_peak_bytes"] <= memory["host_planned_bytes"]
    assert values["memory"]["gpu_peak_bytes"] is None
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
