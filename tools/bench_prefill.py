"""How near prompts come to what disk, PCIe and compute allow, and whether experts are read once.

    python tools/bench_prefill.py --model M.gguf --host-cache 4800M [--gpu-cache 1G]
        [--io paced:7GB/s:pread] [--upload-pace 13GB/s] [--prompts 200,600,2000,8000] [--count 2]
        [--json FILE] [--csv FILE]

One daemon with the given options computes random prompts of each length; then another one without
paces, whose caches are as large as the machine allows, computes them again, twice each: the second
time everything is in place, and that is what computing takes (`-` where not all of it fitted).

experts   that a prompt touched, counted once a layer and chunk; absent: those to be waited for
reads     slabs read from the drive, uploads: that went to the GPU, for each of these experts
bound     the least of disk rate / bytes read, PCIe rate / bytes uploaded, and computing
peak      memory of the daemon, of the client, of the GPU, the plan's beside it

The plan's host memory is the daemon's: slots, resident tensors and its process. No plan has the
client's, which is mostly Python and torch.
"""

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_tables import print_table, write_csv, write_json
from device_memory import DeviceMemory
from number_lists import parse_count, parse_counts
from prefill_runs import PromptResult, Prompts, peak_rss_bytes, plan_of, session_on
from stream_rates import disk_rate_mb_s, pcie_rate_mb_s

from shared.command import run_command
from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError
from shared.io_choice import IoChoice, Rate
from shared.options import add_options, build, given

LENGTHS = "200,600,2000,8000"
SHOWN = (
    *("tokens", "chunk", "tps", "bound_tps", "ratio", "bound_by", "compute_tps"),
    *("experts", "absent", "reads_per_expert", "uploads_per_expert", "disk_mb", "pcie_mb"),
)
# Cached keys and values behind the longest prompt.
ROOM_TOKENS = 16


@dataclass(frozen=True)
class Memory:
    """Peaks and what the plan said, bytes; gpu_peak is None without one."""

    daemon_peak_bytes: int
    client_peak_bytes: int
    host_planned_bytes: int
    gpu_peak_bytes: int | None
    gpu_planned_bytes: int | None


def main() -> None:
    arguments = _arguments()
    options = build(DaemonOptions, [("command line", given(arguments, DaemonOptions))])
    lengths = arguments.prompts
    options = replace(options, ctx=options.ctx or max(lengths) + ROOM_TOKENS)
    prompts = Prompts(lengths, arguments.count)
    disk = disk_rate_mb_s(arguments.model, options.io)
    plan = plan_of(arguments.model, options)
    with (
        DeviceMemory(options.gpu_ordinal if plan["gpu"] else None) as gpu_memory,
        session_on(arguments.model, options, "bench-prefill") as (session, pid),
    ):
        results = prompts.measure(session.engine, in_place=False)
        device, chunk = session.engine.device, session.engine.chunk
        daemon_peak, client_peak = peak_rss_bytes(pid), peak_rss_bytes(os.getpid())
    pcie = pcie_rate_mb_s(device, options.upload_pace)
    compute = _computing(arguments.model, options, prompts, chunk)
    rows = [
        result.judged(disk, pcie, one.tps if one is not None and not one.absent else None)
        for result, one in zip(results, compute, strict=True)
    ]
    memory = Memory(
        daemon_peak,
        client_peak,
        plan["host_bytes"] + plan["host_resident_bytes"] + plan["process_bytes"],
        gpu_memory.peak_bytes,
        _gpu_planned_bytes(plan) if plan["gpu"] else None,
    )
    _print(rows, memory, disk, pcie)
    _write(arguments, rows, memory, disk, pcie)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE.gguf")
    add_options(parser, DaemonOptions)
    parser.add_argument(
        "--prompts", type=parse_counts, default=LENGTHS, metavar="N,...", help="tokens of each"
    )
    parser.add_argument(
        "--count", type=parse_count, default=2, metavar="N", help="prompts of each length"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    return parser.parse_args()


def _gpu_planned_bytes(plan: dict[str, Any]) -> int:
    names = ("daemon_context", "client_context", "reserve", "taken", "buffers")
    return sum(int(plan["gpu"][f"{name}_bytes"]) for name in names)


def _computing(
    model: Path, options: DaemonOptions, prompts: Prompts, chunk: int
) -> list[PromptResult | None]:
    """The same prompts with all of the experts in place; None for all where that cannot be."""
    ample = replace(
        options,
        host_cache=None,
        gpu_cache=0 if options.gpu_cache == 0 else None,
        vram=None,
        io=IoChoice(),
        upload_pace=Rate(0),
        chunk=chunk,
    )
    try:
        with session_on(model, ample, "bench-compute") as (session, _):
            return [*prompts.measure(session.engine, in_place=True)]
    except ConfigError as error:
        print(f"bench_prefill: computing is not measured: {error}", file=sys.stderr)
        return [None] * len(prompts.lengths)


def _print(rows: list[PromptResult], memory: Memory, disk: float, pcie: float | None) -> None:
    print(f"disk {disk:.0f} MB/s" + (f"; PCIe {pcie:.0f} MB/s" if pcie else ""))
    print_table(rows, SHOWN)
    for name, value in asdict(memory).items():
        if value is not None:
            print(f"{name.removesuffix('_bytes'):>14} {value / 2**20:9,.0f} MiB")


def _write(
    arguments: argparse.Namespace,
    rows: list[PromptResult],
    memory: Memory,
    disk: float,
    pcie: float | None,
) -> None:
    if arguments.json:
        head = {"disk_mb_s": disk, "pcie_mb_s": pcie, "memory": asdict(memory)}
        write_json(arguments.json, head, "prompts", rows)
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    sys.exit(run_command("bench_prefill", main))
