"""The campaign's clients, one a process: they say on stdout what became of each thing they did.

    chat MODEL NAME DEVICE         for each line on stdin: a greedy answer's tokens
    read MODEL NAME DEVICE SEED    slabs compared with the file; counts for each line
    hold MODEL NAME DEVICE         enters a section and stays in it

A line of JSON each. All of them attach again when their daemon has ended. DEVICE: cpu, or cuda:N.
"""

import ctypes
import json
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from infer.daemon.client import SlotClient
from infer.daemon.recovery import Recovery
from shared.cuda import call, load_driver
from shared.daemon_options import CPU
from shared.errors import DaemonBusy, DaemonLost, PlanError, StreamError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.wire import GPU_TIER, HOST_TIER

PROMPT = "Which is the largest planet in the solar system?"
TOKEN_COUNT = 24
RETURN_S = 60
# Long enough for another process to overwrite a slot that is free to be.
HOLD_S = 0.0005


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def chat(model: Path, name: str, device: str) -> None:
    """With torch: prompts are prefilled and answered like a user's, the context anew each time."""
    from infer.config import ModelConfig  # noqa: PLC0415 - the other clients start faster without
    from infer.session import Session  # noqa: PLC0415

    exact = device == CPU
    config = ModelConfig(
        model=model, name=name, device=device, exact=exact, reconnect_s=RETURN_S, threads=1
    )
    with Session(config) as session:
        prompt = session.tokenizer.encode(PROMPT)
        engine = session.engine
        say(ready=True)
        for _ in sys.stdin:
            started_s = time.monotonic()
            try:
                engine.kv.truncate(0)
                logits = engine.extend(prompt)
                tokens = [int(logits.argmax())]
                while len(tokens) < TOKEN_COUNT:
                    logits = engine.extend(tokens[-1:])
                    tokens.append(int(logits.argmax()))
            except StreamError as error:
                say(failed=error.code, message=str(error), took_s=time.monotonic() - started_s)
            else:
                say(tokens=tokens, bits=logits.tobytes().hex()[:64], took_s=_since(started_s))


def _since(started_s: float) -> float:
    return round(time.monotonic() - started_s, 2)


class Reader:
    """Counts: slabs that were compared, those that differed from the file at some time, sections,
    and sections that ended with a refusal."""

    def __init__(self, model: Path, name: str, device: str) -> None:
        index = GgufIndex.open(model)
        tier = HOST_TIER if device == CPU else GPU_TIER
        self._held_at = ctypes.string_at if device == CPU else gpu_bytes(load_driver())
        self._experts = ExpertIndex.from_gguf(index)
        self.layers = [layer for size in self._experts.classes for layer in size.layers]
        self._file = np.memmap(model, np.uint8, mode="r")
        self.client = self._come_in(lambda: SlotClient(name, index, self._experts, tier))
        self._recovery = Recovery(name, model, RETURN_S, tell=lambda _text: None)
        self.counts = dict.fromkeys(("slabs", "torn", "sections", "failed", "lost"), 0)
        self.longest_s = 0.0

    def read(self, rng: np.random.Generator) -> None:
        """A section of random experts."""
        layer = int(rng.choice(self.layers))
        experts = rng.choice(self._experts.n_experts, self._experts.top_k, replace=False)

        whole = np.zeros(len(experts), bool)

        def compute(places: np.ndarray, addresses: np.ndarray) -> None:
            """Done again, and what was there before is forgotten, if this client is revoked."""
            whole[places] = True
            for pause_s in (HOLD_S, 0.0):
                for place, address in zip(places.tolist(), addresses.tolist(), strict=True):
                    whole[place] &= self._is_whole(layer, int(experts[place]), address)
                time.sleep(pause_s)

        started_s = time.monotonic()
        try:
            self.client.read(layer, experts, 1, compute)
            self.counts["sections"] += 1
            self.counts["slabs"] += len(experts)
            self.counts["torn"] += len(experts) - int(whole.sum())
        except DaemonLost as lost:
            self.counts["lost"] += 1
            self._attach_again(lost)
            return
        except StreamError:
            self.counts["failed"] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - started_s)

    @staticmethod
    def _come_in(attach: Callable[[], SlotClient]) -> SlotClient:
        """A crowd may have taken all the room for a moment."""
        end_s = time.monotonic() + RETURN_S
        while True:
            try:
                return attach()
            except (DaemonBusy, PlanError):
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)

    def _attach_again(self, lost: DaemonLost) -> None:
        self.client.detach()
        lost_at_s = time.monotonic()
        while not self.client.attached:
            self._recovery.wait(lost, lost_at_s)
            with suppress(DaemonLost, DaemonBusy, PlanError):  # gone once more, or crowded
                self.client.attach()

    def _is_whole(self, layer: int, expert: int, addresses: list[int]) -> bool:
        extents = self._experts.extents(layer, expert)
        return all(
            self._held_at(address, extent.length)
            == self._file[extent.offset : extent.offset + extent.length].tobytes()
            for extent, address in zip(extents, addresses, strict=True)
        )


def gpu_bytes(driver: Any) -> Callable[[int, int], bytes]:
    """Copies of GPU memory: takes an address and a size."""

    def held_at(address: int, size_bytes: int) -> bytes:
        held = np.empty(size_bytes, np.uint8)
        call(driver, "cuMemcpyDtoH", held.ctypes.data, address, size_bytes)
        return held.tobytes()

    return held_at


def read(model: Path, name: str, device: str, seed: int) -> None:
    """Reads all the time; each line asks for the counts since the last one."""
    reader, rng = Reader(model, name, device), np.random.default_rng(seed)
    say(ready=True)
    while True:
        started_s = time.monotonic()
        while not select.select([sys.stdin], [], [], 0)[0]:
            reader.read(rng)
        if not sys.stdin.readline():
            return
        say(**reader.counts, longest_s=round(reader.longest_s, 2), seconds=_since(started_s))
        reader.counts = dict.fromkeys(reader.counts, 0)
        reader.longest_s = 0.0


def hold(model: Path, name: str, device: str) -> None:
    """Attaches, reads one layer and never lets go of it."""
    reader = Reader(model, name, device)
    reader.client.begin(reader.layers[0], np.arange(2), 1)
    say(ready=True)
    sys.stdin.read()


if __name__ == "__main__":
    kind, model_path, daemon_name, device_name, *more = sys.argv[1:]
    work = {"chat": chat, "read": read, "hold": hold}[kind]
    work(Path(model_path), daemon_name, device_name, *map(int, more))
