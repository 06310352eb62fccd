"""An importance matrix from a model's own activations over a text.

    python tools/gguf_imatrix.py --model hy3-q8.gguf --text calibration.txt -o hy3.imatrix.gguf
    python tools/gguf_mix.py hy3-q8.gguf -o hy3-iq2.gguf --imatrix hy3.imatrix.gguf --type ...

For every matrix, and each expert by itself, the mean square of what goes into each column. The
file is llama.cpp's GGUF form (drawn in tools/gguf_importance.py); its quantiser takes it too. MTP
blocks see nothing here: gguf_mix gives their experts a type of their own. Ctrl-C ends it early and
writes what there is.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from gguf_importance import Importance
from gguf_making import check_out
from gguf_recording import Recorder

from infer.config import ModelConfig
from infer.session import Session
from infer.text.tokenizer import Tokenizer
from shared.command import run_command
from shared.errors import ConfigError, RequestError, cause_of
from shared.gguf_index import GgufIndex
from shared.options import add_options, build, given


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE.txt", help="UTF-8")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument(
        "--window", type=int, default=512, metavar="N", help="tokens that see each other"
    )
    parser.add_argument("--windows", type=int, default=0, metavar="N", help="at most (0: all)")
    parser.add_argument("--special", action="store_true", help="control tokens are recognised")
    parser.add_argument("--dry-run", action="store_true", help="count the tokens, compute nothing")
    parser.add_argument("--force", action="store_true", help="replace FILE.gguf where it exists")
    add_options(parser.add_argument_group("model"), ModelConfig)
    return parser.parse_args(words)


def windows_of(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """The text in windows of tokens, BOS before each where the vocabulary has one. A last one that
    is not full is left out, unless it is the only one."""
    size = arguments.window
    if size < 2 or arguments.windows < 0:
        raise ConfigError("--window is below 2, or --windows below 0", "give more")
    try:
        text = arguments.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {arguments.text}: {cause_of(error)}", "check --text"
        ) from error
    ids = tokenizer.encode(text, special=arguments.special)
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    step = size - len(first)
    whole = max(len(ids) // step, 1)
    found = [first + ids[n * step : (n + 1) * step] for n in range(whole)]
    if len(found[0]) < 2:
        raise RequestError("the text has no token", "give a longer one")
    return found[: arguments.windows or None]


def collect(arguments: argparse.Namespace) -> int:
    config = build(ModelConfig, [("command line", given(arguments, ModelConfig))])
    if arguments.dry_run:
        if config.model is None:
            raise ConfigError("--dry-run needs --model", "name the GGUF file")
        tokenizer = Tokenizer.from_metadata(GgufIndex.open(config.model).metadata)
        windows = windows_of(arguments, tokenizer)
        print(f"{len(windows)} windows, {sum(map(len, windows))} tokens")
        return 0
    check_out(arguments, [config.model] if config.model and config.model.exists() else [])
    recorder = Recorder()
    with Session(config, recorder) as session:
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        windows = windows_of(arguments, session.tokenizer)
        done = _run(session, windows)
    if not done:
        raise KeyboardInterrupt
    importance = Importance(
        arguments.out, (arguments.text.name,), done, arguments.window, recorder.sums
    )
    importance.write()
    _report(importance, len(windows))
    return 0 if done == len(windows) else 130


def _run(session: Session, windows: list[list[int]]) -> int:
    """How many windows were computed: all, unless Ctrl-C came."""
    engine = session.engine
    started_s = time.monotonic()
    for done, window in enumerate(windows):
        engine.kv.truncate(0)
        try:
            # What is watched is computed whole: without a tap the last layer's experts would see
            # the last token only.
            engine.extend(window, tap=lambda *_: None)
        except KeyboardInterrupt:
            return done
        if sys.stderr.isatty():
            left_s = (time.monotonic() - started_s) / (done + 1) * (len(windows) - done - 1)
            print(
                f"\r\x1b[K{done + 1} of {len(windows)} windows, {left_s / 60:.0f} min left",
                end="" if done + 1 < len(windows) else "\n",
                file=sys.stderr,
                flush=True,
            )
    return len(windows)


def _report(importance: Importance, wanted: int) -> None:
    print(
        f"{importance.path}: {len(importance.sums)} tensors,"
        f" {importance.chunk_count} of {wanted} windows",
        file=sys.stderr,
    )
    unseen = list(importance.unseen())
    if unseen:
        missing, total = sum(n for _, n, _ in unseen), sum(of for _, _, of in unseen)
        print(
            f"no token reached {missing} of {total} experts of {len(unseen)} tensors (such as"
            f" {unseen[0][0]}): they get the mean of the others; a longer text reaches more",
            file=sys.stderr,
        )


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run_command("gguf_imatrix", lambda: collect(arguments))


if __name__ == "__main__":
    sys.exit(main())
