"""The `streamd` command."""

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from shared.command import run_command
from shared.errors import DaemonLost, StreamError
from shared.options import add_options
from shared.runtime_dir import DaemonRecord, Endpoints, claim, find_daemon
from shared.wire import PROTOCOL_VERSION, Reload, Stats, StatsRequest, Stop
from streamd.config import StreamdConfig, read_config


def main() -> int:
    return run_command("streamd", lambda: _run(sys.argv[1:]))


def _run(words: list[str]) -> int:
    # `streamd --model x` is the command people type; serving is the default.
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words = ["serve", *words]
    arguments = _parser().parse_args(words)
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="streamd",
        description="Streams the experts of a mixture-of-experts GGUF from disk for its clients.",
        epilog="`streamd --model FILE.gguf` is short for `streamd serve --model FILE.gguf`.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve a model until stopped")
    plan = commands.add_parser("plan", help="what would fit, without serving")
    for command in (serve, plan):
        add_options(command, StreamdConfig)
        command.add_argument("--config", type=Path, metavar="FILE.toml", help="options in a file")
    serve.add_argument("--owner-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    bench_io = commands.add_parser("bench-io", help="how fast the drive gives expert slabs")
    doctor = commands.add_parser("doctor", help="is this machine fit, and what to do if not")
    scrub = commands.add_parser("scrub", help="read the whole file once, at low priority")
    scrub.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    bench_io.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    doctor.add_argument("--model", type=Path, metavar="FILE.gguf", help="look at its drive too")
    stats = commands.add_parser("stats", help="hit rates, disk, clients")
    stop = commands.add_parser("stop", help="stop a daemon")
    reload = commands.add_parser("reload", help="open the model file anew")
    for command in (stats, stop, reload):
        command.add_argument("--name", help="which daemon (default: the only one running)")
        command.add_argument("--model", type=Path, help="the daemon that serves this file")
    for command in (stats, plan, bench_io, scrub):
        command.add_argument("--json", action="store_true", help="for programs")
    serve.set_defaults(run=_serve)
    plan.set_defaults(run=_plan)
    bench_io.set_defaults(run=_bench_io)
    doctor.set_defaults(run=_doctor)
    scrub.set_defaults(run=_scrub)
    stats.set_defaults(run=_stats)
    stop.set_defaults(run=_stop)
    reload.set_defaults(run=_reload)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    starter = _Starter(arguments.ready_fd)
    try:
        _serve_until_stopped(arguments, starter)
    except StreamError as error:
        if starter.tell({"error": [error.code, error.message, error.remedy]}):
            return 1
        raise
    return 0


def _serve_until_stopped(arguments: argparse.Namespace, starter: "_Starter") -> None:
    from streamd.daemon import Daemon  # noqa: PLC0415 - numpy and zmq, which `stop` does not need
    from streamd.descriptors import raise_limit  # noqa: PLC0415

    config = read_config(arguments)
    # The working directory may be gone by the time the file is opened anew.
    config = dataclasses.replace(config, model=config.model.absolute())
    logging.basicConfig(
        level=config.log_level.upper(), format="streamd: %(message)s", stream=sys.stderr
    )
    raise_limit()
    endpoints = Endpoints.of(config.daemon_name)
    record = DaemonRecord(config.daemon_name, os.getpid(), str(config.model), PROTOCOL_VERSION)
    with claim(endpoints, record):
        while True:
            daemon = Daemon(config, endpoints)
            daemon.stop_on_signals()
            gc.collect()  # the one before a reload: its memory must be free for this one's plan
            with daemon:
                if arguments.owner_fd is not None:
                    daemon.watch_owner(arguments.owner_fd)
                logging.info("serving %s as %r", config.model, config.daemon_name)
                starter.tell({"name": config.daemon_name})
                daemon.run()
            if daemon.orphaned or not daemon.reload_wanted:
                return


class _Starter:
    """Whoever started us and waits at the other end of a pipe to hear that we serve, or why not."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def tell(self, word: dict[str, Any]) -> bool:
        """One line, once; False if nobody waits (any more)."""
        if self._fd is None:
            return False
        with contextlib.suppress(BrokenPipeError):  # it has gone; the owner's descriptor will tell
            os.write(self._fd, json.dumps(word).encode() + b"\n")
        os.close(self._fd)
        self._fd = None
        return True


def _plan(arguments: argparse.Namespace) -> int:
    from streamd.served_model import plan_model  # noqa: PLC0415

    values = plan_model(read_config(arguments))
    if arguments.json:
        print(json.dumps(values))
        return 0
    for name, value in values.items():
        print(f"{name:<20} {value:,}" if isinstance(value, int) else f"{name:<20} {value}")
    return 0


def _bench_io(arguments: argparse.Namespace) -> int:
    from streamd.io_commands import bench_io  # noqa: PLC0415

    return bench_io(arguments.model, arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from streamd.io_commands import doctor  # noqa: PLC0415

    return doctor(arguments.model)


def _scrub(arguments: argparse.Namespace) -> int:
    from streamd.io_commands import scrub  # noqa: PLC0415

    return scrub(arguments.model, arguments.json)


def _stats(arguments: argparse.Namespace) -> int:
    from shared.stats_view import render_stats  # noqa: PLC0415
    from streamd.ask import ask  # noqa: PLC0415

    answer = ask(find_daemon(arguments.name, arguments.model).name, StatsRequest())
    assert isinstance(answer, Stats)
    print(json.dumps(answer.values) if arguments.json else render_stats(answer.values))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from streamd.ask import ask, wait_until_gone  # noqa: PLC0415

    record = find_daemon(arguments.name, arguments.model)
    try:
        ask(record.name, Stop())
    except DaemonLost:
        with contextlib.suppress(ProcessLookupError):  # it is loading, or too busy to listen
            os.kill(record.pid, signal.SIGTERM)
    wait_until_gone(record)
    print(f"stopped {record.name}")
    return 0


def _reload(arguments: argparse.Namespace) -> int:
    from streamd.ask import ask  # noqa: PLC0415

    record = find_daemon(arguments.name, arguments.model)
    ask(record.name, Reload())
    print(f"{record.name} opens {record.model} anew")
    return 0
