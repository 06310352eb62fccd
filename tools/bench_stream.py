"""How near decoding comes to what disk, PCIe and compute allow.

    python tools/bench_stream.py --model M.gguf --host-cache 2G [--gpu-cache 4G] [--io paced:7GB/s]
        [--arms off,auto,off,oracle] [--tokens 128] [--warmup 64] [--json FILE] [--csv FILE]

One daemon serves all arms, one after the other (A-B-A): settings of `--prefetch`, or `oracle`,
which is told what the first arm's routers chose; `+lane` behind one stands for `--compute-lane on`,
`+lane8` for eight threads of it (not behind `oracle`: last bits change, and so may the text). Each
arm decodes the same greedy text; the first tokens of it, --warmup, are not measured. The drive's
rate is measured before and after with bench-io's code, in the same process; a paced drive is as
fast as its pace at the most.

useful      bytes a token that its routers asked for: read, or uploaded, and not in vain
bound       the least of disk rate / useful read, PCIe rate / useful uploaded, 1 / compute time;
            with the lane, for the bus: (PCIe rate + CPU's) / (useful uploaded + computed bytes),
            the CPU's being computed bytes by the time in which it computed them
exposed     (time of a token - time at the bound) / layers with experts
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from bench_tables import print_table, write_csv, write_json
from stream_arms import ARM, ORACLE, ArmResult, Arms
from stream_rates import disk_rate_mb_s, pcie_rate_mb_s

from infer.config import AUTO_PREFETCH, NO_PREFETCH, ModelConfig
from infer.daemon.daemon_process import EmbeddedDaemon
from shared.command import run_command
from shared.daemon_options import DaemonOptions
from shared.options import add_options, build, given

SETTINGS = (NO_PREFETCH, AUTO_PREFETCH, "1", "2", "3", ORACLE)
SHOWN = (
    *("arm", "tps", "bound_tps", "ratio", "bound_by", "exposed_ms", "hit_rate"),
    *(
        "disk_mb",
        "useful_mb",
        "pcie_mb",
        "useful_pcie_mb",
        "lane_mb",
        "disk_busy",
        "pcie_busy",
        "compute_busy",
        "recall",
    ),
)


def main() -> None:
    arguments = _arguments()
    options = build(DaemonOptions, [("command line", given(arguments, DaemonOptions))])
    with ExitStack() as stack:
        disk_before = disk_rate_mb_s(arguments.model, options.io)
        daemon = EmbeddedDaemon(arguments.model, options, "bench-stream")
        stack.callback(daemon.close)
        daemon.wait_ready()
        config = ModelConfig(model=arguments.model, name=daemon.name, device=options.device)
        arms = Arms(config, arguments.prompt, arguments.warmup, arguments.tokens)
        measured = [arms.run(name) for name in arguments.arms]
        disk_after = disk_rate_mb_s(arguments.model, options.io)
    disk = (disk_before + disk_after) / 2
    pcie = pcie_rate_mb_s(arms.device, options.upload_pace)
    rows = [arm.judged(disk, pcie) for arm in measured]
    _print(rows, disk_before, disk_after, pcie)
    if arguments.json:
        head = {"disk_mb_s": [disk_before, disk_after], "pcie_mb_s": pcie}
        write_json(arguments.json, head, "arms", rows)
    if arguments.csv:
        write_csv(arguments.csv, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    add_options(parser, DaemonOptions)
    parser.add_argument("--arms", default="off,auto,off,oracle", help="in this order")
    parser.add_argument("--prompt", type=int, default=16, metavar="N", help="tokens")
    parser.add_argument("--warmup", type=int, default=64, metavar="N", help="tokens")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="measured")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    arguments.arms = arguments.arms.split(",")
    for arm in arguments.arms:
        parts = ARM.fullmatch(arm)
        if parts is None or parts["prefetch"] not in SETTINGS or arm.startswith(f"{ORACLE}+"):
            parser.error(f"unknown arm {arm}: choose of {', '.join(SETTINGS)}, or SETTING+lane")
    if min(arguments.tokens, arguments.prompt) < 1 or arguments.warmup < 0:
        parser.error("--tokens and --prompt are 1 or more, --warmup 0 or more")
    if ORACLE in arguments.arms and arguments.arms[0] == ORACLE:
        parser.error("the oracle has to be told by another arm: put one before it")
    return arguments


def _print(
    rows: list[ArmResult], disk_before: float, disk_after: float, pcie: float | None
) -> None:
    print(f"disk {disk_before:.0f} MB/s before, {disk_after:.0f} after", end="")
    print(f"; PCIe {pcie:.0f} MB/s" if pcie else "")
    print_table(rows, SHOWN)
    for row in rows:
        for counters in filter(None, (row.prefetch, row.lane)):
            print(f"{row.arm}: {json.dumps(counters)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_command("bench_stream", main))
