"""A real daemon that cannot share its GPU, and clients of it that upload to a fake one."""

import ctypes
import os
from contextlib import contextmanager

import numpy as np
from daemon_in_thread import running_in_thread

from infer.daemon.client import SlotClient
from infer.uploads.open_client import GRANULARITY_BYTES, open_uploading, plan_own
from infer.uploads.slot_cache_integrity import check_integrity
from shared.arena import round_up
from shared.daemon_options import DaemonOptions
from shared.errors import GpuNotShared
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.runtime_dir import DaemonRecord, Endpoints, claim
from shared.slot_plan import Demand
from shared.wire import HOST_TIER
from streamd.config import StreamdConfig
from streamd.daemon import Daemon

NAME = "upload-test"
FREE_BYTES = 8 << 30


def not_shared(ordinal):
    raise GpuNotShared(f"GPU {ordinal} cannot share its memory between processes here", "wait")


@contextmanager
def daemon(model, **options):
    """In a thread of this process."""
    config = StreamdConfig(model=model, name=NAME, **options)
    endpoints, record = Endpoints.of(NAME), DaemonRecord(NAME, os.getpid(), str(model), 1)
    running = Daemon(config, endpoints, not_shared)
    with claim(endpoints, record), running_in_thread(running, NAME):
        yield running


def least_cache(model):
    """Bytes of the smallest GPU cache."""
    floor_bytes = Demand.of(ExpertIndex.from_gguf(GgufIndex.open(model)), 256).floor_bytes
    return round_up(floor_bytes, GRANULARITY_BYTES)


def connect(model, device, gpu_cache=None, gpu_resident=None):
    """gpu_cache: bytes; None: a slot for every expert. gpu_resident: bytes; None: all tensors."""
    index = GgufIndex.open(model)
    experts = ExpertIndex.from_gguf(index)
    options = DaemonOptions(gpu_cache=gpu_cache, gpu_resident=gpu_resident, ctx=256)
    plan = plan_own(index, experts, options, FREE_BYTES)
    host = SlotClient(NAME, index, experts, HOST_TIER)
    try:
        return open_uploading(host, device, plan, index, False)
    except BaseException:
        host.close()
        raise


class Reader:
    """Compares what its client reads with the file, when the GPU comes to it."""

    def __init__(self, model, device, gpu_cache=None):
        self.device = device
        self.client = connect(model, device, gpu_cache)
        self.experts = self.client.experts
        self.file = np.memmap(model, np.uint8, mode="r")
        self.compared = 0

    def kernel(self, layer, experts, addresses):
        def compare():
            for expert, starts in zip(experts.tolist(), addresses.tolist(), strict=True):
                parts = self.experts.extents(layer, expert)
                for start, part in zip(starts, parts, strict=True):
                    wanted = self.file[part.offset : part.offset + part.length].tobytes()
                    assert ctypes.string_at(start, part.length) == wanted, (layer, expert)
                self.compared += 1

        self.device.launch(compare)

    def read(self, layer, experts, meanwhile=lambda: None):
        experts = np.array(experts, np.int32)

        def compute(places, addresses):
            check_integrity(self.client.cache)
            self.kernel(layer, experts[places], addresses)

        self.client.read(layer, experts, 1, compute, meanwhile)
        check_integrity(self.client.cache)

    def read_all(self):
        """Every expert of the model, a section at a time."""
        for size_class in self.experts.classes:
            for layer in size_class.layers:
                wave = self.client.wave_experts(layer)
                for first in range(0, self.experts.n_experts, wave):
                    self.read(layer, list(range(first, min(first + wave, self.experts.n_experts))))

    def close(self):
        self.device.finish()
        self.client.close()
