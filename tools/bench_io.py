"""streamd's reader against fio and the page cache: the same reads of one file, in turn.

    python tools/bench_io.py --file model.gguf                 everything, about 6 minutes
    python tools/bench_io.py --dir /data fio --rounds 3        with an 8 GB file that it removes

fio         our reader and fio, at each depth, with and without registered buffers
registered  what registering buffers saves, for each kind of pages
pieces      neighbouring experts one by one, or merged into larger reads
cache       through the page cache: what is in it, and what has to come from the disk

Reads are of 1,622,016 bytes, an IQ2_XXS part of a Hy3 expert. Figures are medians over the rounds;
the contenders of a table take turns, so that a disk shared with others treats all the same. A run
is memory that lies side by side: the drive's driver cuts a read wherever one ends. fio is Debian's
(apt-get install fio).

Under the first table stand two ratios of our reader, as the daemon uses it, to that row of fio's
whose median is the highest. Paired: the median of the rounds' own ratios. A disk that is shared
gives half or double from one second to the next, and what lies close together is alike: this is
the one to go by. Of medians: the two rows' figures, divided.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from bench_io_runs import KINDS, CachedRun, FioRun, ReaderRun, Reads, Result, Run, run_apart

from streamd.readers.probe import AUTO, ENGINES, choose_engine
from streamd.readers.reader import PIECE_BYTES

PART_BYTES = 1_622_016
MERGED_EXPERTS = 192
MIDDLE_DEPTH = 16
CACHED_BYTES = 1 << 30
AS_USED = "reader, as the daemon uses it"
PARTS = ("fio", "registered", "pieces", "cache")


class Bench:
    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.size_bytes = path.stat().st_size
        self.random = random.Random(options.seed)
        self.engine = options.engine

    def table(self, title: str, runs: dict[str, tuple[Run, Reads]]) -> dict[str, list[Result]]:
        """Each run once a round; prints the medians, returns the rounds."""
        results: dict[str, list[Result]] = {label: [] for label in runs}
        for _ in range(self.options.rounds):
            for label, (run, reads) in runs.items():
                results[label].append(run_apart(run, reads))
        print(
            f"\n{title}\n{'':<44} {'MB/s':>7} {'CPU ms/GB':>10} {'MB in flight':>13}"
            f" {'KiB a run':>10}"
        )
        for label, of_run in results.items():
            result = _median(of_run)
            in_flight = f"{result.mean_in_flight_bytes / 1e6:.1f}"
            print(
                f"{label:<44} {result.mb_s:>7.0f} {result.cpu_ms_per_gb:>10.1f}"
                f" {in_flight:>13} {result.run_bytes / 1024:>10.0f}",
                flush=True,
            )
        return results

    def at_random(self, size_bytes: int = PART_BYTES, within_bytes: int = 0) -> Reads:
        within_bytes = within_bytes or self.size_bytes
        count = self.options.mb * 10**6 // size_bytes
        last = (within_bytes - size_bytes) // 4096
        offsets = tuple(self.random.randrange(last) * 4096 for _ in range(count))
        return Reads(self.path, size_bytes, offsets)

    def in_order(self, size_bytes: int) -> Reads:
        """All of an expert tensor from front to back, then all of another one."""
        tensor_bytes = MERGED_EXPERTS * PART_BYTES
        rng = random.Random(self.options.seed)  # the same tensors whatever the size of the reads
        offsets: list[int] = []
        while len(offsets) * size_bytes < self.options.mb * 10**6:
            start = rng.randrange((self.size_bytes - tensor_bytes) // 4096) * 4096
            offsets += range(start, start + tensor_bytes - size_bytes + 1, size_bytes)
        return Reads(self.path, size_bytes, tuple(offsets))

    def fio(self) -> None:
        for kind in self.options.pages:
            reads = self.at_random()
            runs: dict[str, tuple[Run, Reads]] = {AS_USED: (ReaderRun(self.engine, kind, 0), reads)}
            for depth in self.options.depths:
                runs |= {
                    f"reader, depth {depth}": (ReaderRun(self.engine, kind, depth), reads),
                    f"fio, depth {depth}": (FioRun(kind, depth), reads),
                    f"fio --fixedbufs, depth {depth}": (FioRun(kind, depth, True), reads),
                }
            print(_ratios(self.table(f"{self.engine} against fio, memory {kind}", runs)))

    def registered(self) -> None:
        reads = self.at_random()
        runs: dict[str, tuple[Run, Reads]] = {}
        for kind in self.options.pages:
            for registered in (False, True):
                label = f"{kind}, {'registered' if registered else 'plain'}"
                runs[label] = ReaderRun(self.engine, kind, MIDDLE_DEPTH, registered), reads
        self.table(f"registered buffers, {self.engine}, depth {MIDDLE_DEPTH}", runs)

    def pieces(self) -> None:
        merged_depth = round(MIDDLE_DEPTH * PART_BYTES / PIECE_BYTES)
        for kind in self.options.pages:
            one = ReaderRun(self.engine, kind, MIDDLE_DEPTH)
            merged = ReaderRun(self.engine, kind, merged_depth)
            self.table(
                f"merging neighbours at equal bytes in flight, memory {kind}",
                {
                    f"1.6 MB at random, depth {MIDDLE_DEPTH}": (one, self.at_random()),
                    f"1.6 MB in order, depth {MIDDLE_DEPTH}": (one, self.in_order(PART_BYTES)),
                    f"3.9 MB in order, depth {merged_depth}": (merged, self.in_order(PIECE_BYTES)),
                },
            )

    def cache(self) -> None:
        reads = self.at_random()
        in_cache = self.at_random(within_bytes=min(CACHED_BYTES, self.size_bytes))
        runs: dict[str, tuple[Run, Reads]] = {
            "preads of what is in the page cache": (CachedRun(self.options.pages[0]), in_cache)
        }
        for kind in self.options.pages:
            direct = ReaderRun(self.engine, kind, MIDDLE_DEPTH)
            buffered = ReaderRun(self.engine, kind, MIDDLE_DEPTH, direct=False)
            runs |= {
                f"{kind}: direct": (direct, reads),
                f"{kind}: buffered, from the disk": (buffered, reads),
            }
        self.table(f"the page cache, {self.engine}, depth {MIDDLE_DEPTH}", runs)


def _ratios(results: dict[str, list[Result]]) -> str:
    """Of our reader's rate to that of fio's best row."""
    medians = {label: _median(of_run).mb_s for label, of_run in results.items()}
    best = max((label for label in results if "fio" in label), key=medians.__getitem__)
    rounds = zip(results[AS_USED], results[best], strict=True)
    paired = sorted(own.mb_s / other.mb_s for own, other in rounds)
    return (
        f"{AS_USED} : {best} = paired {statistics.median(paired):.3f}"
        f" ({paired[0]:.3f} to {paired[-1]:.3f}), of medians {medians[AS_USED] / medians[best]:.3f}"
    )


def _median(results: list[Result]) -> Result:
    def middle(values: Iterator[float]) -> float:
        return statistics.median(values)

    return Result(
        middle(result.mb_s for result in results),
        middle(result.cpu_ms_per_gb for result in results),
        middle(result.mean_in_flight_bytes for result in results),
        middle(result.run_bytes for result in results),
    )


@contextmanager
def _random_file(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A file that no drive can compress, gone afterwards."""
    rng = np.random.Generator(np.random.SFC64(1))
    with tempfile.NamedTemporaryFile(dir=directory, prefix="bench-io-") as file:
        for _ in range(-(-size_bytes // PIECE_BYTES)):
            file.write(rng.bytes(PIECE_BYTES))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield Path(file.name)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--file", type=Path, help="read this one; of at least 2 GB")
    parser.add_argument("--dir", type=Path, default=Path(), help="where to make one instead")
    parser.add_argument("--gb", type=float, default=8.0, help="size of a file that is made")
    parser.add_argument("--engine", choices=(AUTO, *ENGINES), default=AUTO)
    parser.add_argument("--pages", choices=KINDS, action="append", help="default: the private ones")
    parser.add_argument("--depths", type=_numbers, default=[1, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=2000, help="read in each run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    if "fio" in parts and shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio, or leave that part out")
    options.pages = options.pages or list(KINDS[:2])
    engine, report = choose_engine(options.engine, 1)
    engine.close()
    options.engine = engine.name
    print("\n".join(report))
    print("load average:", *os.getloadavg())
    with (
        _random_file(options.dir, int(options.gb * 1e9))
        if options.file is None
        else (_given(options.file)) as path
    ):
        bench = Bench(path, options)
        for part in parts:
            getattr(bench, part)()
    print("\nload average:", *os.getloadavg())


@contextmanager
def _given(path: Path) -> Iterator[Path]:
    yield path


if __name__ == "__main__":
    main()
