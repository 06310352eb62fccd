"""Our CPU path beside llama.cpp's: the same file, threads and tokens, in turns, by the wall clock.

    python -m venv llama && llama/bin/pip install xllamacpp
    python tools/bench_llama.py --llama-python llama/bin/python models/*.gguf

Both hold the model at once, each in its own process with its experts in memory; the one that is not
measured sleeps. A round is ours, theirs, ours. Its ratio is that of theirs to the mean of ours
around it, so that a machine that is busy for a while is busy for both. Given are medians over the
rounds, and of the ratios the lowest and the highest too. On a machine that others use as well look
at `best`, each one's fastest turn: llama.cpp's threads wait for each other at every operation, and
suffer more from company.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from infer.commands.measure import BENCH_TEXT, time_round
from infer.config import ModelConfig
from infer.generation.decoding import Decoding
from infer.session import Session
from shared.errors import StreamError

WORKER = Path(__file__).with_name("llama_worker.py")


class Times(NamedTuple):
    prefill_s: float
    decode_s: float


class Round(NamedTuple):
    """Seconds of llama.cpp's turn, and the mean of our two turns around it."""

    ours: Times
    theirs: Times


def main() -> None:
    options = parser().parse_args()
    if not options.json:
        print(f"{options.threads} threads, prompt {options.prompt}, decode {options.decode}")
    try:
        results = [_compare(model, options) for model in options.models]
    except StreamError as error:
        sys.exit(str(error))
    if options.json:
        print(json.dumps(results))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    made.add_argument(
        "--llama-python", type=Path, required=True, help="a Python that has xllamacpp"
    )
    made.add_argument("-p", "--prompt", type=int, default=128, metavar="N", help="tokens")
    made.add_argument("-n", "--decode", type=int, default=64, metavar="N", help="tokens")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    made.add_argument("--rounds", type=int, default=5, metavar="N")
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def _compare(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = ModelConfig(model=model, threads=options.threads, ctx=options.prompt + options.decode)
    with Session(config) as session, llama(model, options) as ask:
        decoding, prompt = Decoding(session.engine), _prompt(session, options.prompt)

        def ours() -> Times:
            return Times(*time_round(decoding, prompt, options.decode))

        def theirs() -> Times:
            answer = ask({"prompt": prompt, "decode": options.decode})
            return Times(answer["prefill_s"], answer["decode_s"])

        ours(), theirs()  # unmeasured: memory is touched for the first time
        rounds, before = [], ours()
        for _ in range(options.rounds):
            middle, after = theirs(), ours()
            around = Times(*(statistics.mean(pair) for pair in zip(before, after, strict=True)))
            rounds.append(Round(around, middle))
            before = after
    result = summary(rounds, options.prompt, options.decode)
    result |= {"model": model.name, "load_average": os.getloadavg()[0]}
    if not options.json:
        _show(result)
    return result


def summary(rounds: list[Round], prompt_count: int, decode_count: int) -> dict[str, Any]:
    """Tokens per second of both, and how many times llama.cpp's rate ours is."""
    result: dict[str, Any] = {}
    for index, (phase, count) in enumerate((("prefill", prompt_count), ("decode", decode_count))):
        ratios = [theirs[index] / ours[index] for ours, theirs in rounds]
        ours_best_s, theirs_best_s = (
            min(turn[index] for turn in side) for side in zip(*rounds, strict=True)
        )
        result[phase] = {
            "ours_tps": count / statistics.median(r.ours[index] for r in rounds),
            "llama_tps": count / statistics.median(r.theirs[index] for r in rounds),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "ours_best_tps": count / ours_best_s,
            "llama_best_tps": count / theirs_best_s,
            "best_ratio": theirs_best_s / ours_best_s,
        }
    return result


def _show(result: dict[str, Any]) -> None:
    print(f"{result['model']}, load average {result['load_average']:.1f}")
    for phase in ("prefill", "decode"):
        r = result[phase]
        print(
            f"  {phase:8} ours {r['ours_tps']:8.1f} t/s   llama.cpp {r['llama_tps']:8.1f} t/s"
            f"   ratio {r['ratio']:.2f} ({r['ratio_low']:.2f} to {r['ratio_high']:.2f})"
            f"   best {r['ours_best_tps']:.1f} / {r['llama_best_tps']:.1f} = {r['best_ratio']:.2f}"
        )


def _prompt(session: Session, count: int) -> list[int]:
    """Token ids of some text; of a file without words, any that it has."""
    try:
        ids = session.tokenizer.encode(BENCH_TEXT)
    except StreamError:
        ids = list(range(2, session.engine.shape.vocab_size, 7))
    return (ids * (count // len(ids) + 1))[:count]


@contextmanager
def llama(model: Path, options: argparse.Namespace) -> Iterator[Callable[[Any], dict[str, float]]]:
    """Asks a worker that has loaded the model; it ends with the block."""
    context = options.prompt + options.decode + 8
    command = [options.llama_python, WORKER, model, options.threads, context]
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:

        def line() -> str:
            text = worker.stdout.readline()
            if not text:
                sys.exit(f"llama.cpp's worker has ended: exit code {worker.wait()}")
            return text

        def ask(request: dict[str, Any]) -> dict[str, float]:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            return json.loads(line())

        while line().strip() != "ready":
            pass
        yield ask


if __name__ == "__main__":
    main()
