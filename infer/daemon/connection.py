"""The way to the daemon: attach, map its memory, send requests, wait for answers and rings."""

import os
import select
import socket
import struct
import time
from contextlib import ExitStack, suppress

import zmq

from infer.daemon.gpu_mapping import map_gpu_tier
from infer.daemon.mapping import Mapping, map_host_tier, map_memory
from shared.errors import (
    DaemonBusy,
    DaemonLost,
    ModelChanged,
    PlanError,
    ProtocolMismatch,
    cause_of,
)
from shared.experts import ExpertIndex
from shared.gguf_index import GgufIndex
from shared.runtime_dir import Endpoints, running_daemons
from shared.wire import (
    GPU_TIER,
    MAX_ATTACHED_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Fetch,
    Hint,
    Message,
    Refused,
    decode,
    encode,
)

ATTACH_DEADLINE_S = 30.0
# Reading the resident tensors of the largest models from a slow disk.
LOAD_DEADLINE_S = 600.0
CONNECT_PAUSE_S = 0.05
ROOM_DEADLINE_S = 5.0
ALIVE_CHECK_S = 0.1
# A daemon takes what is sent within a turn of its loop; one that is stopped does not.
SEND_DEADLINE_S = 30
# A byte each. What is left of more rings is one ring more.
MAX_RINGS = 4096


class Connection:
    """At most one attachment to a daemon at a time; `mapping` is the present one's memory.

    tier: HOST_TIER or GPU_TIER.
    """

    mapping: Mapping

    def __init__(self, name: str, index: GgufIndex, experts: ExpertIndex, tier: str) -> None:
        self._experts = experts
        self._tier = tier
        self._endpoints = Endpoints.find(name)
        self._shards = [list(shard) for shard in index.fingerprints]
        self._context = zmq.Context(io_threads=1)
        self._channels = ExitStack()
        try:
            self.attach()
        except BaseException:
            self._context.term()
            raise

    @property
    def attached(self) -> bool:
        return hasattr(self, "mapping")

    def attach(self) -> None:
        """Raises DaemonLost, ProtocolMismatch or a refusal; nothing is attached then."""
        self._channels.close()  # of a `detach` that was broken off
        self._endpoints = Endpoints.find(self._endpoints.name)
        with ExitStack() as stack:
            how = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
            self._unix = stack.enter_context(socket.socket(socket.AF_UNIX, how))
            attached, descriptors = self._shake_hands()
            self._doorbell = descriptors.pop()
            stack.callback(os.close, self._doorbell)
            map_tier = map_gpu_tier if self._tier == GPU_TIER else map_host_tier
            mapping = map_memory(attached, descriptors, self._experts, map_tier)
            self._dealer = stack.enter_context(self._context.socket(zmq.DEALER))
            self._listen()
            self._channels = stack.pop_all()
            self.mapping = mapping

    def _listen(self) -> None:
        """Make ready what requests go through and answers come from."""
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._dealer.connect(self._endpoints.zmq_url)
        # By the kernel: a timeout of Python's is waited for even where MSG_DONTWAIT is said.
        self._unix.settimeout(None)
        wait = struct.pack("ll", SEND_DEADLINE_S, 0)
        self._unix.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._hangup = select.poll()
        self._hangup.register(self._unix, select.POLLRDHUP)
        self._alive_until_s = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._doorbell, zmq.POLLIN)
        self._poller.register(self._unix.fileno(), zmq.POLLIN)

    def attach_when_there_is_room(self) -> None:
        """As `attach`, for a client that has lost its place: others may have come meanwhile."""
        end_s = time.monotonic() + ROOM_DEADLINE_S
        while not self.attached:
            try:
                self.attach()
            except (DaemonBusy, PlanError):
                if time.monotonic() > end_s:
                    raise
                time.sleep(CONNECT_PAUSE_S)

    def _shake_hands(self) -> tuple[Attached, list[int]]:
        self._unix.settimeout(ATTACH_DEADLINE_S)
        try:
            self._connect()
            self._unix.sendall(encode(Attach(os.getpid(), self._shards, self._tier)))
            frame, descriptors, _, _ = socket.recv_fds(
                self._unix, MAX_MESSAGE_BYTES, MAX_ATTACHED_DESCRIPTORS
            )
            for fd in descriptors:  # Python 3.11 takes no heed of flags given to recv_fds
                os.set_inheritable(fd, False)
        except OSError as error:
            raise self.lost(f"it cannot be reached: {cause_of(error)}") from error
        if not frame:
            raise self.lost("it hung up")
        try:
            return _attached(frame, len(descriptors), self._endpoints.name), descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

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

    def detach(self) -> None:
        """Let go of the daemon and of its memory. Without an attachment it does nothing."""
        if not self.attached:
            return
        del self.mapping
        self._channels.close()

    def close(self) -> None:
        self.detach()
        self._context.term()

    def lost(self, why: str) -> DaemonLost:
        return DaemonLost(
            f"the daemon {self._endpoints.name!r} is gone: {why}",
            "see its log; start this again, and the daemon too unless it was only reloaded",
        )

    # Requests

    def send(self, message: Message) -> None:
        try:
            self._dealer.send(encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise self.lost("it takes no requests") from error

    def fetch(self, message: Fetch) -> None:
        """Over the connection itself, which the daemon's main loop reads."""
        try:
            self._unix.send(encode(message))
        except BlockingIOError as error:
            raise self.lost("it takes no requests") from error
        except OSError as error:
            raise self.lost("it ended") from error

    def hint(self, message: Hint) -> None:
        """As `fetch`; a daemon that has not taken the last ones misses it."""
        with suppress(OSError):
            self._unix.send(encode(message), socket.MSG_DONTWAIT)

    def check_alive(self, at_once: bool = False) -> None:
        """DaemonLost if the daemon has ended; looks at most every ALIVE_CHECK_S unless `at_once`.

        Hits need no daemon, and a long prompt may be made of nothing else.
        """
        now_s = time.monotonic()
        if at_once or now_s >= self._alive_until_s:
            if self._hangup.poll(0):
                raise self.lost("it ended")
            self._alive_until_s = now_s + ALIVE_CHECK_S

    def wait_for_end(self, wake_fd: int) -> bool:
        """Until the daemon has ended, or `wake_fd` is readable: False."""
        poller = select.poll()
        poller.register(self._unix, select.POLLRDHUP)
        poller.register(wake_fd, select.POLLIN)
        return self._unix.fileno() in dict(poller.poll())

    def next_message(self, deadline_s: float) -> Message | None:
        """Wait for a ring (None) or a message; raises refusals, DaemonLost, and at the deadline."""
        left_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
        events = dict(self._poller.poll(left_ms))
        if self._dealer in events:
            return self._heard(self._dealer.recv())
        if self._unix.fileno() in events:  # before the bell: it may say why that has been shut
            return self._heard(self._hear())
        if self._doorbell in events and not os.read(self._doorbell, MAX_RINGS):
            raise self.lost("it ended")
        if not events:
            raise self.lost("it does not answer")
        return None

    def _hear(self) -> bytes:
        try:
            frame = self._unix.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise self.lost("it ended") from error
        if not frame:
            raise self.lost("it ended")
        return frame

    def _heard(self, frame: bytes) -> Message:
        message = decode(frame)
        if isinstance(message, Refused):
            raise message.error()
        return message


def _attached(frame: bytes, descriptor_count: int, name: str) -> Attached:
    """What the daemon `name` answers to `attach`; raises its refusal, and ProtocolMismatch."""
    answer = decode(frame)
    if isinstance(answer, Refused):
        error = answer.error()
        if isinstance(error, ModelChanged):
            raise ModelChanged(
                f"the daemon {name!r} refuses: {error.message}",
                f"{error.remedy}; or say which daemon or file is meant with --name or --model",
            )
        raise error
    if not isinstance(answer, Attached) or descriptor_count != answer.descriptor_count:
        raise ProtocolMismatch(
            "the daemon answered attach with something else",
            "daemon and client are of different versions: restart the daemon",
        )
    return answer
