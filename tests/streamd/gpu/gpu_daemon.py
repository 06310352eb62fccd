"""A whole daemon over a fake GPU, in a thread of this process, and a client that checks slabs."""

import ctypes
from contextlib import contextmanager

import numpy as np
from daemon_in_thread import running_in_thread

from infer.daemon.client import SlotClient
from infer.daemon.mapping import TierMemory
from shared import shm
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.runtime_dir import Endpoints
from shared.slot_plan import Demand
from shared.wire import GPU_TIER, Stats, StatsRequest
from streamd.ask import ask
from streamd.config import StreamdConfig
from streamd.daemon import Daemon

NAME = "gpu-test"


def map_fake(attached, arena_fd, resident_fd):
    """What infer.daemon.gpu_mapping does, with a fake GPU's memory."""
    arena = shm.map_readonly(arena_fd, attached.arena_bytes)
    resident = shm.map_readonly(resident_fd, attached.resident_bytes)
    return TierMemory("cuda:0", True, shm.address(arena), shm.address(resident), (arena, resident))


@contextmanager
def daemon(model, gpu, **options):
    """A daemon in a thread of this process, over a fake GPU."""
    config = StreamdConfig(model=model, name=NAME, **options)
    running = Daemon(config, Endpoints.of(NAME), lambda ordinal: gpu)
    with running_in_thread(running, NAME):
        yield running


class Reader:
    def __init__(self, model, tier=GPU_TIER):
        self.index = GgufIndex.open(model)
        self.experts = ExpertIndex.from_gguf(self.index)
        self.client = SlotClient(NAME, self.index, self.experts, tier)
        self.file = np.memmap(model, np.uint8, mode="r")

    def read(self, layer, experts):
        """Compare slabs with the file while they may be read."""

        def compare(places, addresses):
            for place, starts in zip(places, addresses.tolist(), strict=True):
                expert = experts[place]
                parts = self.experts.extents(layer, expert)
                for start, part in zip(starts, parts, strict=True):
                    wanted = self.file[part.offset : part.offset + part.length].tobytes()
                    assert ctypes.string_at(start, part.length) == wanted

        self.client.read(layer, np.array(experts), 1, compare)

    def compare(self, tensor, address):
        """A resident tensor with the file."""
        wanted = self.file[tensor.offset : tensor.offset + tensor.byte_count].tobytes()
        assert ctypes.string_at(address, tensor.byte_count) == wanted

    def read_all(self):
        """Every expert of the model, a section at a time."""
        for size_class in self.experts.classes:
            for layer in size_class.layers:
                wave = self.client.wave_experts(layer)
                for first in range(0, self.experts.n_experts, wave):
                    self.read(layer, list(range(first, min(first + wave, self.experts.n_experts))))


def stats():
    answer = ask(NAME, StatsRequest())
    assert isinstance(answer, Stats)
    return answer.values


def floor_bytes(model):
    return Demand.of(ExpertIndex.from_gguf(GgufIndex.open(model)), 256).floor_bytes
