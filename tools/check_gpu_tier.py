"""Check the daemon's GPU tier on a machine with a GPU, and print what was seen.

    python tools/check_gpu_tier.py [--layers 2] [--experts 96] [--seconds 5]

A model with expert slabs of Hy3's real sizes is generated and served by a daemon with a small GPU
cache. Clients read slabs in place from the GPU and compare them with the file, several at a time;
then one of them is killed, then the daemon, and the GPU's memory has to come back.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from device_memory import used_mib
from gguf_factory import hy3_model

from infer.daemon.client import SlotClient
from shared.cuda import call, load_driver
from shared.errors import DaemonLost
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.resident import gpu_resident_layout
from shared.wire import GPU_TIER, HOST_TIER, Stats, StatsRequest
from streamd.ask import ask

NAME = "check-gpu-tier"
MIB = 1 << 20
RETURN_DEADLINE_S = 10.0
# What a process may leave in the driver's books for a moment, or another one may take.
SLACK_MIB = 64


class SlabReader:
    """A client without a model; counts slabs compared, torn ones, and how long sections took."""

    def __init__(self, model: Path, tier: str = GPU_TIER) -> None:
        self.index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(self.index)
        self.layers = list(self.experts.classes[0].layers)
        self.client = SlotClient(NAME, self.index, self.experts, tier)
        self.driver = load_driver()
        self.file = np.memmap(model, np.uint8, mode="r")
        self.slab_count = self.torn_count = 0

    def differs(self, address: int, offset: int, size_bytes: int) -> bool:
        held = np.empty(size_bytes, np.uint8)
        call(self.driver, "cuMemcpyDtoH", held.ctypes.data, address, size_bytes)
        return not np.array_equal(held, self.file[offset : offset + size_bytes])

    def compare(self, layer: int, experts: np.ndarray) -> None:
        """One section: every slab against the file, twice, with a pause for others to tear it."""

        def compute(places: np.ndarray, addresses: np.ndarray) -> None:
            for again in (False, True):
                time.sleep(0.001 if again else 0)
                for expert, starts in zip(
                    experts[places].tolist(), addresses.tolist(), strict=True
                ):
                    parts = self.experts.extents(layer, expert)
                    self.torn_count += any(
                        self.differs(start, part.offset, part.length)
                        for start, part in zip(starts, parts, strict=True)
                    )
            self.slab_count += len(experts)

        self.client.read(layer, experts, 1, compute)

    def touch(self, layer: int, experts: np.ndarray) -> float:
        """The milliseconds until the slabs are there."""
        started_s = time.perf_counter()
        self.client.read(layer, experts, 1, lambda *_: None)
        return (time.perf_counter() - started_s) * 1e3

    def read_for(self, seconds: float, seed: int) -> None:
        """Few experts often and most of them seldom, as routers choose."""
        rng = np.random.default_rng(seed)
        weights = 1 / np.arange(1, self.experts.n_experts + 1)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            experts = rng.choice(
                len(weights), self.experts.top_k, replace=False, p=weights / weights.sum()
            )
            self.compare(int(rng.choice(self.layers)), experts)

    def torn_tensors(self) -> int:
        base = self.client.mapping.resident_address
        return sum(
            self.differs(
                base + placed.payload_offset, placed.tensor.offset, placed.tensor.byte_count
            )
            for placed in gpu_resident_layout(resident_tensors(self.index)).tensors
        )


def gpu_mib() -> int:
    """In use, of the whole GPU."""
    mib = used_mib(0)
    assert mib is not None, "nvidia-smi does not tell"
    return mib


def has_returned(before_mib: int) -> bool:
    deadline_s = time.monotonic() + RETURN_DEADLINE_S
    while gpu_mib() > before_mib + SLACK_MIB:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def start_daemon(model: Path, gpu_cache_bytes: int, *options: str) -> "subprocess.Popen[bytes]":
    ready_read, ready_write = os.pipe()
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-m", "streamd", "serve", "--model", str(model), "--name", NAME),
            *("--gpu-cache", str(gpu_cache_bytes), "--ready-fd", str(ready_write), *options),
        ],
        pass_fds=(ready_write,),
    )
    os.close(ready_write)
    word = os.read(ready_read, 1 << 16)
    os.close(ready_read)
    if b"error" in word or not word:
        sys.exit(f"the daemon does not serve: {word.decode()}")
    return daemon


def start_reader(model: Path, seconds: float, seed: int) -> "subprocess.Popen[str]":
    words = [sys.executable, __file__, "--read", str(model), "--seconds", str(seconds)]
    return subprocess.Popen([*words, "--seed", str(seed)], stdout=subprocess.PIPE, text=True)


def stats() -> dict:
    answer = ask(NAME, StatsRequest())
    assert isinstance(answer, Stats)
    return answer.values


def measure_misses(reader: SlabReader) -> None:
    """Sections of top-k experts that are in no tier, then in the host tier only."""
    top_k, layer = reader.experts.top_k, reader.layers[0]
    groups = np.arange(reader.experts.n_experts // top_k * top_k).reshape(-1, top_k)
    slab_mb = reader.experts.classes[0].slab_bytes / 1e6
    for what in ("disk and host", "host only"):
        before = stats()["tiers"]["gpu"]
        times_ms = [reader.touch(layer, group) for group in groups]
        after = stats()["tiers"]["gpu"]
        miss_count = after["misses"] - before["misses"]
        print(
            f"  misses of {what:<14} {miss_count:>4} in {len(groups)} sections of {top_k}:"
            f" p50 {np.median(times_ms):.2f} ms a section,"
            f" {miss_count * slab_mb / sum(times_ms):.1f} GB/s"
        )
    hot = groups[-1]
    hits_ms = sorted(reader.touch(layer, hot) for _ in range(200))
    print(f"  sections of hits only: p50 {hits_ms[100] * 1e3:.0f} us")


def check(model: Path, seconds: float) -> list[str]:
    """Prints as it goes; the faults it found."""
    faults = []
    before_mib = gpu_mib()
    index = GgufIndex.open(model)
    experts = ExpertIndex.from_gguf(index)
    gpu_cache_bytes = 7 * experts.top_k * (experts.classes[0].slab_bytes + 2048)
    daemon = start_daemon(model, gpu_cache_bytes)
    resident_mib = sum(tensor.byte_count for tensor in resident_tensors(index)) // MIB
    print(f"GPU cache {gpu_cache_bytes // MIB} MiB, resident tensors {resident_mib} MiB")
    context_mib = gpu_mib() - before_mib - gpu_cache_bytes // MIB - resident_mib
    print(f"the daemon takes {context_mib} MiB besides (context)")
    reader = SlabReader(model)
    print(f"mapped read-only: {not reader.client.mapping.keepalive[2].writable}")
    torn = reader.torn_tensors()
    print(f"resident tensors that differ from the file: {torn}")
    faults += ["resident tensors differ"] * bool(torn)
    measure_misses(reader)
    others = [start_reader(model, seconds, seed) for seed in (1, 2)]
    reader.read_for(seconds, 0)
    counts = [json.loads(other.communicate()[0]) for other in others]
    slabs = reader.slab_count + sum(c["slabs"] for c in counts)
    torn = reader.torn_count + sum(c["torn"] for c in counts)
    values = stats()
    print(f"3 clients, {seconds:g} s: {slabs} slabs compared twice, {torn} differ")
    faults += ["torn slabs"] * bool(torn) + ["few slabs compared"] * (slabs < 100)
    print(f"  gpu  {values['tiers']['gpu']}")
    print(f"  host {values['tiers']['host']}")
    print(f"  disk {values['io']['bytes_read'] / 1e9:.2f} GB, revoked {values['revocations']}")
    faults += check_deaths(model, daemon, reader, before_mib)
    return faults


def check_deaths(
    model: Path, daemon: "subprocess.Popen[bytes]", reader: SlabReader, before_mib: int
) -> list[str]:
    faults = []
    dying = start_reader(model, 60, 3)
    time.sleep(3)
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    torn_before = reader.torn_count
    reader.read_for(1.0, 4)
    print(f"a client is killed: {reader.torn_count - torn_before} slabs differ, the others go on")
    faults += ["torn after a death"] * (reader.torn_count > torn_before)
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    print(f"the daemon is killed: resident tensors that differ: {reader.torn_tensors()}")
    try:
        reader.read_for(5.0, 5)
        faults.append("a dead daemon is not noticed")
    except DaemonLost as error:
        print(f"  a miss then says: {error}")
    held_mib = gpu_mib() - before_mib
    reader.client.close()
    for memory in reader.client.mapping.keepalive[2:]:
        memory.close()
    context_mib = gpu_mib() - before_mib
    print(f"  {held_mib} MiB with a client left, {context_mib} MiB when it has let go: its context")
    return faults


def measure_disk(model: Path, seconds: float) -> None:
    """Reading experts at random that the host tier mostly lacks, from either tier."""
    index = GgufIndex.open(model)
    experts = ExpertIndex.from_gguf(index)
    slot_bytes = experts.classes[0].slab_bytes + 3 * 8192
    gpu_bytes, host_bytes = (n * experts.top_k * slot_bytes for n in (7, 10))
    daemon = start_daemon(model, gpu_bytes, "--host-cache", str(host_bytes))
    rng = np.random.default_rng(0)
    for tier in (GPU_TIER, HOST_TIER, GPU_TIER, HOST_TIER):
        reader = SlabReader(model, tier)
        before_bytes, started_s = stats()["io"]["bytes_read"], time.perf_counter()
        section_count = 0
        while time.perf_counter() < started_s + seconds:
            chosen = rng.choice(experts.n_experts, experts.top_k, replace=False)
            reader.touch(int(rng.choice(reader.layers)), chosen)
            section_count += 1
        read_gb = (stats()["io"]["bytes_read"] - before_bytes) / 1e9
        print(
            f"a client of the {tier} tier: {read_gb / seconds:.2f} GB/s from disk,"
            f" {seconds / section_count * 1e3:.1f} ms a section"
        )
        reader.client.close()
    daemon.terminate()
    daemon.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2, help="with experts")
    parser.add_argument("--experts", type=int, default=96, help="of each layer")
    parser.add_argument("--seconds", type=float, default=5.0, help="of reading")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        reader = SlabReader(options.read)
        reader.read_for(options.seconds, options.seed)
        print(json.dumps({"slabs": reader.slab_count, "torn": reader.torn_count}))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        os.environ["STREAMD_RUNTIME_DIR"] = directory
        started_s = time.perf_counter()
        model = hy3_model(
            n_layers=options.layers + 1,
            n_experts=options.experts,
            top_k=8,
            width=4096,
            expert_width=1536,
            dense_width=4096,
        ).write(Path(directory).resolve() / "model.gguf")
        size_gb = model.stat().st_size / 1e9
        print(f"model of {size_gb:.2f} GB made in {time.perf_counter() - started_s:.1f} s")
        before_mib = gpu_mib()
        child = os.fork()
        if child == 0:
            faults = check(model, options.seconds)
            measure_disk(model, options.seconds)
            print("\n".join(f"FAULT: {fault}" for fault in faults) or "no fault", flush=True)
            os._exit(bool(faults))
        _, status = os.waitpid(child, 0)
        returned = has_returned(before_mib)
        print(f"all processes gone: {gpu_mib()} MiB used, {before_mib} before")
        return status != 0 or not returned


if __name__ == "__main__":
    sys.exit(main())
