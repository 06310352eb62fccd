"""A prompt computed at once has the logits of its tokens decoded one by one, at any budget.

    python tools/check_prefill.py [--device cuda:0] [--lengths 1,2,7,33,129,600,2047]
        [--shares 0,0.3,1] [--model FILE.gguf]... [--tolerance 1e-4] [--json FILE]

Under --exact, through a daemon, for small random models of both families unless --model names
others. One run token by token, with a slot for each expert, serves all lengths: their prompts
begin it. A share is of the bytes that all experts take, in each tier, and no less than its floor;
at each, a prompt is computed in chunks as long as memory allows, and in chunks of 64. On a GPU the
tolerance is 1e-3. Ends with 1 if a difference is larger.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf_factory import hy3_model
from gguf_glm import glm_model
from number_lists import parse_counts, parse_shares
from prefill_runs import plan_of, session_on

from infer.engine import Engine
from shared.command import run_command
from shared.daemon_options import CPU, DaemonOptions, parse_device
from shared.errors import RequestError

LENGTHS = "1,2,7,33,129,600,2047"
SHARES = "0,0.3,1"
SHORT_CHUNK = 64
EXPERTS = 24  # of small models: more than their floors hold
TOLERANCE, GPU_TOLERANCE = 1e-4, 1e-3

Logits = npt.NDArray[np.float32]  # [tokens, vocab]


@dataclass(frozen=True)
class Check:
    """The largest difference of any logit; evictions: of the tier that was computed from."""

    model: str
    share: float
    chunk: int
    tokens: int
    difference: float
    evictions: int


def check(
    model: Path, device: str, lengths: Sequence[int], shares: Sequence[float]
) -> Iterator[Check]:
    options = DaemonOptions(device=device, ctx=max(lengths))
    with _session(model, replace(options, chunk=1), 1.0) as engine:
        ids = np.random.default_rng(7).integers(0, engine.shape.vocab_size, max(lengths)).tolist()
        stepped: Logits = engine.logits(ids)
    for share in shares:
        for chunk in (None, SHORT_CHUNK):
            with _session(model, replace(options, chunk=chunk), share) as engine:
                for count in lengths:
                    engine.kv.truncate(0)
                    rows = engine.logits(ids[:count])
                    difference = float(np.abs(rows - stepped[:count]).max())
                    slots = engine.client.tier_values(engine.client.stats())
                    evictions = slots["evictions"]
                    size = min(count, engine.logits_chunk)
                    yield Check(model.name, share, size, count, difference, evictions)


def worst_of(checks: Sequence[Check]) -> float:
    """The largest difference; NaN if any is."""
    return float(np.max([one.difference for one in checks]))


@contextmanager
def _session(model: Path, options: DaemonOptions, share: float) -> Iterator[Engine]:
    """share: of the experts' bytes, in each tier."""
    plan = plan_of(model, options)
    budget = {"host_cache": _budget(plan, share)}
    if options.device != CPU:
        budget["gpu_cache"] = _budget(plan["gpu"], share)
    with session_on(model, replace(options, **budget), "check-prefill", exact=True) as (session, _):
        yield session.engine


def _budget(tier: dict[str, int], share: float) -> int:
    return max(tier["floor_bytes"], int(share * tier["full_bytes"]))


@contextmanager
def _models(given: Sequence[Path], context: int) -> Iterator[list[Path]]:
    """Those that are given, else a small one of each family. On the disk: it must do direct I/O."""
    if given:
        yield list(given)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        made = [hy3_model(n_experts=EXPERTS), glm_model(n_experts=EXPERTS)]
        for model in made:
            model.metadata[f"{model.architecture}.context_length"] = context
        yield [one.write(Path(directory, f"{one.architecture}.gguf")) for one in made]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", metavar="FILE.gguf")
    parser.add_argument("--device", type=parse_device, default=CPU)
    parser.add_argument("--lengths", type=parse_counts, default=LENGTHS, help="tokens")
    parser.add_argument("--shares", type=parse_shares, default=SHARES)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    tolerance = arguments.tolerance
    if tolerance is None:
        tolerance = TOLERANCE if arguments.device == CPU else GPU_TOLERANCE
    checks = []
    with _models(arguments.model or (), max(arguments.lengths)) as models:
        for model in models:
            for one in check(model, arguments.device, arguments.lengths, arguments.shares):
                checks.append(one)
                print(
                    f"{one.model:<12} share {one.share:<4} chunk {one.chunk:<5} {one.tokens:>5}"
                    f" tokens  {one.difference:.2e}  {one.evictions} evictions so far",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in checks], indent=1) + "\n")
    worst = worst_of(checks)
    print(f"the largest difference is {worst:.2e}; allowed are {tolerance:.0e}")
    if not worst <= tolerance:
        raise RequestError("prompts are not what their tokens are", "see the lines above")


if __name__ == "__main__":
    sys.exit(run_command("check_prefill", main))
