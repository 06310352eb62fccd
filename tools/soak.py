"""Two clients at full rate against a daemon, for a long time: nothing may grow or slow down.

    python tools/soak.py [--minutes 30] [--model M.gguf] [--device cuda:N] [--json]

A chat that answers without a pause and a reader of random experts share a cache that is too small
for the model, so that the drive is read all the time. A row a tenth of the time:

    RSS, PSS       MiB, of the daemon and of each client; the median of the tenth's samples. PSS is
                   without what files hold (libraries): that share changes as others come and go
    fds            open descriptors, likewise
    p50, p99       milliseconds that a request took: a token of the chat, a section of the reader
    /s             requests a second
    disk MB/s      what the daemon has read

Exit code 1, and why on stderr, unless all of it is flat. The first tenth is for warming up. Then
  * memory: the last tenth has at most 2 MiB and 2% more than the second one;
  * descriptors: the last tenth has no more than the second one;
  * latency: the best of the last three tenths is at most 1.5 times (p99: 2 times) the best of the
    second to the fourth. What slows down by itself is slow in each of the last tenths; a machine
    that is busy with other things is so in some.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from campaign_world import CPU, Broken, Client, World, descriptor_count, parse_device

from shared.errors import StreamError

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo-hy3-iq2mix.gguf"
TENTHS = 10
SAMPLES_A_TENTH = 60
SHORTEST_PAUSE_S = 0.1
CACHE_SHARE = 0.6
MAY_GROW_MIB, MAY_GROW_SHARE = 2.0, 0.02
MAY_SLOW_DOWN = {"p50": 1.5, "p99": 2.0}
CLIENTS = ("chat", "read")
# What a tenth has values of; the judge goes by the last word of each.
Tenth = dict[str, float]


def judge(tenths: list[Tenth]) -> list[str]:
    """What is not flat, in words; see this module's docstring. Ten of them."""
    assert len(tenths) == TENTHS
    complaints = []
    for name in tenths[0]:
        values = [tenth[name] for tenth in tenths]
        kind = name.split()[-1]
        if kind in ("RSS", "PSS"):
            most = values[1] * (1 + MAY_GROW_SHARE) + MAY_GROW_MIB
            is_flat, now, before = values[-1] <= most, values[-1], values[1]
        elif kind == "fds":
            is_flat, now, before = values[-1] <= values[1], values[-1], values[1]
        elif kind in MAY_SLOW_DOWN:
            now, before = min(values[-3:]), min(values[1:4])
            is_flat = now <= MAY_SLOW_DOWN[kind] * before
        else:
            continue
        if not is_flat:
            complaints.append(f"{name} was {before:.3g} and is {now:.3g}")
    return complaints


def table(tenths: Iterable[Tenth]) -> Iterable[str]:
    """Lines of Markdown, each as soon as its tenth is there."""
    for number, tenth in enumerate(tenths, 1):
        if number == 1:
            yield "| tenth | " + " | ".join(tenth) + " |"
            yield "|---" * (len(tenth) + 1) + "|"
        yield f"| {number} | " + " | ".join(f"{value:.4g}" for value in tenth.values()) + " |"


def memory_mib(pid: int) -> tuple[float, float]:
    """RSS, where what others map as well counts in full; PSS, by its share, and without files."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = dict(line.split(":", 1) for line in text.splitlines()[1:])
    rss, anonymous, shared = (
        int(sizes[name].split()[0]) / 1024 for name in ("Rss", "Pss_Anon", "Pss_Shmem")
    )
    return rss, anonymous + shared


class Soak:
    """The processes in a world, looked at. Broken if one of them ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._clients = [
            Client(world, "chat", script="soak_client.py"),
            Client(world, "read", 1, script="soak_client.py"),
        ]
        for client in self._clients:
            client.hear()
        self._pids = {"daemon": world.daemon.pid}
        self._pids |= {
            name: client.process.pid for name, client in zip(CLIENTS, self._clients, strict=True)
        }

    def tenth(self, seconds: float) -> Tenth:
        """Takes so long."""
        for client in self._clients:
            client.ask()
        read_bytes = self._read_bytes()
        started_s = time.monotonic()
        samples: dict[str, list[float]] = {}
        while (left_s := started_s + seconds - time.monotonic()) > 0:
            self._sample(samples)
            time.sleep(min(max(seconds / SAMPLES_A_TENTH, SHORTEST_PAUSE_S), left_s))
        took_s = time.monotonic() - started_s
        values = {name: median(found) for name, found in samples.items()}
        for name, client in zip(CLIENTS, self._clients, strict=True):
            counts = client.ask()
            values[f"{name} p50"], values[f"{name} p99"] = counts["p50_ms"], counts["p99_ms"]
            values[f"{name} /s"] = counts["requests"] / took_s
        values["disk MB/s"] = (self._read_bytes() - read_bytes) / took_s / 1e6
        self._world.check_log()
        return values

    def _sample(self, samples: dict[str, list[float]]) -> None:
        for name, pid in self._pids.items():
            rss, pss = memory_mib(pid)
            found = {"RSS": rss, "PSS": pss, "fds": float(descriptor_count(pid))}
            for kind, value in found.items():
                samples.setdefault(f"{name} {kind}", []).append(value)

    def _read_bytes(self) -> float:
        return float(self._world.stats()["io"]["bytes_read"])


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tenths: list[Tenth] = []
    try:
        world = World(
            arguments.model,
            program=("-m", "streamd"),
            io="auto",
            device=arguments.device,
            cache_share=arguments.cache_share,
        )
        with world:
            soak = Soak(world)
            seconds = 60 * arguments.minutes / TENTHS

            def measured() -> Iterable[Tenth]:
                for _ in range(TENTHS):
                    tenths.append(soak.tenth(seconds))
                    yield tenths[-1]

            lines = map(json.dumps, measured()) if arguments.json else table(measured())
            for line in lines:
                print(line, flush=True)
        complaints = judge(tenths)
    except (Broken, StreamError) as error:
        complaints = [str(error)]
    for complaint in complaints:
        print(f"soak: {complaint}", file=sys.stderr)
    return int(bool(complaints))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument(
        "--cache-share", type=float, default=CACHE_SHARE, help="of the experts that the slots hold"
    )
    parser.add_argument("--device", type=parse_device, default=CPU, help="cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="a line a tenth, instead of a table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
