"""Break it: random faults in rounds, and after each round everything must be as it was.

    python tools/campaign.py [--seed N] [--minutes M | --rounds N] [--faults A,B] [--model M.gguf]
                             [--device cuda:N]

A daemon with a cache too small for the model, a chat and a reader that live through it all. A round
does a few things of campaign_faults.py, some at once. Then the chat's answer must have the same
bits as at the beginning, no slab may have differed from the file, every question is answered
within its deadline, the caches are consistent, descriptors, memory and mappings are what they
were, and the reader is as fast as before. A line of JSON a round; exit code 1 at the first that is
not so.

On a GPU the daemon has a tier there, both clients compute and read from it, and the GPU's memory is
looked at too: after each round, and at the end, when everybody has gone.
"""

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from campaign_faults import EXCUSES, FAULTS, reload_the_daemon
from campaign_world import (
    CPU,
    Broken,
    Client,
    World,
    descriptor_count,
    memfd_count,
    memory_mb,
    parse_device,
    used_vram_mib,
)

from shared.errors import StreamError

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-hy3-iq2mix.gguf"
MOST_FAULTS = 4
# What is not named here may not grow at all. Of a GPU: what a process may leave in the driver's
# books for a moment, or keep for its next kernels.
MAY_GROW = {"memory_mb": 24.0, "client_memory_mb": 24.0, "vram_mib": 64.0}
# The machine may be busy with other things, so a fraction of the first speed is enough.
LEAST_SPEED = 0.25
RECOVERY_S = 60.0
SPEED_S = 0.4
SETTLE_S = 10.0
COUNTED = ("descriptors", "chat_descriptors", "reader_descriptors", "client_memfds")
# Of these no two at once: each waits for what another one does to the daemon.
EXCLUSIVE = {"stop_the_daemon", "kill_the_daemon", "end_the_daemon", "reload_the_daemon"}


class Campaign:
    def __init__(self, world: World, rng: random.Random, kinds: list[str]) -> None:
        self._world = world
        self._rng = rng
        self._kinds = kinds
        self.done = Counter[str]()
        self._chat, self._reader = Client(world, "chat"), Client(world, "read", rng.getrandbits(32))
        self._clients = (self._chat, self._reader)
        for client in self._clients:
            client.hear()
        self._expected = self._chat.ask()
        if "tokens" not in self._expected:
            raise Broken(f"the chat does not answer: {self._expected}")
        # Once, so that what a process makes once in its life is there when it is looked at.
        reload_the_daemon(world, rng)
        self._compare(self._chat.ask())
        self._first_speed = max(self._speed() for _ in range(3))
        self._before = self._settled_look()

    def round(self) -> dict[str, Any]:
        """Raises Broken."""
        kinds = self._choose()
        try:
            return self._round(kinds)
        except Broken as broken:
            broken.add_note(f"after {', '.join(kinds)}")
            raise

    def _choose(self) -> list[str]:
        count = self._rng.randint(1, min(MOST_FAULTS, len(self._kinds)))
        return self._rng.sample(self._kinds, count)

    def _round(self, kinds: list[str]) -> dict[str, Any]:
        together = [kind for kind in kinds if kind not in EXCLUSIVE]
        alone = [kind for kind in kinds if kind in EXCLUSIVE]
        self._chat.tell()
        self._do(together)
        for kind in alone:
            self._do([kind])
        self.done.update(kinds)
        excused = set[str]().union(*(EXCUSES.get(kind, set()) for kind in kinds))
        answer = self._chat.hear()
        if answer.get("failed") not in excused:
            self._compare(answer)
        self._compare(self._chat.ask())
        counts = self._reader.ask()
        if counts["torn"]:
            raise Broken(f"slabs that were not the file's: {counts}")
        speed = self._await_speed()
        self._compare_looks()
        self._world.check_log()
        return {
            "faults": kinds,
            "slabs": counts["slabs"],
            "failed": counts["failed"],
            "longest_s": counts["longest_s"],
            "chat_s": answer["took_s"],
            "speed": round(speed / self._first_speed, 2),
        }

    def _do(self, kinds: list[str]) -> None:
        """At the same time, each with a chance of its own."""
        errors: list[BaseException] = []

        def run(kind: str, seed: int) -> None:
            try:
                FAULTS[kind](self._world, random.Random(seed))
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(kind, self._rng.getrandbits(32))) for kind in kinds
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _compare(self, answer: dict[str, Any]) -> None:
        same = ("tokens", "bits")
        if any(answer.get(key) != self._expected[key] for key in same):
            raise Broken(f"the answer is {answer}, not {self._expected}")

    def _speed(self) -> float:
        """The reader's sections a second."""
        self._reader.ask()
        time.sleep(SPEED_S)
        counts = self._reader.ask()
        return float(counts["sections"] / counts["seconds"])

    def _await_speed(self) -> float:
        speeds: list[float] = []
        end_s = time.monotonic() + RECOVERY_S
        while time.monotonic() < end_s:
            speeds.append(self._speed())
            if speeds[-1] >= LEAST_SPEED * self._first_speed:
                return speeds[-1]
        stats = json.dumps(self._world.stats())
        raise Broken(f"{self._first_speed:.0f} sections a second before, now {speeds}; {stats}")

    def _look(self) -> dict[str, Any]:
        world, pid = self._world, self._world.daemon.pid
        world.wait_until(lambda: len(world.stats()["clients"]) == 2, "the others have left")
        on_gpu = {} if world.device == CPU else {"vram_mib": used_vram_mib(world.device)}
        return on_gpu | {
            "descriptors": descriptor_count(pid),
            "chat_descriptors": descriptor_count(self._chat.process.pid),
            "reader_descriptors": descriptor_count(self._reader.process.pid),
            "client_memfds": sum(memfd_count(c.process.pid) for c in self._clients),
            "memory_mb": memory_mb(pid),
            "client_memory_mb": max(memory_mb(c.process.pid) for c in self._clients),
        }

    def _settled_look(self) -> dict[str, Any]:
        """The same twice in a row: ZeroMQ takes a moment to close what has hung up."""
        before, now = None, self._look()
        while before is None or any(now[key] != before[key] for key in now if key in COUNTED):
            time.sleep(SPEED_S)
            before, now = now, self._look()
        return now

    def _compare_looks(self) -> None:
        """What has ended may take a moment to be gone; what has leaked stays."""
        end_s = time.monotonic() + SETTLE_S
        while changes := self._changes(self._look()):
            if time.monotonic() > end_s:
                raise Broken("; ".join(changes))
            time.sleep(SPEED_S)

    def _changes(self, now: dict[str, Any]) -> list[str]:
        return [
            f"{key}: {before} before, {now[key]} now"
            for key, before in self._before.items()
            if now[key] > before + MAY_GROW.get(key, 0)
        ]


def await_vram(device: str, before_mib: int) -> int:
    """The GPU's memory in use now that everybody has gone. Broken if it does not come back."""
    end_s = time.monotonic() + SETTLE_S
    while (used_mib := used_vram_mib(device)) > before_mib + MAY_GROW["vram_mib"]:
        if time.monotonic() > end_s:
            raise Broken(f"{device}: {before_mib} MiB were in use before, {used_mib} are now")
        time.sleep(SPEED_S)
    return used_mib


def main() -> int:
    arguments = _arguments()
    rng = random.Random(arguments.seed)
    end_s = time.monotonic() + 60 * arguments.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    round_count = 0
    summary: dict[str, Any] = {"seed": arguments.seed, "device": arguments.device}
    try:
        if arguments.device != CPU:
            summary["vram_mib_before"] = used_vram_mib(arguments.device)
        with World(arguments.model, arguments.seed, device=arguments.device) as world:
            campaign = Campaign(world, rng, arguments.faults)
            started_s = time.monotonic()
            while round_count < arguments.rounds if arguments.rounds else time.monotonic() < end_s:
                round_count += 1
                print(json.dumps({"round": round_count, **campaign.round()}), flush=True)
            minutes = round((time.monotonic() - started_s) / 60, 1)
        if arguments.device != CPU:
            summary["vram_mib_after"] = await_vram(arguments.device, summary["vram_mib_before"])
    except (Broken, StreamError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"campaign: seed {arguments.seed}, round {round_count}: {text}", file=sys.stderr)
        return 1
    summary |= {"rounds": round_count, "minutes": minutes, "faults": dict(campaign.done)}
    print(json.dumps(summary))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=0, help="instead of --minutes")
    parser.add_argument(
        "--faults", type=lambda text: text.split(","), default=sorted(FAULTS), metavar="A,B"
    )
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--device", type=parse_device, default=CPU, help="cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    if unknown := set(arguments.faults) - FAULTS.keys():
        parser.error(f"no fault {', '.join(unknown)}; there are {', '.join(sorted(FAULTS))}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
