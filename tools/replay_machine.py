"""Replay routing traces through the two tiers of a machine: GPU slots over host slots.

    python tools/replay_machine.py TRACE... --experts 74G --gpu 5.5G --host 24G [--token 3.08G]

--experts, --token: what all experts of a model take, and those of one token. Each tier gets the
share of the trace's experts that its budget is of the model's. Bytes a token follow from the share
of the lookups that reach the disk or the bus.
"""

import argparse
import sys
from pathlib import Path

from replay_tiers import COPY_WEIGHT, MODES, TierCounts, TwoTiers
from replay_traces import load_trace

from shared.command import run_command
from shared.policy import HALF_LIFE_ROUNDS
from shared.sizes import parse_size

_HEAD = ("tiers", "policies", "read %", "H2D %", "D2H %", "read MB", "H2D MB", "D2H MB")
_LINE = "  {:<10} {:<21} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9}"


def main() -> None:
    arguments = _arguments()
    shares = arguments.gpu / arguments.experts, arguments.host / arguments.experts
    for path in arguments.traces:
        trace = load_trace(path, arguments.tokens)
        gpu_count, host_count = (max(1, int(share * trace.key_bytes.size)) for share in shares)
        print(f"{trace.name}: GPU {shares[0]:.1%}, host {shares[1]:.1%} of {trace.key_bytes.size}")
        print(_LINE.format(*_HEAD))
        for mode in MODES:
            for policies in arguments.policies if mode == "inclusive" else [_DEFAULT]:
                how = TwoTiers(
                    mode, policies, arguments.warm_up, arguments.half_life, arguments.copy_weight
                )
                counts = how.replay(trace, gpu_count, host_count)
                print(_line(mode, policies, counts, arguments.token), flush=True)


_DEFAULT = ("lfu-ageing", "lfu-ageing")


def _line(mode: str, policies: tuple[str, str], counts: TierCounts, token_bytes: int) -> str:
    shares = [counts.pct(n) for n in (counts.reads, counts.uploads, counts.write_backs)]
    sizes = [f"{share / 100 * token_bytes / 1e6:.1f}" if token_bytes else "" for share in shares]
    return _LINE.format(mode, "/".join(policies), *(f"{share:.2f}" for share in shares), *sizes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    for name in ("--experts", "--gpu", "--host"):
        parser.add_argument(name, type=parse_size, required=True, metavar="SIZE")
    parser.add_argument("--token", type=parse_size, default=0, metavar="SIZE")
    parser.add_argument(
        "--policies",
        type=_pairs,
        default=[_DEFAULT],
        metavar="GPU/HOST,...",
        help="of inclusive tiers, such as lru/lru,lfu-ageing/belady",
    )
    parser.add_argument("--warm-up", type=float, default=0.5, metavar="SHARE", help="not counted")
    parser.add_argument("--half-life", type=float, default=HALF_LIFE_ROUNDS, metavar="ROUNDS")
    parser.add_argument("--copy-weight", type=float, default=COPY_WEIGHT, metavar="SHARE")
    parser.add_argument("--tokens", type=int, default=0, help="of a long trace, only so many")
    return parser.parse_args()


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for word in text.split(","):
        gpu, _, host = word.partition("/")
        pairs.append((gpu, host or gpu))
    return pairs


if __name__ == "__main__":
    sys.exit(run_command("replay_machine", main))
