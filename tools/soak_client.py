"""The soak's clients, one a process: they work without a pause and say how long requests took.

    soak_client.py chat MODEL NAME DEVICE         greedy answers in turn; a token is a request
    soak_client.py read MODEL NAME DEVICE SEED    a section of random experts is one

A line of JSON for each line on stdin: the requests since the last one.
"""

import json
import math
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from infer.daemon.client import SlotClient
from shared.daemon_options import CPU
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import GPU_TIER, HOST_TIER

PROMPT = "Which is the largest planet in the solar system?"
TOKEN_COUNT = 64
# Latencies are counted by size, from a microsecond on, each size so much larger than the last one:
# a list of them would be a leak of our own.
SHORTEST_S = 1e-6
STEP = 1.02
STEP_COUNT = 1200

Work = Callable[["Latencies"], None]


class Latencies:
    def __init__(self) -> None:
        self._counts = np.zeros(STEP_COUNT, np.int64)

    def add(self, took_s: float) -> None:
        step = int(math.log(max(took_s / SHORTEST_S, 1.0), STEP))
        self._counts[min(step, STEP_COUNT - 1)] += 1

    def take(self) -> dict[str, float]:
        """What has been added since the last time: how many, and quantiles in milliseconds."""
        count = int(self._counts.sum())
        ends = np.cumsum(self._counts)
        values = {"requests": float(count)}
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
            step = int(np.searchsorted(ends, share * count))
            values[name] = 1000 * SHORTEST_S * STEP ** (step + 0.5) if count else math.nan
        self._counts[:] = 0
        return values


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def asked() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def work_until_the_end(work: Callable[[Latencies], None]) -> None:
    """`work` is done again and again; it ends early when something is asked."""
    latencies = Latencies()
    work(latencies)
    say(ready=True)
    latencies.take()
    while True:
        work(latencies)
        if asked():
            if not sys.stdin.readline():
                return
            say(**latencies.take())


def chat(model: Path, name: str, device: str) -> None:
    from infer.config import ModelConfig  # noqa: PLC0415 - the other client starts without torch
    from infer.session import Session  # noqa: PLC0415

    config = ModelConfig(model=model, name=name, device=device, threads=1)
    with Session(config) as session:
        prompt = session.tokenizer.encode(PROMPT)
        engine = session.engine

        def answer(latencies: Latencies) -> None:
            engine.kv.truncate(0)
            token = int(engine.extend(prompt).argmax())
            for _ in range(TOKEN_COUNT):
                started_s = time.perf_counter()
                token = int(engine.extend([token]).argmax())
                latencies.add(time.perf_counter() - started_s)
                if asked():
                    return

        work_until_the_end(answer)


def read(model: Path, name: str, device: str, seed: int) -> None:
    index = GgufIndex.open(model)
    experts = ExpertIndex.from_gguf(index)
    layers = [layer for size in experts.classes for layer in size.layers]
    client = SlotClient(name, index, experts, HOST_TIER if device == CPU else GPU_TIER)
    rng = np.random.default_rng(seed)

    def read_a_section(latencies: Latencies) -> None:
        layer = int(rng.choice(layers))
        chosen = rng.choice(experts.n_experts, experts.top_k, replace=False)
        started_s = time.perf_counter()
        client.read(layer, chosen, 1, lambda _places, _addresses: None)
        latencies.add(time.perf_counter() - started_s)

    work_until_the_end(read_a_section)
    client.close()


if __name__ == "__main__":
    kind, model_path, daemon_name, device_name, *more = sys.argv[1:]
    work = {"chat": chat, "read": read}[kind]
    work(Path(model_path), daemon_name, device_name, *map(int, more))
