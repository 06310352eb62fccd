"""What a long prompt costs the decoding that goes on beside it, or behind it.

    python tools/measure_scan.py --model M.gguf --host-cache 12M --file TEXT [--prompt 600]
        [--rounds 3] [--tokens 200] [--json]

On one daemon, in each round: a chat A decodes; another client computes a prompt, a part of TEXT of
its own in each round; A goes on; the other computes its prompt again and decodes behind it. Hit
rates, in percent of the lookups of the tier that is computed from: of A's tokens before the prompt,
and of the first quarter and of all of the tokens after it, A's (beside) and the other's (behind).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from number_lists import parse_count

from infer.commands.measure import BENCH_TEXT
from infer.config import NO_PREFETCH, ModelConfig
from infer.daemon.daemon_process import EmbeddedDaemon
from infer.engine import Engine
from infer.session import Session
from shared.command import run_command
from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError
from shared.options import add_options, build, given

BEGIN_TOKENS = 16


@dataclass(frozen=True)
class Round:
    """Hit rates in percent; _begin: of the first quarter of the tokens."""

    before: float
    beside_begin: float
    beside: float
    behind_begin: float
    behind: float


class Chat:
    """Greedy tokens of one client, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0

    def begin(self, ids: Sequence[int]) -> None:
        self._engine.kv.truncate(0)
        self._next = int(self._engine.extend(ids).argmax())

    def decode(self, count: int) -> tuple[int, int]:
        """Hits and lookups of so many tokens."""
        hits, misses = self._engine.client.lookups
        for _ in range(count):
            self._next = int(self._engine.extend([self._next]).argmax())
        hits_after, misses_after = self._engine.client.lookups
        return hits_after - hits, hits_after - hits + misses_after - misses

    def rates(self, count: int) -> tuple[float, float]:
        """Of the first quarter of so many tokens, and of all of them."""
        begin, rest = self.decode(count // 4), self.decode(count - count // 4)
        return _rate(begin), _rate((begin[0] + rest[0], begin[1] + rest[1]))


def _rate(counted: tuple[int, int]) -> float:
    return 100 * counted[0] / max(1, counted[1])


def measure(config: ModelConfig, texts: Sequence[Sequence[int]], token_count: int) -> list[Round]:
    """A round for each of `texts`, on the daemon that `config` names."""
    rounds = []
    with Session(config) as first, Session(config) as second:
        chat, other = Chat(first.engine), Chat(second.engine)
        start = first.tokenizer.encode(BENCH_TEXT)[:BEGIN_TOKENS]
        for ids in texts:
            chat.begin(start)
            chat.decode(token_count // 2)
            before = _rate(chat.decode(token_count))
            other.begin(ids)
            beside = chat.rates(token_count)
            other.begin(ids)
            behind = other.rates(token_count)
            rounds.append(Round(before, *beside, *behind))
    return rounds


def _parts(path: Path, model: Path, name: str, count: int, length: int) -> list[list[int]]:
    with Session(ModelConfig(model=model, name=name)) as session:
        ids = session.tokenizer.encode(path.read_text(encoding="utf-8"))
    if len(ids) < count * length:
        raise ConfigError(
            f"{path} has {len(ids)} tokens, {count} prompts of {length} take {count * length}",
            "give a longer --file, or less --rounds or --prompt",
        )
    return [ids[number * length : (number + 1) * length] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    add_options(parser, DaemonOptions)
    parser.add_argument("--file", type=Path, required=True, metavar="TEXT")
    parser.add_argument("--prompt", type=parse_count, default=600, metavar="N", help="tokens")
    parser.add_argument("--rounds", type=parse_count, default=3, metavar="N")
    parser.add_argument(
        "--tokens", type=parse_count, default=200, metavar="N", help="decoded at a time"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    options = build(DaemonOptions, [("command line", given(arguments, DaemonOptions))])
    with ExitStack() as stack:
        daemon = EmbeddedDaemon(arguments.model, options, "measure-scan")
        stack.callback(daemon.close)
        daemon.wait_ready()
        texts = _parts(
            arguments.file, arguments.model, daemon.name, arguments.rounds, arguments.prompt
        )
        config = ModelConfig(
            model=arguments.model, name=daemon.name, device=options.device, prefetch=NO_PREFETCH
        )
        rounds = measure(config, texts, arguments.tokens)
    names = list(asdict(rounds[0]))
    means = {name: float(np.mean([getattr(one, name) for one in rounds])) for name in names}
    if arguments.json:
        print(json.dumps({"mean": means, "rounds": [asdict(one) for one in rounds]}))
        return
    for label, values in [*((str(n), asdict(r)) for n, r in enumerate(rounds)), ("mean", means)]:
        print(f"{label:>4}  " + "  ".join(f"{name} {values[name]:5.1f}" for name in names))


if __name__ == "__main__":
    sys.exit(run_command("measure_scan", main))
