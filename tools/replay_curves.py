"""Make the table that `streamd plan` predicts hit rates by: streamd/planning/hit_curves.csv.

    python tools/replay_curves.py qwen3-30b-a3b.route.csv gpt-oss-20b.npz --tokens 1000 \\
        > streamd/planning/hit_curves.csv

A trace's file is named after its model, as people are told which one a forecast comes from.

For each trace and pair of budgets, as shares of all experts, the share of the lookups that miss the
GPU's slots and of those that miss the host's too, both with the daemon's policy. The first half of
each trace only fills the caches.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from replay_simulation import make_policy, misses_of
from replay_traces import Group, Trace, load_trace

from shared.command import run_command

GPU_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.65)
HOST_SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
WARM_UP = 0.5
COLUMNS = ("trace", "top_k_share", "gpu_share", "host_share", "gpu_miss", "host_miss")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--tokens", type=int, default=0, help="of a long trace, only so many")
    arguments = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for path in arguments.traces:
        trace = load_trace(path, arguments.tokens)
        name = path.name.partition(".")[0]
        for row in curve(trace):
            writer.writerow((name, *(f"{number:.4f}" for number in row)))
            sys.stdout.flush()


def curve(trace: Trace) -> Iterator[tuple[float, ...]]:
    """Rows of the table, all but the name; a gpu_share of 0 is that there is no such tier."""
    top_k_share = len(trace.groups[-1][1]) / trace.n_experts
    lookup_count = _counted(trace.groups)
    for gpu_share in (0.0, *GPU_SHARES):
        level = trace
        if gpu_share:
            level = trace.with_groups(_missed(trace, gpu_share))
        gpu_miss = _counted(level.groups) / lookup_count
        for host_share in HOST_SHARES:
            host_miss = _counted(_missed(level, host_share)) / lookup_count
            yield top_k_share, gpu_share, host_share, gpu_miss, host_miss


def _missed(trace: Trace, share: float) -> tuple[Group, ...]:
    slot_count = int(share * trace.key_bytes.size)
    return tuple(misses_of(trace, slot_count, make_policy("lfu-ageing", trace, slot_count)))


def _counted(groups: tuple[Group, ...]) -> int:
    return sum(len(keys) for _, keys in groups[int(WARM_UP * len(groups)) :])


if __name__ == "__main__":
    sys.exit(run_command("replay_curves", main))
