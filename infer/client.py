"""The daemon as the client sees it: attach, look experts up, wait for those that are missing.

docs/protocol.md is the law here. A hit is a look into shared memory and costs no message.
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from infer.gpu_mapping import map_gpu_tier
from infer.mapping import map_host_tier, map_memory
from shared import membarrier
from shared.errors import ClientRevoked, DaemonLost, ProtocolMismatch
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.runtime_dir import Endpoints, running_daemons
from shared.wire import (
    ATTACHED_DESCRIPTOR_COUNT,
    GPU_TIER,
    HOST_TIER,
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Failed,
    Fetch,
    Message,
    Refused,
    Stats,
    StatsRequest,
    decode,
    encode,
    routing_id,
)

ATTACH_DEADLINE_S = 30.0
# Reading the resident tensors of the largest models from a slow disk.
LOAD_DEADLINE_S = 600.0
CONNECT_PAUSE_S = 0.05
# Longer than any sound disk takes for a wave; a daemon that hangs must not hang us.
FETCH_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 5.0
MAX_REVOCATIONS = 5

T = TypeVar("T")


class SlotClient:
    """One attachment to a daemon. Not for use by several threads.

    part_types: int32 [n_layers, 3], the GGML types of gate, up and down, is `experts.part_types`.
    tier: HOST_TIER or GPU_TIER. On a GPU all addresses are device addresses, and `compute` returns
    only when its GPU work is done: the slots may be reused from then on.
    """

    def __init__(
        self, name: str, index: GgufIndex, experts: ExpertIndex, tier: str = HOST_TIER
    ) -> None:
        self.experts = experts
        self._tier = tier
        self._endpoints = Endpoints.of(name)
        self._shards = [list(shard) for shard in index.fingerprints]
        self._context = zmq.Context(io_threads=1)
        self._doorbell = -1
        self._past_hits = self._past_misses = 0  # of attachments that were revoked
        membarrier.register()
        try:
            self._attach()
        except BaseException:
            self._context.term()
            raise

    # Attaching

    def _attach(self) -> None:
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            attached, descriptors = self._shake_hands()
            self._doorbell = descriptors.pop()
            map_tier = map_gpu_tier if self._tier == GPU_TIER else map_host_tier
            self.mapping = map_memory(attached, descriptors, self.experts, map_tier)
        except BaseException:
            self._unix.close()
            if self._doorbell >= 0:
                os.close(self._doorbell)
                self._doorbell = -1
            raise
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.ROUTING_ID, routing_id(attached.ticket))
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._dealer.connect(self._endpoints.zmq_url)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._doorbell, zmq.POLLIN)
        self._poller.register(self._unix.fileno(), zmq.POLLIN)

    def _shake_hands(self) -> tuple[Attached, list[int]]:
        self._unix.settimeout(ATTACH_DEADLINE_S)
        try:
            self._connect()
            self._unix.sendall(encode(Attach(os.getpid(), self._shards, self._tier)))
            frame, descriptors, _, _ = socket.recv_fds(
                self._unix, MAX_MESSAGE_BYTES, ATTACHED_DESCRIPTOR_COUNT
            )
        except OSError as error:
            raise self._lost(f"it cannot be reached: {error}") from error
        if not frame:
            raise self._lost("it hung up")
        answer = decode(frame)
        if isinstance(answer, Refused):
            raise answer.error()
        if not isinstance(answer, Attached) or len(descriptors) != ATTACHED_DESCRIPTOR_COUNT:
            raise ProtocolMismatch(
                "the daemon answered attach with something else",
                "daemon and client are of different versions: restart the daemon",
            )
        return answer, descriptors

    def _connect(self) -> None:
        """A daemon has its name before it has its sockets: it loads the model in between."""
        deadline_s = time.monotonic() + LOAD_DEADLINE_S
        while True:
            try:
                self._unix.connect(str(self._endpoints.unix_path))
                return
            except (FileNotFoundError, ConnectionRefusedError):
                names = [record.name for record in running_daemons()]
                if self._endpoints.name not in names or time.monotonic() > deadline_s:
                    raise
            time.sleep(CONNECT_PAUSE_S)

    def _detach(self) -> None:
        self._dealer.close()
        self._unix.close()
        if self._doorbell >= 0:
            os.close(self._doorbell)
            self._doorbell = -1  # attaching again may fail, and `close` comes after that too

    def close(self) -> None:
        self._detach()
        self._context.term()

    def _lost(self, why: str) -> DaemonLost:
        return DaemonLost(
            f"the daemon {self._endpoints.name!r} is gone: {why}",
            "see its log; start this again, and the daemon too unless it was only reloaded",
        )

    # Reading experts

    def wave_experts(self, layer: int) -> int:
        """The most experts of a layer that one `read` may need."""
        return self.mapping.attached.wave_experts[self.experts.layer_class[layer]]

    def read(
        self,
        layer: int,
        experts: npt.NDArray[np.integer[Any]],
        use_counts: npt.NDArray[np.integer[Any]] | int,
        compute: Callable[[npt.NDArray[np.int64]], T],
    ) -> T:
        """`compute(addresses)` while the slabs of `experts` are safe to read.

        experts: distinct, at most `wave_experts(layer)`; use_counts: how often each was chosen.
        addresses: int64 [len(experts), 3], where gate, up and down of each begin.
        Raises what kept an expert from coming: ReadFailed, ModelChanged, DaemonLost.
        """
        for _ in range(MAX_REVOCATIONS):
            area, number = self.mapping.area, self.mapping.attached.client
            section = area.enter(self.mapping.table)
            try:
                slots = self._resident_slots(section, layer, experts, use_counts)
                result = compute(self._addresses(layer, experts, slots))
                revoked = bool(self.mapping.table.revoked[number])
            except ClientRevoked:
                revoked = True
            finally:
                area.leave()
            if not revoked:
                return result
            # We were stopped for too long and the slots may have been reused under us.
            self._past_hits, self._past_misses = self.lookups
            self._detach()
            self._attach()
        raise ClientRevoked(
            f"the daemon has given up on this client {MAX_REVOCATIONS} times in a row",
            "this process gets too little CPU time: end others, or raise --stall-deadline-ms",
        )

    def _resident_slots(
        self,
        section: int,
        layer: int,
        experts: npt.NDArray[np.integer[Any]],
        use_counts: npt.NDArray[np.integer[Any]] | int,
    ) -> npt.NDArray[np.int32]:
        table = self.mapping.table
        row = (table.gpu_slots if self._tier == GPU_TIER else table.host_slots)[layer]
        area = self.mapping.area
        area.uses[layer, experts] += np.uint32(use_counts)
        slots: npt.NDArray[np.int32] = row[experts]
        missing = slots < 0
        miss_count = int(np.count_nonzero(missing))
        area.count_lookups(len(experts) - miss_count, miss_count)
        if miss_count:
            wanted = experts[missing]
            self._fetch(section, layer, wanted.tolist())
            slots[missing] = self._wait(section, row, wanted)
        return slots

    def _fetch(self, section: int, layer: int, experts: list[int]) -> None:
        self._send(Fetch(self.mapping.attached.ticket, section, layer, experts))
        self.mapping.area.count_fetch()

    def _wait(
        self,
        section: int,
        row: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.integer[Any]],
    ) -> npt.NDArray[np.int32]:
        """Until all of `wanted` are in the table; a granted miss is pinned, so none goes again."""
        deadline_s = time.monotonic() + FETCH_DEADLINE_S
        while True:
            slots: npt.NDArray[np.int32] = row[wanted]
            if (slots >= 0).all():
                return slots
            if self.mapping.table.revoked[self.mapping.attached.client]:
                raise ClientRevoked("the daemon serves this client no more", "attach again")
            message = self._next_message(deadline_s)
            if isinstance(message, Failed) and message.section == section:
                raise Refused(message.code, message.message, message.remedy).error()

    def _next_message(self, deadline_s: float) -> Message | None:
        """Wait for a ring (None) or a message; raises refusals, DaemonLost, and at the deadline."""
        left_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
        events = dict(self._poller.poll(left_ms))
        if self._dealer in events:
            message = decode(self._dealer.recv())
            if isinstance(message, Refused):
                raise message.error()
            return message
        if self._doorbell in events:
            os.eventfd_read(self._doorbell)
        elif self._unix.fileno() in events:
            raise self._lost("it ended")
        elif not events:
            raise self._lost("it does not answer")
        return None

    def _addresses(
        self,
        layer: int,
        experts: npt.NDArray[np.integer[Any]],
        slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int64]:
        mapping = self.mapping
        offsets = mapping.stretch_offsets[slots] + mapping.part_deltas[layer, experts]
        return offsets + mapping.arena_address

    # Other requests

    @property
    def lookups(self) -> tuple[int, int]:
        """Hits and misses so far."""
        area = self.mapping.area
        return self._past_hits + area.hits, self._past_misses + area.misses

    def stats(self) -> dict[str, Any]:
        """The daemon's statistics, as in `streamd stats --json`."""
        self._send(StatsRequest())
        deadline_s = time.monotonic() + ANSWER_DEADLINE_S
        while True:
            message = self._next_message(deadline_s)
            if isinstance(message, Stats):
                return message.values

    def _send(self, message: Message) -> None:
        try:
            self._dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise self._lost("it takes no requests") from error
