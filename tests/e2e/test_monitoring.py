"""What the daemon shows of itself: on a terminal, in pipes and files, as a picture.

Its counters are compared with what a client counts that looks up experts here.
"""

import csv
import fcntl
import json
import os
import pty
import re
import select
import struct
import sysconfig
import termios
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from shared.wire import HeatRequest
from streamd.ask import ask
from streamd.monitoring.heatmap import unpack

ROWS, COLUMNS = 40, 100
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def daemon(module_place, demo_model):
    return module_place.daemon(demo_model, "--name", "demo", "--host-cache", "6M")


@pytest.fixture(scope="module")
def counting(daemon, slab_reader, demo_model):
    reader = slab_reader.CountingReader(demo_model, "demo")
    yield reader
    reader.reader.close()


class Window:
    """A terminal's screen: where text goes when control sequences move the cursor."""

    _TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.styles: set[str] = set()
        self._clear()

    def _clear(self) -> None:
        self._cells = [[" "] * COLUMNS for _ in range(ROWS)]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for token in self._TOKEN.finditer(text):
            parameters, command = token[1], token[2]
            if command == "H":
                self._row = self._column = 0
            elif command == "m":
                self.styles |= set(parameters.split(";"))
            elif command in ("h", "l"):
                self.modes.append(parameters + command)
            elif command == "J":
                self._clear()
            elif token[0] == "\n":
                self._row += 1
            elif token[0] == "\r":
                self._column = 0
            elif command is None:
                for character in token[0]:
                    if self._row < ROWS and self._column < COLUMNS:
                        self._cells[self._row][self._column] = character
                    self._column += 1

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]


@contextmanager
def watched(place, *words, **environment):
    """`streamd stats --watch` on a pseudo-terminal: its process, and a function that reads on."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    program = Path(sysconfig.get_path("scripts"), "streamd")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TERM": "xterm", **environment}.items():
            patch.setenv(name, value)
        process = place.start("on_terminal.py", program, "stats", "--watch", *words, **streams)
    os.close(slave)
    window = Window()

    def read_until(pattern: str) -> Window:
        end_s = time.monotonic() + DEADLINE_S
        while not re.search(pattern, "\n".join(window.lines)):
            ready, _, _ = select.select([master], [], [], max(0, end_s - time.monotonic()))
            assert ready, window.lines
            window.feed(os.read(master, 1 << 16).decode(errors="replace"))
        return window

    try:
        yield process, read_until, master
    finally:
        os.close(master)


def test_the_live_view_on_a_terminal(module_place, counting):
    with watched(module_place, "0.2", NO_COLOR="") as (process, read_until, master):
        read_until(r"demo  up .*demo-hy3")
        counting.look_up(np.random.default_rng(3), 30)
        hits, misses = counting.counts
        share = f"{100 * hits / (hits + misses):.1f}%"
        # Tier, last second, last minute, all time, evictions.
        window = read_until(rf"host +\S+ +\S+ +{re.escape(share)} +\S+ +\d")
        lines = "\n".join(window.lines)
        for shown in ("disk ", "queue ", "memory ", "clients 1", "slabs of"):
            assert shown in lines
        assert "PCIe " not in lines, "there is no GPU tier"
        assert re.search(r"host +layers hold [·▁-█]{7}", lines)
        assert re.search(rf"0 +{os.getpid()} ", lines), "the client's line"
        assert window.modes[:2] == ["?1049h", "?25l"], "the other screen, no cursor"
        os.write(master, b"\x03")
        with suppress(OSError):  # EIO: it has ended
            while text := os.read(master, 1 << 16):
                window.feed(text.decode(errors="replace"))
        assert process.wait(30) == 0
        assert {"?1049l", "?25h"} <= set(window.modes), "the terminal is as it was"


def test_without_colour(module_place, daemon):
    with watched(module_place, "0.2", NO_COLOR="1", COLORTERM="truecolor") as (_, read_until, _m):
        window = read_until(r"slabs of")
        # 0 resets, 1 is bold; from 30 on there is colour.
        assert window.styles <= {"", "0", "1"}


def test_lines_for_programs(module_place, counting, tmp_path):
    table = tmp_path / "stats.csv"
    process = module_place.start(
        "streamd", "stats", "--name", "demo", "--watch", "0.1", "--json", "--csv", table
    )
    answers = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    process.communicate(timeout=30)
    uptimes = [answer["uptime_s"] for answer in answers]
    assert uptimes == sorted(set(uptimes))
    hits, misses = counting.counts
    host = answers[-1]["tiers"]["host"]
    assert (host["hits"], host["misses"]) == (hits, misses)
    assert sum(host["layer_misses"]) == misses
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 3
    assert int(rows[0]["tiers.host.hits"]) == hits
    assert float(rows[0]["time"]) == pytest.approx(time.time(), abs=120)
    assert not any(value == "" for row in rows for value in row.values())


def test_a_table_without_watching_is_refused(module_place, tmp_path):
    done = module_place.run("streamd", "stats", "--csv", tmp_path / "stats.csv")
    assert done.returncode == 1
    assert "--watch" in done.stderr


@pytest.mark.parametrize("pause", ["foo", "0", "nan"])
def test_a_pause_that_is_none_is_refused(module_place, pause):
    done = module_place.run("streamd", "stats", "--watch", pause)
    assert done.returncode == 2
    assert f"--watch: it cannot be '{pause}', give 0.1 to 3600 seconds" in done.stderr


def test_a_pipe_gets_plain_lines(module_place, daemon):
    process = module_place.start("streamd", "stats", "--watch", "0.1")
    lines = [process.stdout.readline() for _ in range(2)]
    process.terminate()
    process.communicate(timeout=30)
    for line in lines:
        assert re.fullmatch(r"host hits \S+  disk [\d.,]+ MB/s .* t/s\n", line)
        assert "\x1b" not in line


def test_a_watch_without_a_daemon_fails(module_place):
    done = module_place.run("streamd", "stats", "--name", "absent", "--watch")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no daemon named 'absent'" in done.stderr


def test_a_picture(module_place, counting, tmp_path):
    pytest.importorskip("matplotlib")
    counting.look_up(np.random.default_rng(4), 5)
    picture = tmp_path / "h.png"
    done = module_place.run("streamd", "heatmap", "--name", "demo", "--out", picture)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{picture}\n", "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    heat, _ = unpack(ask("demo", HeatRequest()))
    assert {(int(a), int(b)) for a, b in np.argwhere(heat > 0)} == counting.looked_up
    done = module_place.run("streamd", "heatmap", "--out", tmp_path / "h.nonsense")
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot write" in done.stderr
