"""`streamd stats --watch`: ask again and again; a screen, plain lines, JSON lines, a CSV file."""

import csv
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from streamd.ask import LIFE_PAUSE_S, ask_stats, check_alive
from streamd.monitoring.stats_history import History, value_at
from streamd.monitoring.stats_line import render_line

Show = Callable[[History], None]


def watch(name: str, pause_s: float, as_json: bool, csv_path: Path | None) -> int:
    """Until Ctrl-C or SIGTERM, which end it with 0; DaemonLost when the daemon has gone."""
    with ExitStack() as stack:
        shows: list[Show] = []
        if csv_path is not None:
            shows.append(_csv_writer(csv_path, stack))
        if as_json:
            shows.append(lambda history: print(json.dumps(line_values(history)), flush=True))
        elif sys.stdout.isatty():
            from streamd.monitoring.stats_screen import Screen  # noqa: PLC0415 - rich, for terminals only

            shows.append(stack.enter_context(Screen()).show)
        elif csv_path is None:
            shows.append(lambda history: print(render_line(history), flush=True))
        # However it is ended, the terminal is to be left as it was.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for history in _answers(name, pause_s):
                for show in shows:
                    show(history)
        except KeyboardInterrupt:
            return 0
    raise AssertionError("answers never end by themselves")


def _answers(name: str, pause_s: float) -> Iterator[History]:
    """An answer each `pause_s`; one that came late is not made up for."""
    history = History()
    while True:
        due_s = time.monotonic() + pause_s
        history.add(ask_stats(name, watching=True))
        yield history
        while (left_s := due_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LIFE_PAUSE_S))
            check_alive(name)


def line_values(history: History) -> dict[str, Any]:
    """The newest answer, `since_last` counted from the line before; the first line's is as the
    daemon tells it. Seconds to the millisecond."""
    now, earlier = history.now, history.earlier
    since = dict(now["since_last"])
    if earlier is not None:
        # Not by their own `since_last`: somebody else may have asked in between.
        paths = {"seconds": "uptime_s", "bytes_read": "io.bytes_read", "reads": "io.reads"}
        for name in since:
            path = paths.get(name, f"tiers.host.{name}")
            since[name] = value_at(now, path) - value_at(earlier, path)
    rounded = {name: round(value, 3) for name, value in since.items()}
    return now | {"since_last": rounded}


def _csv_writer(path: Path, stack: ExitStack) -> Show:
    """Adds a line to a new file each time: unix time, and every number there is by its path."""
    try:
        file = stack.enter_context(path.open("w", newline=""))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "check --csv") from error
    writer = csv.writer(file)
    columns: list[str] = []

    def show(history: History) -> None:
        numbers = dict(flatten(history.now))
        if not columns:
            columns.extend(numbers)
            writer.writerow(["time", *columns])
        writer.writerow([f"{time.time():.3f}", *(numbers.get(name, "") for name in columns)])
        file.flush()

    return show


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(path, number), as `tiers.host.hits`; lists and texts are left out, and so are differences.

    Clients come and go, but the columns of a table stay.
    """
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, dict) and name != "since_last":
            yield from flatten(value, f"{path}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
