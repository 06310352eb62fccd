"""`streamd bench-io`, `streamd doctor` and `streamd scrub` on the terminal."""

import json
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

from shared.sizes import size_text
from shared.stats_view import duration
from streamd.commands.bench_io import ROW_SECONDS, Bench, choose_best
from streamd.commands.doctor import FAIL, examine, render
from streamd.commands.io_best import reads_of, save_best
from streamd.commands.scrub import scrub as read_whole
from streamd.readers.probe import AUTO, choose_engine

DISK_PROBE_SECONDS = 2.0
DISK_PROBE_DEPTH = 16

_HEAD = ("engine", "pattern", "depth", "pages", "MB/s", "CPU ms/GB", "p50 ms", "p99 ms")
_LINE = "{:<10} {:<11} {:>5} {:<24} {:>9} {:>10} {:>8} {:>8}"


def bench_io(model: Path, as_json: bool, row_seconds: float = ROW_SECONDS) -> int:
    """Measure all combinations, show them, and keep the best for such reads of this drive."""
    rows = []
    with ExitStack() as stack:
        bench = Bench(model, stack)
        combinations = bench.combinations()
        count = len(combinations)
        about = duration(count * row_seconds)
        print(f"{count} measurements of {row_seconds:g} s, about {about}", file=sys.stderr)
        if not as_json:
            print(_LINE.format(*_HEAD))
        for combination in combinations:
            row = bench.measure(*combination, row_seconds)
            rows.append(row)
            if not as_json:
                print(_LINE.format(*asdict(row).values()), flush=True)
            elif sys.stderr.isatty():
                print(f"\r{len(rows)} of {count} measured", end="", file=sys.stderr)
    if as_json and sys.stderr.isatty():
        print(file=sys.stderr)
    best = choose_best(rows)
    with suppress(OSError):
        save_best(reads_of(model, bench.experts), best)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "best": asdict(best)}))
    else:
        print(f"best: {best.engine} at depth {best.depth}, {best.mb_s:,.0f} MB/s")
    return 0


def scrub(model: Path, as_json: bool) -> int:
    """A line a file; 1 if any part of one could not be read."""
    started_s = shown_s = time.monotonic()

    def progress(read_bytes: int, all_bytes: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - shown_s >= 1:
            shown_s = now_s
            rate = read_bytes / (now_s - started_s)
            done = f"{size_text(read_bytes)} of {size_text(all_bytes)}, {rate / 1e6:,.0f} MB/s"
            print(f"\r{done}  ", end="", file=sys.stderr)

    failed = False
    for report in read_whole(model, progress):
        failed |= bool(report.error_count)
        if as_json:
            print(json.dumps(asdict(report) | {"path": str(report.path)}), flush=True)
            continue
        found = f"xxh3 {report.xxh3}" if report.xxh3 else f"{report.error_count} unreadable parts"
        print(f"{report.path}: {report.size_bytes:,} bytes, {found}", flush=True)
        for error in report.errors:
            print(f"  {error}")
    return int(failed)


def doctor(model: Path | None) -> int:
    """All findings; 1 if any is a failure."""
    failed = False
    for finding in examine(model, _probe_disk):
        print(render(finding), flush=True)
        failed |= finding.level == FAIL
    return int(failed)


def _probe_disk(model: Path) -> float:
    """Bytes a second of random slabs with the engine that would be used."""
    engine, _ = choose_engine(AUTO, 1)
    engine.close()
    with ExitStack() as stack:
        bench = Bench(model, stack, DISK_PROBE_DEPTH)
        pages = next(iter(bench.memories))
        row = bench.measure(engine.name, "slabs", pages, DISK_PROBE_DEPTH, DISK_PROBE_SECONDS)
    return row.mb_s * 1e6
