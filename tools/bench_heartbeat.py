"""How late the daemon's loop is while a client reads as fast as it can, with a cache at the floor.

    python tools/make_slab_model.py slabs.gguf --gb 2
    python tools/bench_heartbeat.py slabs.gguf [--seconds 5] [--experts 64] [--json]

The daemon runs in this process. Another one writes the time into a pipe every 2 ms, and the loop
looks at the clock when it comes to reading it: the difference is what any event waits for. A third
one asks for experts at random, and computes nothing with them. The first figures are those of slots
that are read into for the first time, whose memory the kernel has to find yet.
"""

import argparse
import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from infer.daemon.client import SlotClient
from shared.errors import StreamError
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.io_choice import parse_io
from shared.runtime_dir import DaemonRecord, Endpoints, claim
from shared.sizes import parse_size
from shared.wire import PROTOCOL_VERSION
from streamd.config import StreamdConfig
from streamd.daemon import Daemon
from streamd.planning.model_plan import plan_model
from streamd.planning.plan_options import MachineOptions

NAME = "heartbeat"
BEAT_S = 0.002
STAMP = struct.Struct("=q")
READ_BYTES = 1 << 12


class TimedDaemon(Daemon):
    """Notes how late each stamp that comes through `fd` is, in seconds, and when it came."""

    def watch_beats(self, fd: int) -> None:
        self.beats: list[tuple[float, float]] = []
        self._beat_fd = fd
        self._control.watch(fd, self._take_beats)

    def _take_beats(self) -> None:
        stamps = os.read(self._beat_fd, READ_BYTES)
        now_ns = time.monotonic_ns()
        for (stamp_ns,) in STAMP.iter_unpack(stamps):
            self.beats.append((now_ns / 1e9, (now_ns - stamp_ns) / 1e9))


def beat(fd: int) -> None:
    while True:
        time.sleep(BEAT_S)
        os.write(fd, STAMP.pack(time.monotonic_ns()))


def read_greedily(model: Path, expert_count: int) -> None:
    """Sections of random experts, one after the other, until the daemon is gone."""
    index = GgufIndex.open(model)
    experts = ExpertIndex.from_gguf(index)
    client = SlotClient(NAME, index, experts)
    layers = [layer for size in experts.classes for layer in size.layers]
    rng = np.random.default_rng(1)
    while True:
        layer = int(rng.choice(layers))
        count = min(expert_count or experts.top_k, client.wave_experts(layer))
        wanted = rng.choice(experts.n_experts, count, replace=False)
        try:
            client.read(layer, wanted, 1, lambda *_: None)
        except StreamError:
            return


def measure(options: argparse.Namespace) -> dict[str, Any]:
    floor_bytes = plan_model(StreamdConfig(model=options.model), MachineOptions()).host.floor_bytes
    config = StreamdConfig(
        model=options.model,
        name=NAME,
        host_cache=parse_size(options.host_cache or str(floor_bytes)),
        io=parse_io(options.io),
        verify=options.verify,
    )
    endpoints = Endpoints.of(NAME)
    record = DaemonRecord(NAME, os.getpid(), str(options.model.absolute()), PROTOCOL_VERSION)
    beats_fd, stamp_fd = os.pipe()
    me = [sys.executable, __file__, str(options.model)]
    with claim(endpoints, record), TimedDaemon(config, endpoints) as daemon:
        daemon.stop_on_signals()
        daemon.watch_beats(beats_fd)
        children = [
            subprocess.Popen([*me, "--beat-fd", str(stamp_fd)], pass_fds=[stamp_fd]),
            subprocess.Popen([*me, "--greedy", "--experts", str(options.experts)]),
        ]
        select.select([beats_fd], [], [])  # a busy machine takes its time to start a process
        threading.Timer(options.seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()
        daemon.run()
        for child in children:
            child.kill()
            child.wait()
        io = daemon.stats()["io"]
        beats = np.array(daemon.beats)
    steady = beats[:, 0] > beats[0, 0] + options.cold_seconds
    return {
        "engine": io["engine"],
        "mb_s": round(io["bytes_read"] / options.seconds / 1e6),
        **summary("cold", beats[~steady, 1]),
        **summary("steady", beats[steady, 1]),
    }


def summary(name: str, late_s: np.ndarray) -> dict[str, Any]:
    late_ms = np.percentile(late_s * 1000, (50, 99, 100)).round(3).tolist()
    keys = (f"{name}_late_ms_p50", f"{name}_late_ms_p99", f"{name}_late_ms_max")
    return {f"{name}_beats": len(late_s), **dict(zip(keys, late_ms, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cold-seconds", type=float, default=1.0, help="counted apart")
    parser.add_argument("--experts", type=int, default=0, help="of a section (default: the top-k)")
    parser.add_argument("--host-cache", metavar="SIZE", help="default: the floor")
    parser.add_argument("--io", default="auto")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--beat-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--greedy", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.beat_fd is not None:
        return beat(options.beat_fd)
    if options.greedy:
        return read_greedily(options.model, options.experts)
    logging.basicConfig(level="WARNING")
    with tempfile.TemporaryDirectory(prefix="beat-") as directory:
        os.environ["STREAMD_RUNTIME_DIR"] = directory
        values = measure(options)
    print(
        json.dumps(values) if options.json else "\n".join(f"{k:<20} {v}" for k, v in values.items())
    )
    return None


if __name__ == "__main__":
    main()
