"""Replay routing traces through eviction policies, the daemon's own among them.

    python tools/replay.py TRACE... [--policies lru,lfu-ageing,belady] [--shares 0.1,0.2,0.4]
    python tools/replay.py TRACE --budgets-mib 250,1000 [--csv FILE] [--plot FILE.png]

A budget is a share of all experts' bytes, or MiB. Hit rates are of lookups, in percent. Two tiers:
tools/replay_machine.py.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from replay_simulation import POLICIES, Result, make_policy, simulate, simulate_by_layer
from replay_traces import Trace, load_trace

from shared.command import run_command
from shared.errors import ConfigError
from shared.policy import HALF_LIFE_ROUNDS

Point = tuple[str, float, str, Result]  # trace, budget in MiB, policy, result


def main() -> None:
    arguments = _arguments()
    points = []
    for path in arguments.traces:
        trace = load_trace(path, arguments.tokens)
        print(f"{trace.name}: {trace.lookup_count} lookups, {trace.key_bytes.size} experts")
        for point in _replay(trace, arguments):
            points.append(point)
            _, budget_mib, policy, result = point
            read_mib = result.read_bytes / 2**20
            print(
                f"  {_budget(trace, budget_mib)}  {policy:<11} {result.hit_pct:6.2f}%"
                f"  decode {result.decode_hit_pct:6.2f}%  read {read_mib:10.1f} MiB",
                flush=True,
            )
        _print_gaps(trace, [point for point in points if point[0] == trace.name])
    if arguments.csv:
        _write_csv(arguments.csv, points)
    if arguments.plot:
        _plot(arguments.plot, points)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B")
    parser.add_argument(
        "--shares", type=_shares, default="0.1,0.2,0.4,0.6,0.8", metavar="S,T", help="0 to 1 each"
    )
    parser.add_argument("--budgets-mib", type=_numbers, metavar="M,N", help="instead of --shares")
    parser.add_argument("--per-layer", action="store_true", help="a cache for each layer")
    parser.add_argument(
        "--warm-up", type=float, default=0.0, metavar="SHARE", help="of the trace, not counted"
    )
    parser.add_argument("--half-life", type=float, default=HALF_LIFE_ROUNDS, metavar="ROUNDS")
    parser.add_argument("--tokens", type=int, default=0, help="of a long trace, only so many")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    """Of a list such as 250,1000: budgets of more than nothing."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{text!r} is no list of budgets", "give numbers above 0 such as 0.1,0.2")
    return numbers


def _shares(text: str) -> list[float]:
    shares = _numbers(text)
    if max(shares) > 1:
        raise ConfigError(
            f"--shares {text}: {max(shares):.0%} is more than all experts take",
            "give shares from 0 to 1 such as 0.1,0.2, or MiB with --budgets-mib",
        )
    return shares


def _replay(trace: Trace, arguments: argparse.Namespace) -> Iterator[Point]:
    total_bytes = int(trace.key_bytes.sum())
    if arguments.budgets_mib:
        budgets = [int(mib * 2**20) for mib in arguments.budgets_mib]
    else:
        budgets = [int(share * total_bytes) for share in arguments.shares]
    for budget_bytes in budgets:
        capacity_count = max(1, int(trace.key_bytes.size * budget_bytes / total_bytes))
        for name in arguments.policies.split(","):
            if arguments.per_layer:
                result = simulate_by_layer(
                    trace, budget_bytes, name, arguments.half_life, arguments.warm_up
                )
            else:
                policy = make_policy(name, trace, capacity_count, arguments.half_life)
                result = simulate(trace, budget_bytes, policy, arguments.warm_up)
            yield trace.name, budget_bytes / 2**20, name, result


def _budget(trace: Trace, budget_mib: float) -> str:
    """As a share of all experts, and in MiB; traces without sizes have a byte an expert."""
    return f"{budget_mib * 2**20 / int(trace.key_bytes.sum()):6.1%} {budget_mib:10.1f} MiB"


def _print_gaps(trace: Trace, points: list[Point]) -> None:
    """The best policy that does not know the future, beside the one that does."""
    for budget_mib in sorted({point[1] for point in points}):
        hits = {policy: result.hit_pct for _, at, policy, result in points if at == budget_mib}
        if "belady" not in hits or len(hits) == 1:
            continue
        bound = hits.pop("belady")
        best = max(hits, key=lambda policy: hits[policy])
        print(
            f"  {_budget(trace, budget_mib)}  best: {best} {hits[best]:.2f}%, belady {bound:.2f}%,"
            f" {bound - hits[best]:.2f} points apart"
        )


def _write_csv(path: Path, points: list[Point]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("trace", "budget_mib", "policy", "hit_pct", "hit_pct_decode", "read_mib"))
        for name, budget_mib, policy, result in points:
            writer.writerow(
                (
                    *(name, f"{budget_mib:.3f}", policy, f"{result.hit_pct:.3f}"),
                    *(f"{result.decode_hit_pct:.3f}", f"{result.read_bytes / 2**20:.1f}"),
                )
            )


def _plot(path: Path, points: list[Point]) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - only for those who plot
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    names = sorted({point[0] for point in points})
    figure = Figure(figsize=(6 * len(names), 4.5))
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), number)
        for policy in sorted({point[2] for point in points}):
            mine = [p for p in points if p[0] == name and p[2] == policy]
            axes.plot([p[1] for p in mine], [p[3].hit_pct for p in mine], "o-", label=policy)
        axes.set(title=name, xlabel="budget, MiB", ylabel="hits, % of lookups")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run_command("replay", main))
