"""A chat that comes back: nothing is computed twice, and the answers are those of one long chat."""

import re
from pathlib import Path
from typing import Any

import pytest

QUESTION = "Which is the largest planet in the solar system?"
NEXT_QUESTION = "I want to book a flight to Seattle."


@pytest.fixture
def chat(place, demo_model) -> Any:
    daemon = place.daemon(demo_model)

    def run(*words: object, stdin: str = "") -> tuple[str, list[tuple[int, int]], str]:
        """stdout, (tokens, new tokens) of each prompt, stderr."""
        done = place.run("infer", "chat", "--name", daemon.name, "--temp", 0, *words, stdin=stdin)
        counts = re.findall(r"(\d+) prompt tokens, (\d+) new", done.stderr)
        return done.stdout, [(int(a), int(b)) for a, b in counts], done.stderr

    return run


def _kept(place) -> list[Path]:
    return sorted(place.state_dir.glob("streamd/sessions/*/recent/*.kv"))


def test_a_prompt_is_computed_once(chat, place):
    first, ((count, new_count),), _ = chat("-p", QUESTION)
    assert new_count == count
    again, ((_, new_count),), _ = chat("-p", QUESTION)
    assert (again, new_count) == (first, 1)
    assert chat("-p", QUESTION, "--kv-sessions", "off")[1] == [(count, count)]
    (path,) = _kept(place)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    out, counts, err = chat("-p", QUESTION)
    assert (out, counts) == (first, [(count, count)])
    assert len(re.findall(r"(?m)^ignored: .*\.kv is damaged or foreign: .*$", err)) == 1


def test_a_chat_goes_on_where_it_was_saved(chat, place):
    whole, (first, second), _ = chat(stdin=f"{QUESTION}\n{NEXT_QUESTION}\n")
    out, _, err = chat("--kv-sessions", "off", stdin=f"{QUESTION}\n/save trip\n")
    assert "saved: " in err
    more, counts, err = chat(
        "--kv-sessions", "off", stdin=f"/load\n/load tripp\n/load trip\n{NEXT_QUESTION}\n"
    )
    assert out + more == whole
    assert counts == [second]
    assert second[1] < second[0] - first[0]
    assert "there is no session 'tripp' of this model (there are: trip;" in err
    assert "saved as trip: 2 messages, 21 tokens; the last message: Jupiter." in err
    assert err.startswith("saved as trip: "), "also without a name"
    _, _, err = chat("--ctx", 20, stdin="/load trip\n/load\n")
    refused = re.findall(r"the session has (\d+) tokens, the context has room for 20", err)
    assert refused == ["21", "21"]


def test_what_a_command_did_is_told(chat):
    lines = (
        *("/save", "/load", QUESTION, "/reset", "/load", "/save trip", "/save trip"),
        *("/system Be brief.", "/system", "/exit now", "never read"),
    )
    _, counts, err = chat(stdin="\n".join(lines) + "\n")
    assert len(counts) == 1
    told = [re.sub(r"(ing the one of that name|saved): .*", r"\1", x) for x in err.splitlines()]
    assert [line for line in told if "prompt tokens" not in line] == [
        "/save has to know as what (give a name: /save NAME)",
        "no conversation with this model is kept (there are: none; /save NAME makes one)",
        "a new conversation",
        "the latest conversation, kept without a name: 2 messages, 21 tokens; the last message:"
        " Jupiter.",
        "saved",
        "saved, replacing the one of that name",
        "system message set, a new conversation",
        "no system message, a new conversation",
    ]


def test_a_damaged_session_leaves_a_new_conversation(chat, place):
    _, (first,), _ = chat("--kv-sessions", "off", stdin=f"{QUESTION}\n/save trip\n")
    (path,) = place.state_dir.glob("streamd/sessions/*/saved/trip.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    _, counts, err = chat("--kv-sessions", "off", stdin=f"/load trip\n/save other\n{QUESTION}\n")
    assert "trip.kv is damaged or foreign: the checksum of block 0 is wrong" in err
    assert "there is nothing to save yet" in err
    assert counts == [first], "nothing of the past that could not be loaded"


def test_limits(chat, place):
    chat("--kv-sessions", 2, stdin="One.\n/reset\nTwo.\n/reset\nThree.\n")
    assert len(_kept(place)) == 2
    _, _, err = chat("-p", QUESTION, "--kv-sessions", "1K")
    assert "more than --kv-sessions allows" in err
    assert "--kv-sessions cannot be 'some'" in chat("-p", QUESTION, "--kv-sessions", "some")[2]


def test_a_directory_that_others_can_read_keeps_nothing(chat, place):
    directory = place.state_dir / "streamd" / "sessions"
    directory.mkdir(parents=True)
    directory.chmod(0o755)
    out, _, err = chat("-p", QUESTION)
    assert out == "Jupiter.\n"
    assert "no sessions are kept" in err
