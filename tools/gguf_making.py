"""Make a GGUF file from outputs: choose, show what will be, write with progress, go on later."""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_importance import Importance
from gguf_layout import TensorPlan, layout
from gguf_quantize import quantize, type_name
from gguf_types import Choice, matrix_count
from gguf_writing import ResumableFile
from numpy.typing import NDArray

from shared.errors import ConfigError, MalformedModel

BLOCK_BYTES = 64 << 20  # of float32 weights in memory at once
_SHOW_EVERY_S = 0.2

LoadRows = Callable[[int, int, int], NDArray[np.float32]]


@dataclass(frozen=True)
class Output:
    """A tensor to be written; `produce` gives its bytes in pieces."""

    plan: TensorPlan
    note: str
    produce: Callable[[], Iterator[NDArray[np.uint8]]]


def quantised(
    name: str, shape: tuple[int, ...], choice: Choice, load: LoadRows, matrix: Importance | None
) -> Output:
    """`load(matrix, first row, last row)` gives float32 [rows, columns] of one expert or head."""
    rows = shape[1] if len(shape) > 1 else 1
    block_rows = max(1, BLOCK_BYTES // (4 * shape[0]))

    def produce() -> Iterator[NDArray[np.uint8]]:
        matrices = matrix_count(shape)
        weights = matrix.columns(name, shape[0], matrices) if matrix else None
        for number in range(matrices):
            own = None if weights is None else weights[number]
            for first in range(0, rows, block_rows):
                part = load(number, first, min(first + block_rows, rows))
                try:
                    yield quantize(part, choice.type_id, own)
                except MalformedModel as error:
                    raise MalformedModel(f"{name}: {error.message}", error.remedy) from error

    return Output(TensorPlan(name, shape, choice.type_id), choice.note, produce)


def add_output_options(parser: argparse.ArgumentParser, *, resumable: bool = True) -> None:
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--dry-run", action="store_true", help="show the tensors, write nothing")
    parser.add_argument("--force", action="store_true", help="replace FILE.gguf where it exists")
    if not resumable:
        return
    parser.add_argument(
        "--restart", action="store_true", help="do not go on with an interrupted run's FILE.part"
    )


def make(
    arguments: argparse.Namespace,
    metadata: Mapping[str, Any],
    outputs: Sequence[Output],
    sources: Sequence[Path],
) -> None:
    """Write `arguments.out`, or only show it; ConfigError where it exists or is a source."""
    plans = [output.plan for output in outputs]
    if arguments.dry_run:
        show(metadata, plans, [output.note for output in outputs])
        return
    out = check_out(arguments, sources)
    for note, count in _notes(outputs).items():
        print(f"{count} tensors: {note}", file=sys.stderr)
    origins = [output.note for output in outputs]
    resumed = {"origins": origins, "restart": arguments.restart}
    with ResumableFile(out, metadata, plans, sources, **resumed) as file:
        if file.next_tensor:
            print(f"going on after {file.next_tensor} of {len(plans)} tensors", file=sys.stderr)
        progress = Progress(plans, file.next_tensor)
        try:
            for output in outputs[file.next_tensor :]:
                file.write(progress.watch(output))
        except KeyboardInterrupt:
            progress.clear()
            print("interrupted; the same command goes on from here", file=sys.stderr)
            raise
        file.finish()
    progress.clear()
    print(f"{out}: {summary(metadata, plans)}", file=sys.stderr)


def check_out(arguments: argparse.Namespace, sources: Sequence[Path]) -> Path:
    """Where to write; ConfigError where it exists, is a source or cannot be."""
    out: Path = arguments.out
    if any(out.exists() and out.samefile(source) for source in sources):
        raise ConfigError(f"{out} is one of the sources", "give another --out")
    if out.exists() and not arguments.force:
        raise ConfigError(f"{out} exists", "give another --out, or --force to replace it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.parent} is no directory", "make it, or give another --out")
    return out


def show(metadata: Mapping[str, Any], plans: Sequence[TensorPlan], notes: Sequence[str]) -> None:
    """What a dry run prints."""
    for plan, note in zip(plans, notes, strict=True):
        shape = " x ".join(map(str, plan.shape))
        print(f"{plan.name:44} {shape:24} {type_name(plan.type_id):8} {note}".rstrip())
    print(summary(metadata, plans))


def summary(metadata: Mapping[str, Any], plans: Sequence[TensorPlan]) -> str:
    sizes: defaultdict[str, int] = defaultdict(int)
    for plan in plans:
        sizes[type_name(plan.type_id)] += plan.byte_count
    mix = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in sorted(sizes.items()))
    return f"{len(plans)} tensors, {layout(metadata, plans).total_bytes / 1e9:.3f} GB ({mix})"


def _notes(outputs: Sequence[Output]) -> dict[str, int]:
    """note: how many tensors have it"""
    counts: defaultdict[str, int] = defaultdict(int)
    for output in outputs:
        if output.note:
            counts[f"{output.note}: {type_name(output.plan.type_id)}"] += 1
    return counts


class Progress:
    """One line on a terminal that is written over; nothing elsewhere."""

    def __init__(self, plans: Sequence[TensorPlan], first: int) -> None:
        self._total_bytes = sum(plan.byte_count for plan in plans[first:])
        self._done_bytes = 0
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def watch(self, output: Output) -> Iterator[NDArray[np.uint8]]:
        """The output's pieces, counted as they are taken."""
        for piece in output.produce():
            self._show(output.plan.name)
            yield piece
            self._done_bytes += piece.nbytes

    def _show(self, name: str) -> None:
        now_s = time.monotonic()
        if not self._terminal or now_s - self._shown_s < _SHOW_EVERY_S:
            return
        self._shown_s = now_s
        rate = self._done_bytes / max(now_s - self._started_s, 1e-9)
        left_s = (self._total_bytes - self._done_bytes) / max(rate, 1.0)
        text = (
            f"{self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB,"
            f" {rate / 1e6:.1f} MB/s, {left_s / 60:.0f} min left  {name}"
        )
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
