"""What is made of two programs' times, and what the one that is measured beside ours may answer."""

import sys

import bench_llama
import pytest
from bench_llama import Round, Times, summary


def test_ratios_are_of_rates():
    rounds = [Round(ours=Times(2.0, 4.0), theirs=Times(1.0, 8.0))] * 3
    result = summary(rounds, prompt_count=100, decode_count=20)
    assert result["prefill"]["ours_tps"] == 50
    assert result["prefill"]["llama_tps"] == 100
    assert result["prefill"]["ratio"] == 0.5
    assert result["decode"]["ratio"] == 2.0


def test_a_busy_round_counts_once():
    quiet, busy = Round(Times(1, 1), Times(1, 2)), Round(Times(5, 5), Times(5, 50))
    result = summary([quiet, busy, quiet], 10, 10)["decode"]
    assert (result["ratio"], result["ratio_low"], result["ratio_high"]) == (2, 2, 10)
    assert (result["ours_best_tps"], result["llama_best_tps"], result["best_ratio"]) == (10, 5, 2)


def test_the_worker_is_asked_and_ended(tmp_path, monkeypatch):
    """What it says before it is ready is its library's."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\nprint('noise')\nprint('ready', flush=True)\n"
        "for line in sys.stdin: print(line.replace('prompt', 'asked'), end='', flush=True)\n"
    )
    monkeypatch.setattr(bench_llama, "WORKER", worker)
    options = bench_llama.parser().parse_args(["m.gguf", "--llama-python", sys.executable])
    with bench_llama.llama(tmp_path / "m.gguf", options) as ask:
        assert ask({"prompt": [1, 2]}) == {"asked": [1, 2]}


def test_a_worker_that_ends_is_a_message(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)")
    monkeypatch.setattr(bench_llama, "WORKER", worker)
    options = bench_llama.parser().parse_args(["m.gguf", "--llama-python", sys.executable])
    with (
        pytest.raises(SystemExit, match="has ended: exit code 3"),
        bench_llama.llama(tmp_path / "m.gguf", options),
    ):
        pass
