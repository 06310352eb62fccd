"""`infer chat` as a person meets it: at a terminal, and from a pipe."""

import re
from typing import Any

import pytest

QUESTION = "Which is the largest planet in the solar system?"
NEXT_QUESTION = "I want to book a flight to Seattle."
DEADLINE_S = 60.0
PROMPT = r"\n>"
CTRL_C, CTRL_D = "\x03", "\x04"
LONG_WINDED = ("--temp", 100, "--top-p", 1, "--seed", 1, "--ctx", 1024)


@pytest.fixture(scope="module")
def daemon(module_place, demo_model) -> Any:
    return module_place.daemon(demo_model)


@pytest.fixture
def terminals(open_terminal, daemon) -> Any:
    """Opens a terminal with a chat in it; greedy unless told otherwise, without a past."""

    def open_fresh(*words: object) -> Any:
        return open_terminal("--kv-sessions", "off", *(words or ("--temp", 0)))

    return open_fresh


def test_a_conversation(terminals, module_place, daemon, demo_model):
    terminal = terminals()
    served = f"{demo_model.name} · context 1,024 tokens · daemon {daemon.name}\n"
    assert served in terminal.greeting
    terminal.enter(QUESTION)
    figures = r"(\d+) prompt tokens, (\d+) new · (\d+) tokens, [\d.]+ t/s · [\d.]+% hits\n"
    shown = terminal.read_until(figures)
    assert "\nJupiter.\n17 prompt tokens, 17 new · 4 tokens" in shown
    # The next turn computes only what is behind the 17 + 4 tokens that are held.
    terminal.enter(NEXT_QUESTION)
    prompt_count, new_count, _ = map(int, re.search(figures, terminal.read_until(figures)).groups())
    assert prompt_count > 30
    assert new_count == prompt_count - 21
    terminal.enter("/reset")
    terminal.enter(QUESTION)
    assert "17 prompt tokens, 17 new · 4 tokens" in terminal.read_until(figures)
    terminal.enter("/system Answer in one word.")
    terminal.enter(QUESTION)
    prompt_count, new_count, _ = map(int, re.search(figures, terminal.read_until(figures)).groups())
    assert prompt_count > 17
    terminal.enter("/system")
    terminal.enter(QUESTION)
    assert "17 prompt tokens, 17 new" in terminal.read_until(figures)
    terminal.enter("/exit")
    assert terminal.process.wait(DEADLINE_S) == 0
    history = module_place.state_dir / "streamd" / "chat-history"
    assert f"+{QUESTION}\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_commands(terminals):
    terminal = terminals()
    terminal.enter("/help")
    shown = terminal.read_until("Ctrl-C ends an answer")
    for command in ("/help", "/stats", "/reset", "/save", "/load", "/system", "/think", "/exit"):
        assert f"\n{command}" in shown
    terminal.enter("/stats")
    assert "lookups" in terminal.read_until(r"clients +1\n")
    terminal.enter("/think high")
    terminal.read_until("no reasoning effort 'high'")
    terminal.enter("/fly")
    terminal.read_until(f"there is no command /fly.*{PROMPT}")
    terminal.type(CTRL_D)
    assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_ends_the_answer_only(terminals):
    terminal = terminals(*LONG_WINDED)
    for _ in range(2):
        terminal.read_until(PROMPT)
        terminal.enter("Tell me a story.")
        terminal.read_until(r"Tell me a story\.\n+.{20}")
        terminal.type(CTRL_C)
        shown = terminal.read_until(r"\(stopped\)")
        assert "t/s" not in shown
    # At the prompt it clears the line.
    terminal.read_until(PROMPT)
    terminal.type("half a line" + CTRL_C)
    terminal.enter("/exit")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_lines_from_a_pipe(module_place, daemon):
    lines = f"{QUESTION}\n\n/fly\n/reset\n{NEXT_QUESTION}\n/exit\nnever read\n"
    done = module_place.run("infer", "chat", "--temp", 0, "--exact", stdin=lines)
    assert done.returncode == 1, "a script can tell that a line failed"
    assert done.stdout == "Jupiter.\nWhat date would you like to travel?\n"
    assert "there is no command /fly" in done.stderr


def test_reasoning_effort(module_place, gguf_factory, tmp_path):
    """Levels that the template knows are offered and reach it: here as one byte, one token each."""
    model = gguf_factory.hy3_model()
    model.metadata["tokenizer.chat_template"] = (
        "<user>{{ messages[0].content }}"
        "{% if reasoning_effort == 'high' %}++{% elif reasoning_effort == 'low' %}+{% endif %}"
    )
    path = model.write(tmp_path / "model.gguf")
    lines = "/help\nx\n/reset\n/think high\nx\n/reset\n/think low\nx\n/think deep\n"
    words = ("--model", path, "--max-tokens", 1)
    done = module_place.run("infer", "chat", *words, stdin=lines)
    assert done.returncode == 1, "the last line failed"
    assert "reasoning effort: low, high\n" in done.stderr
    assert re.findall(r"(\d+) prompt tokens", done.stderr) == ["2", "4", "3"]
    assert "no reasoning effort 'deep' (this model knows low, high)" in done.stderr
