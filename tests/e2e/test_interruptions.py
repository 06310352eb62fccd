"""A long prompt that is broken off: by Ctrl-C, by SIGTERM, by the end of its daemon.

The drive is slowed down, so that a prompt takes seconds; the cache is at its floor, so that the
next one does too.
"""

import re
import signal
import time
from typing import Any

import numpy as np
import pytest

from shared.errors import DaemonLost

DRIVE = "paced:3MB/s"
# A second, and what a machine that is busy with anything may add to it.
END_S = 1.0 + 1.5
LONG_PROMPT = " ".join(f"the river {name} rises in the hills." for name in range(40))
WORDS = ("--temp", 0, "--kv-sessions", "off")


@pytest.fixture(scope="module")
def daemon(module_place, demo_model) -> Any:
    floor_bytes = module_place.plan(demo_model)["floor_bytes"]
    return module_place.daemon(demo_model, "--host-cache", floor_bytes, "--io", DRIVE)


def _await_prefill(place, daemon) -> None:
    """Until a client waits for experts."""
    before = place.stats(daemon.name)["io"]["bytes_read"]
    place.wait_until(
        lambda: place.stats(daemon.name)["io"]["bytes_read"] > before + (1 << 20), "a prompt"
    )


def test_progress_and_ctrl_c(module_place, daemon, open_terminal):
    terminal = open_terminal(*WORDS)
    for _ in range(2):
        terminal.enter(LONG_PROMPT)
        shown = terminal.read_until(r"\d+ of \d+ prompt tokens, \d+%, \d+ s left")
        done, count, percent = map(int, re.search(r"(\d+) of (\d+) .*, (\d+)%", shown).groups())
        assert 0 < done < count
        assert percent == pytest.approx(100 * done / count, abs=1)
        started_s = time.monotonic()
        terminal.type("\x03")
        terminal.read_until(r"\(stopped\)")
        assert time.monotonic() - started_s < END_S
    # It lives on, and the cache of the conversation is as it should be.
    terminal.enter("Which is the largest planet in the solar system?")
    terminal.read_until(r"Jupiter\.")
    terminal.read_until("% hits")
    terminal.enter("/exit")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_chat_that_waits_for_its_user(number, daemon, open_terminal):
    terminal = open_terminal(*WORDS)
    terminal.read_until(r"\n>")
    started_s = time.monotonic()
    terminal.process.send_signal(number)
    assert terminal.process.wait(60) == 128 + number
    assert time.monotonic() - started_s < END_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_prompt(number, module_place, daemon):
    chat = module_place.start("infer", "chat", *WORDS, "-p", LONG_PROMPT)
    _await_prefill(module_place, daemon)
    started_s = time.monotonic()
    chat.send_signal(number)
    out, err = chat.communicate(timeout=60)
    assert time.monotonic() - started_s < END_S
    assert (chat.returncode, out, err) == (128 + number, "", "")
    module_place.wait_until(lambda: not module_place.stats(daemon.name)["clients"], "it is gone")


def test_hits_alone_notice_the_end_of_the_daemon_too(module_place, slab_reader, demo_model):
    daemon = module_place.daemon(demo_model, "--name", "brief")
    reader = slab_reader.SlabReader(demo_model, daemon.name)
    layer, experts = reader.layers[0], np.arange(4)
    reader.read(layer, experts)
    daemon.process.kill()
    daemon.process.wait()
    time.sleep(0.2)
    with pytest.raises(DaemonLost, match="the daemon 'brief' is gone: it ended"):
        reader.read(layer, experts)
    reader.close()
    module_place.daemon(demo_model, "--name", "brief").stop()  # its files are taken over


def test_a_prompt_ends_with_its_daemon(module_place, daemon, demo_model):
    """The last of this module, whose daemon it ends."""
    chat = module_place.start("infer", "chat", *WORDS, "--reconnect-s", 0, "-p", LONG_PROMPT)
    _await_prefill(module_place, daemon)
    started_s = time.monotonic()
    daemon.process.kill()
    assert "is gone: it ended" in chat.stderr.readline()
    assert time.monotonic() - started_s < END_S
    out, _ = chat.communicate(timeout=60)
    assert (chat.returncode, out) == (1, "")
    module_place.daemon(demo_model, "--name", daemon.name).stop()
