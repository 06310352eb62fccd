"""The command line: numbers out of bounds are refused before anything is loaded."""

import sys

import pytest

import infer.cli


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command that argparse refuses; its last line."""

    def command(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["infer", *words])
        with pytest.raises(SystemExit, match="2"):
            infer.cli.main()
        return capsys.readouterr().err.splitlines()[-1]

    return command


@pytest.mark.parametrize(
    ("words", "least"),
    [
        (("bench", "--warmup", "-1"), 0),
        (("bench", "--warmup", "some"), 0),
        (("bench", "-n", "0"), 1),
        (("bench", "-p", "1.5"), 1),
        (("selftest", "--threads", "0"), 1),
    ],
)
def test_numbers_out_of_bounds(refused, words, least):
    assert refused(*words).endswith(f"give a whole number, {least} or more")


@pytest.mark.parametrize("command", ["chat", "logits", "perplexity", "bench"])
def test_help_tells_what_a_running_daemon_ignores(command, monkeypatch, capsys):
    """The daemon's options stand apart, each once."""
    monkeypatch.setattr(sys, "argv", ["infer", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        infer.cli.main()
    asked, _, daemon = capsys.readouterr().out.partition("\nthe daemon:\n")
    assert "  --host-cache SIZE" in daemon
    assert "  --host-cache SIZE" not in asked
    assert "\n  --model MODEL" in asked
    assert "\n  --model MODEL" not in daemon
