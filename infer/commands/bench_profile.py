"""`infer bench --profile`: one more round, by part of the model."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from infer.engine import Engine
from infer.generation.decoding import Decoding
from infer.generation.sampler import Sampler
from infer.profiling.step_profile import Parts, StepProfile


def profile_round(
    engine: Engine, decoding: Decoding, prompt: list[int], token_count: int, greedy: Sampler
) -> dict[str, Any]:
    """For `prefill` and `decode`: wall_s, tokens, and parts_s, which add up to it."""
    profile = StepProfile(engine)

    def decode() -> None:
        for _ in range(token_count):
            decoding.take(decoding.draw(greedy), greedy)

    decoding.rewind(0)
    prefill = _timed(partial(profile.prefill, lambda: decoding.extend(prompt)))
    return {
        "prefill": {"tokens": len(prompt), **prefill},
        "decode": {
            "tokens": token_count,
            **_timed(partial(profile.decode, decode, decoding)),
        },
    }


def _timed(run: Callable[[], Parts]) -> dict[str, Any]:
    """The wall clock by another pair of looks at it than those that the parts are made of."""
    started_s = time.perf_counter()
    parts_s = run()
    return {"wall_s": time.perf_counter() - started_s, "parts_s": parts_s}


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """A table for people: milliseconds of the whole prompt, and of a token."""
    prefill, decode = profile["prefill"], profile["decode"]
    names = list(decode["parts_s"] | prefill["parts_s"])
    lines = [f"{'by part':20}{'ms a token':>12}{'':8}{'ms a prompt':>14}"]
    for name in [*names, "sum of parts", "wall clock"]:
        cells = [
            _cell(name, phase, count) for phase, count in ((decode, decode["tokens"]), (prefill, 1))
        ]
        lines.append(f"{name:20}{cells[0]}{cells[1]:>22}")
    return lines


def _cell(name: str, phase: dict[str, Any], count: int) -> str:
    parts_s, wall_s = phase["parts_s"], phase["wall_s"]
    totals = {"sum of parts": sum(parts_s.values()), "wall clock": wall_s}
    spent_s = totals.get(name, parts_s.get(name, 0.0))
    return f"{1e3 * spent_s / count:12.3f}{100 * spent_s / wall_s:7.1f}%"
