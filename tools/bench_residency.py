"""What a hit costs the client: the table check of one layer, and a whole section around nothing.

python tools/bench_residency.py models/demo-hy3-iq2mix.gguf
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from infer.config import ModelConfig
from infer.session import Session

ROUNDS = 20_000


def median_us(action: Callable[[], object]) -> float:
    samples = []
    for _ in range(ROUNDS):
        started_ns = time.perf_counter_ns()
        action()
        samples.append(time.perf_counter_ns() - started_ns)
    return float(np.median(samples)) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    with Session(ModelConfig(model=parser.parse_args().model)) as session:
        client = session.engine.client
        layer = client.experts.classes[0].layers[0]
        experts = np.arange(client.experts.top_k, dtype=np.int32)
        client.read(layer, experts, 1, lambda *_: None)
        row = client.mapping.table.host_slots[layer]
        fetches = client.mapping.area.fetches

        def check() -> bool:
            return bool((row[experts] >= 0).all())

        check_us = median_us(check)
        section_us = median_us(lambda: client.read(layer, experts, 1, lambda *_: None))
        assert client.mapping.area.fetches == fetches, "a hit sent a message"
    print(f"table check of {len(experts)} experts   {check_us:6.2f} us")
    print(f"whole section, all hits      {section_us:6.2f} us")


if __name__ == "__main__":
    main()
