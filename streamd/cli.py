"""The `streamd` command."""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from shared.command import run_command
from shared.completion import SHELLS, completion_script
from shared.errors import ConfigError, DaemonLost
from shared.options import add_options
from shared.runtime_dir import find_daemon
from shared.version import VersionAction
from shared.wire import Reload, Stop
from streamd.config import StreamdConfig, read_config
from streamd.planning.plan_options import MachineOptions, read_machine


def main() -> int:
    return run_command("streamd", lambda: _run(sys.argv[1:]))


def _run(words: list[str]) -> int:
    # `streamd --model x` is the command people type; serving is the default.
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
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
    parser.add_argument("--version", action=VersionAction)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve a model until stopped")
    plan = commands.add_parser("plan", help="what would fit, without serving")
    for command in (serve, plan):
        add_options(command, StreamdConfig)
        command.add_argument("--config", type=Path, metavar="FILE.toml", help="options in a file")
    add_options(plan, MachineOptions)
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
    heatmap = commands.add_parser("heatmap", help="a picture of which experts are used")
    for command in (stats, stop, reload, heatmap):
        command.add_argument("--name", help="which daemon (default: the only one running)")
        command.add_argument("--model", type=Path, help="the daemon that serves this file")
    for command in (stats, plan, bench_io, scrub):
        command.add_argument("--json", action="store_true", help="for programs")
    _add_service_commands(commands)
    stats.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=_seconds,
        metavar="SECONDS",
        help="again and again, until Ctrl-C (default: every second)",
    )
    stats.add_argument("--csv", type=Path, metavar="FILE", help="with --watch: a line each time")
    heatmap.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    heatmap.set_defaults(run=_heatmap)
    serve.set_defaults(run=_serve)
    plan.set_defaults(run=_plan)
    bench_io.set_defaults(run=_bench_io)
    doctor.set_defaults(run=_doctor)
    scrub.set_defaults(run=_scrub)
    stats.set_defaults(run=_stats)
    stop.set_defaults(run=_stop)
    reload.set_defaults(run=_reload)
    return parser


def _add_service_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    service = commands.add_parser(
        "install-service", help="write a systemd unit and the configuration it starts with"
    )
    service.add_argument("--user", action="store_true", help="of your own systemd, without root")
    service.add_argument("--name", default="", help="which daemon (default: streamd)")
    service.add_argument("--model", type=Path, metavar="FILE.gguf", help="write it to its file")
    service.add_argument("--run-as", metavar="USER", help="whose daemon (default: yours)")
    service.add_argument("--dry-run", action="store_true", help="show, write nothing")
    service.set_defaults(run=_install_service)
    completion = commands.add_parser("completion", help="what your shell completes, to be sourced")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0.1 <= value <= 3600:
            return value
    raise argparse.ArgumentTypeError(f"it cannot be {text!r}, give 0.1 to 3600 seconds")


# Imports are made where they are used: `stop` and `--help` need neither numpy nor zmq.


def _serve(arguments: argparse.Namespace) -> int:
    from streamd.serve import serve  # noqa: PLC0415

    return serve(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from streamd.planning.model_plan import plan_model  # noqa: PLC0415
    from streamd.planning.plan_view import plan_values, render_plan  # noqa: PLC0415

    plan = plan_model(read_config(arguments), read_machine(arguments))
    print(json.dumps(plan_values(plan)) if arguments.json else render_plan(plan))
    return 0


def _bench_io(arguments: argparse.Namespace) -> int:
    from streamd.commands.io_commands import bench_io  # noqa: PLC0415

    return bench_io(arguments.model, arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from streamd.commands.io_commands import doctor  # noqa: PLC0415

    return doctor(arguments.model)


def _scrub(arguments: argparse.Namespace) -> int:
    from streamd.commands.io_commands import scrub  # noqa: PLC0415

    return scrub(arguments.model, arguments.json)


def _stats(arguments: argparse.Namespace) -> int:
    if arguments.csv is not None and arguments.watch is None:
        raise ConfigError("--csv is filled while --watch watches", "add --watch")
    name = find_daemon(arguments.name, arguments.model).name
    if arguments.watch is not None:
        from streamd.monitoring.stats_watch import watch  # noqa: PLC0415

        return watch(name, arguments.watch, arguments.json, arguments.csv)
    from shared.stats_view import render_stats  # noqa: PLC0415
    from streamd.ask import ask_stats  # noqa: PLC0415

    values = ask_stats(name)
    print(json.dumps(values) if arguments.json else render_stats(values))
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from streamd.ask import ask, wait_until_gone  # noqa: PLC0415

    record = find_daemon(arguments.name, arguments.model, remedy="nothing has been stopped")
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


def _heatmap(arguments: argparse.Namespace) -> int:
    from streamd.monitoring.heatmap import heatmap  # noqa: PLC0415

    return heatmap(find_daemon(arguments.name, arguments.model).name, arguments.out)


def _install_service(arguments: argparse.Namespace) -> int:
    from streamd.commands.install_service import install  # noqa: PLC0415

    return install(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    print(completion_script(_parser(), arguments.shell, "serve"))
    return 0
