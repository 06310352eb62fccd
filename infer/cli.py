"""The `infer` command."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from infer.config import ChatConfig, DraftConfig, ModelConfig
from infer.session import OWN_SLOT_CHOICES, SHARED_CHOICES, Session
from infer.signals import ended_by_signals, leave_at_once
from shared.command import EXIT_INTERRUPTED, run_command
from shared.completion import SHELLS, completion_script
from shared.daemon_options import DaemonOptions
from shared.options import add_options, build, given
from shared.version import VersionAction

# As in infer.commands.selftest, which imports much.
SELFTESTS = ("gqa", "mla", "dsa", "quants", "all")


def main() -> int:
    with ended_by_signals():
        code = run_command("infer", lambda: _run(sys.argv[1:]))
    if code == EXIT_INTERRUPTED:
        leave_at_once(code)
    return code


def _run(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infer",
        description="Talks to a mixture-of-experts model whose experts streamd streams from disk.",
        epilog="Without a daemon that serves --model, a command starts one for itself.",
    )
    parser.add_argument("--version", action=VersionAction)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_chat(commands)
    _add_measurements(commands)
    _add_looks(commands)
    return parser


def _add_chat(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk to a model")
    chat.add_argument("-p", "--prompt", metavar="TEXT", help="answer this and exit")
    _add_options(chat, ChatConfig)
    chat.set_defaults(run=_chat)


def _add_measurements(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logits = commands.add_parser("logits", help="logits of given tokens, for scripts")
    logits.add_argument("--tokens", required=True, metavar="1,2,3", help="token ids")
    logits.add_argument(
        "--out", required=True, type=Path, metavar="FILE.npy", help="float32 [n, vocab]"
    )
    logits.add_argument(
        "--dump",
        type=Path,
        metavar="FILE.npz",
        help="hidden states and routing too; with --mtp the block's logits",
    )
    perplexity = commands.add_parser("perplexity", help="mean negative log-likelihood of a text")
    perplexity.add_argument("--file", required=True, type=Path, metavar="FILE.txt", help="UTF-8")
    bench = commands.add_parser("bench", help="tokens per second")
    bench.add_argument("-p", "--prompt", type=_whole(1), default=128, metavar="N", help="tokens")
    bench.add_argument("-n", "--decode", type=_whole(1), default=128, metavar="N", help="tokens")
    bench.add_argument(
        "--warmup",
        type=_whole(0),
        default=1,
        metavar="N",
        help="unmeasured rounds before (default 1)",
    )
    bench.add_argument(
        "--profile", action="store_true", help="one more round, with the time of each part"
    )
    for command, name, options in (
        (logits, "logits", ModelConfig),
        (perplexity, "perplexity", ModelConfig),
        (bench, "bench", DraftConfig),
    ):
        if command is not logits:
            command.add_argument("--json", action="store_true", help="for programs")
        _add_options(command, options)
        command.set_defaults(run=_measure, measurement=name, options=options)


def _add_options(command: argparse.ArgumentParser, options: type[ModelConfig]) -> None:
    add_options(
        command.add_argument_group("the model, and what is asked of it"), options, DaemonOptions
    )
    daemon = command.add_argument_group(
        "the daemon",
        f"Of these a daemon that runs already leaves {', '.join(SHARED_CHOICES)} to this command,"
        f" and where it has no GPU slots {', '.join(OWN_SLOT_CHOICES)}; the others are for one that"
        " is started for it.",
    )
    add_options(daemon, DaemonOptions)


def _add_looks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tokenize = commands.add_parser("tokenize", help="a text's token ids")
    tokenize.add_argument("text", metavar="TEXT")
    tokenize.add_argument("--model", type=Path, help="the GGUF file")
    tokenize.add_argument("--name", help="the daemon whose model is meant")
    tokenize.add_argument(
        "--special", action="store_true", help="control tokens in the text are recognised"
    )
    tokenize.set_defaults(run=_tokenize)
    inspect = commands.add_parser("inspect", help="what a GGUF file holds")
    inspect.add_argument("file", type=Path, metavar="FILE.gguf")
    inspect.add_argument("--json", action="store_true", help="for programs")
    inspect.add_argument("--tensors", action="store_true", help="each tensor as well")
    inspect.set_defaults(run=_inspect)
    selftest = commands.add_parser("selftest", help="does this machine compute what it should?")
    selftest.add_argument(
        "checks", nargs="*", choices=SELFTESTS, default="all", metavar="|".join(SELFTESTS)
    )
    selftest.add_argument(
        "--device", default="auto", metavar="auto|cpu|cuda:0", help="default: a GPU if there is one"
    )
    selftest.add_argument("--threads", type=_whole(1), metavar="N", help="CPU threads")
    selftest.set_defaults(run=_selftest)
    completion = commands.add_parser("completion", help="what your shell completes, to be sourced")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)


def _whole(least: int) -> Callable[[str], int]:
    """Parses whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"give a whole number, {least} or more")
        return int(text)

    return parse


# Imports are made where they are used: numba and torch take a second that `--help` need not wait.


def _chat(arguments: argparse.Namespace) -> int:
    config = build(ChatConfig, [("command line", given(arguments, ChatConfig))])
    with Session(config) as session:
        from infer.chat.repl import chat  # noqa: PLC0415

        return chat(session, config, arguments.prompt)


def _measure(arguments: argparse.Namespace) -> int:
    options = arguments.options
    config = build(options, [("command line", given(arguments, options))])
    with Session(config) as session:
        from infer.commands import measure  # noqa: PLC0415

        code: int = getattr(measure, arguments.measurement)(arguments, session)
    return code


def _tokenize(arguments: argparse.Namespace) -> int:
    from infer.commands.tokenize import tokenize  # noqa: PLC0415

    return tokenize(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    print(completion_script(_parser(), arguments.shell))
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    from infer.commands.selftest import selftest  # noqa: PLC0415

    return selftest(arguments)


def _inspect(arguments: argparse.Namespace) -> int:
    from infer.commands.inspect import inspect  # noqa: PLC0415

    return inspect(arguments)
