"""A client without a model: it reads slabs in place and compares them with the file.

    slab_reader.py MODEL NAME --seconds S [--seed N] [--stop]      prints counts as JSON

Experts are asked for at random, few of them often and most of them seldom, as routers do. A slab is
compared at once and again after a pause, within one section. With --stop the reader stops itself
(SIGSTOP) inside its first section, before it looks at a slab.
"""

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path

import numpy as np

from infer.daemon.client import SlotClient
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import Fetch

# Long enough for another process to overwrite a slot that is free to be.
HOLD_S = 0.001


class SlabReader:
    """Attached to the daemon `name`, which serves `model`.

    compare_with: the model, or a copy of it that stays as it is.
    slab_count: slabs compared with the file; torn_count: those that differed from it at some time.
    """

    def __init__(self, model: Path, name: str, compare_with: Path | None = None) -> None:
        index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(index)
        self.layers = [layer for size in self.experts.classes for layer in size.layers]
        self.client = SlotClient(name, index, self.experts)
        self.slab_count = self.torn_count = self.section_count = 0
        self._file = np.memmap(compare_with or model, np.uint8, mode="r")

    def close(self) -> None:
        self.client.close()

    def read(self, layer: int, experts: np.ndarray, stop_first: bool = False) -> None:
        """One section; distinct `experts`, at most as many as a section may need."""
        torn = np.zeros(len(experts), bool)

        def compute(places: np.ndarray, addresses: np.ndarray) -> None:
            nonlocal stop_first
            if stop_first:
                stop_first = False
                os.kill(os.getpid(), signal.SIGSTOP)
            torn[places] = self._differs(layer, experts[places], addresses)
            time.sleep(HOLD_S)
            torn[places] |= self._differs(layer, experts[places], addresses)

        self.client.read(layer, experts, 1, compute)
        self.section_count += 1
        self.slab_count += len(experts)
        self.torn_count += int(torn.sum())

    def _differs(self, layer: int, experts: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """bool [len(experts)]: slabs that are not what the file holds."""
        differs = np.zeros(len(experts), bool)
        for at, expert in enumerate(experts.tolist()):
            for extent, address in zip(
                self.experts.extents(layer, expert), addresses[at].tolist(), strict=True
            ):
                slot = np.frombuffer(
                    (ctypes.c_uint8 * extent.length).from_address(address), np.uint8
                )
                wanted = self._file[extent.offset : extent.offset + extent.length]
                differs[at] |= not np.array_equal(slot, wanted)
        return differs


class CountingReader:
    """A client that counts by itself what it looks up, and what it has to ask the daemon for."""

    def __init__(self, model: Path, name: str) -> None:
        self.reader = SlabReader(model, name)
        self.top_k = self.reader.experts.top_k
        self.lookup_count = self.asked_count = 0
        self.looked_up: set[tuple[int, int]] = set()
        connection = self.reader.client._connection
        fetch = connection.fetch

        def counted(message: Fetch) -> None:
            self.asked_count += len(message.experts)
            fetch(message)

        connection.fetch = counted

    def look_up(self, rng: np.random.Generator, section_count: int) -> None:
        for _ in range(section_count):
            layer = int(rng.choice(self.reader.layers))
            experts = rng.choice(self.reader.experts.n_experts, self.top_k, replace=False)
            self.reader.read(layer, experts)
            self.lookup_count += self.top_k
            self.looked_up |= {(layer, expert) for expert in experts.tolist()}

    @property
    def counts(self) -> tuple[int, int]:
        """Hits and misses."""
        return self.lookup_count - self.asked_count, self.asked_count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("name")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="store_true")
    arguments = parser.parse_args()
    reader = SlabReader(arguments.model, arguments.name)
    rng = np.random.default_rng(arguments.seed)
    ranks = np.arange(1, reader.experts.n_experts + 1)
    popularity = 1 / ranks / np.sum(1 / ranks)
    end_s = time.monotonic() + arguments.seconds
    while reader.section_count == 0 or time.monotonic() < end_s:
        layer = int(rng.choice(reader.layers))
        experts = rng.choice(len(ranks), reader.experts.top_k, replace=False, p=popularity)
        reader.read(layer, experts, stop_first=arguments.stop and reader.section_count == 0)
    area = reader.client.mapping.area
    counts = {
        "slabs": reader.slab_count,
        "torn": reader.torn_count,
        "sections": reader.section_count,
        "hits": area.hits,
        "misses": area.misses,
    }
    reader.close()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
