"""A daemon that ends in the middle of an answer: the chat waits for the next one and goes on."""

import os
import re
import select
import shutil
import signal
import time
from pathlib import Path

import pytest

from shared.runtime_dir import running_daemons

QUESTION = "Tell me a story about a river."
TOKEN_COUNT = 48
WORDS = ("--temp", 0, "--exact", "--kv-sessions", "off", "--max-tokens", TOKEN_COUNT)
# At the floor of the cache, an answer takes a few seconds.
DRIVE = ("--io", "paced:10MB/s")
ANSWER_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory, demo_model) -> Path:
    """A copy: one test replaces it."""
    return Path(shutil.copy(demo_model, tmp_path_factory.mktemp("reconnects") / "river.gguf"))


@pytest.fixture(scope="module")
def start_daemon(module_place, model):
    floor_bytes = module_place.plan(model)["floor_bytes"]

    def start(program: str = "streamd"):
        options = ("--name", "river", "--host-cache", floor_bytes, *DRIVE)
        return module_place.daemon(model, *options, program=program)

    return start


@pytest.fixture(scope="module")
def expected(module_place, model) -> str:
    """The answer of a chat that nobody disturbs."""
    done = module_place.run("infer", "chat", *WORDS, "--model", model, "-p", QUESTION)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _begun_chat(place, *words: object):
    """A chat in the middle of its answer, and what it has said of it."""
    chat = place.start("infer", "chat", *WORDS, *words, "-p", QUESTION)
    ready, _, _ = select.select([chat.stdout], [], [], ANSWER_S)
    assert ready, "it begins to answer"
    return chat, os.read(chat.stdout.fileno(), 1 << 12).decode()


def test_a_restarted_daemon(module_place, start_daemon, expected):
    daemon = start_daemon()
    chat, begun = _begun_chat(module_place, "--name", "river")
    assert 0 < len(begun) < len(expected)
    daemon.process.kill()
    daemon.process.wait()
    time.sleep(0.3)
    after = start_daemon()
    rest, shown = chat.communicate(timeout=ANSWER_S)
    assert chat.returncode == 0, shown
    assert begun + rest == expected
    assert "(the daemon 'river' is gone: it ended; waiting up to 30 s for it to come back)" in shown
    assert "(the daemon is back: going on)" in shown
    assert "has come (pid" in after.log.read_text()
    after.stop()


def test_a_reload(module_place, start_daemon, expected):
    daemon = start_daemon()
    chat, begun = _begun_chat(module_place, "--name", "river")
    assert module_place.run("streamd", "reload", "--name", "river").returncode == 0
    rest, shown = chat.communicate(timeout=ANSWER_S)
    assert (chat.returncode, begun + rest) == (0, expected), shown
    assert "going on" in shown
    daemon.stop()


def test_a_conversation_goes_on_and_lets_go_of_the_dead_daemon_s_memory(
    module_place, start_daemon, open_terminal
):
    figures = r"(\d+) prompt tokens, (\d+) new"
    daemon = start_daemon()
    terminal = open_terminal(*WORDS, "--name", "river")
    terminal.enter("Which is the largest planet in the solar system?")
    terminal.read_until(figures)
    terminal.read_until(r"\n>")
    before = _shared_memory(terminal.process.pid)
    daemon.process.kill()
    daemon.process.wait()
    # At once: the next daemon plans with the memory that it finds free.
    module_place.wait_until(
        lambda: not _shared_memory(terminal.process.pid), "the chat lets go while it waits"
    )
    terminal.enter("I want to book a flight to Seattle.")
    terminal.read_until("waiting up to 30 s for it to come back")
    after = start_daemon()
    terminal.read_until("going on")
    prompt_count, new_count = map(int, re.search(figures, terminal.read_until(figures)).groups())
    assert new_count < prompt_count, "what had been computed before is still there"
    assert len(_shared_memory(terminal.process.pid)) == len(before)
    assert not _shared_memory(terminal.process.pid) & before
    terminal.enter("/stats")
    terminal.read_until(r"clients +1\n")
    terminal.enter("/exit")
    assert terminal.process.wait(ANSWER_S) == 0
    after.stop()


def _shared_memory(pid: int) -> set[str]:
    """Inodes of the memfds that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:" in line}


def test_a_daemon_of_its_own_is_started_again(module_place, model, expected):
    chat, begun = _begun_chat(module_place, "--model", model, *DRIVE)
    (record,) = running_daemons()
    os.kill(record.pid, signal.SIGKILL)
    rest, shown = chat.communicate(timeout=ANSWER_S)
    assert (chat.returncode, begun + rest) == (0, expected), shown
    assert f"(the daemon 'embedded-{chat.pid}' is gone: it ended; starting it again)" in shown


def test_a_daemon_of_another_version_is_refused(module_place, start_daemon):
    daemon = start_daemon()
    chat, _ = _begun_chat(module_place, "--name", "river")
    daemon.process.kill()
    daemon.process.wait()
    newer = start_daemon("daemon_of_another_version.py")
    _, shown = chat.communicate(timeout=ANSWER_S)
    assert chat.returncode == 1
    assert re.search(r"protocol version \d+, this side speaks \d+", shown), shown
    newer.process.kill()  # of another version too for a question to it
    newer.process.wait()
    start_daemon().stop()


def test_a_daemon_of_another_file_is_refused(module_place, start_daemon, model):
    """The last of this module, whose model it replaces."""
    daemon = start_daemon()
    chat, _ = _begun_chat(module_place, "--name", "river")
    daemon.process.kill()
    daemon.process.wait()
    copy = model.with_suffix(".copy")
    shutil.copy(model, copy)
    copy.replace(model)
    after = start_daemon()
    _, shown = chat.communicate(timeout=ANSWER_S)
    assert chat.returncode == 1
    assert re.search(r"the daemon 'river' refuses: .* is not the file that the daemon", shown)
    assert re.search(r"reload.*--name or --model", shown)
    after.stop()
