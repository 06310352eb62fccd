"""What can be done to a daemon and its clients. Each takes a second or so and leaves no process."""

import mmap
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import zmq
from campaign_world import DEADLINE_S, NAME, SOUND, STALL_DEADLINE_MS, Broken, Client, World

from shared import shm
from shared.daemon_options import CPU
from shared.residency import MAX_CLIENTS, TableShape
from shared.runtime_dir import Endpoints
from shared.wire import (
    GPU_TIER,
    HOST_TIER,
    MAX_HINT_EXPERTS,
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Fetch,
    Hint,
    Message,
    Refused,
    StatsRequest,
    decode,
    encode,
)

CROWD = MAX_CLIENTS
PRESSURE_BYTES = 256 << 20


def pause(rng: random.Random, longest_s: float = 0.4) -> None:
    time.sleep(rng.random() * longest_s)


# Processes


def kill_a_client(world: World, rng: random.Random) -> None:
    client = Client(world, "read", rng.getrandbits(32))
    try:
        client.hear()
        pause(rng)
    finally:
        client.end()


def stop_a_client(world: World, rng: random.Random) -> None:
    """For longer than the daemon waits for it; it has to do its section again."""
    client = Client(world, "read", rng.getrandbits(32))
    try:
        client.hear()
        pause(rng, 0.2)
        client.process.send_signal(signal.SIGSTOP)
        time.sleep(3 * STALL_DEADLINE_MS / 1000)
        client.process.send_signal(signal.SIGCONT)
        if client.ask()["torn"]:
            raise Broken("a client that had been stopped used slabs that were overwritten")
    finally:
        client.end()


def hold_on(world: World, rng: random.Random) -> None:
    """A client that enters a section and never leaves it."""
    client = Client(world, "hold")
    try:
        client.hear()
        time.sleep(STALL_DEADLINE_MS / 1000 + rng.random())
    finally:
        client.end()


def stop_the_daemon(world: World, rng: random.Random) -> None:
    world.daemon.send_signal(signal.SIGSTOP)
    pause(rng, 1.0)
    world.daemon.send_signal(signal.SIGCONT)


def kill_the_daemon(world: World, rng: random.Random) -> None:
    pause(rng)
    world.restart_daemon(signal.SIGKILL)


def end_the_daemon(world: World, rng: random.Random) -> None:
    pause(rng)
    world.restart_daemon(signal.SIGTERM)


def reload_the_daemon(world: World, _rng: random.Random) -> None:
    served_count = world.log.read_text().count("serving")
    world.daemon.send_signal(signal.SIGHUP)
    world.wait_until(
        lambda: world.log.read_text().count("serving") > served_count, "it serves again"
    )


# The drive and the memory


def fail_reads(world: World, rng: random.Random) -> None:
    world.set_drive(f"{rng.uniform(0.02, 0.5)} {rng.uniform(0, 0.3)} 5")
    time.sleep(0.5 + rng.random())
    world.set_drive(SOUND)


def slow_reads(world: World, rng: random.Random) -> None:
    world.set_drive(f"0 0.1 {rng.uniform(10, 200)}")
    time.sleep(0.5 + rng.random())
    world.set_drive(SOUND)


def take_memory(_world: World, rng: random.Random) -> None:
    with mmap.mmap(-1, PRESSURE_BYTES) as memory:
        for at in range(0, PRESSURE_BYTES, mmap.PAGESIZE):
            memory[at] = 1
        pause(rng)


# Clients that do not keep to the protocol


class Raw:
    """An attachment by hand. AssertionError unless the daemon answers."""

    def __init__(self, world: World) -> None:
        self._stack = ExitStack()
        self.unix = self._stack.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        )
        self.unix.connect(str(Endpoints.of(NAME).unix_path))
        shards = [list(shard) for shard in world.index.fingerprints]
        tier = HOST_TIER if world.device == CPU else GPU_TIER
        self.unix.sendall(encode(Attach(os.getpid(), shards, tier)))

    def answer(self) -> Message:
        self.unix.settimeout(DEADLINE_S)
        frame, self.descriptors, _, _ = socket.recv_fds(self.unix, MAX_MESSAGE_BYTES, 8)
        if not frame:
            raise Broken("attaching was not answered")
        for fd in self.descriptors:
            self._stack.callback(os.close, fd)
        return decode(frame)

    def close(self) -> None:
        self._stack.close()


def _dealer(stack: ExitStack) -> zmq.Socket[bytes]:
    context = stack.enter_context(zmq.Context())
    dealer = stack.enter_context(context.socket(zmq.DEALER))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(Endpoints.of(NAME).zmq_url)
    return dealer


def talk_garbage(_world: World, rng: random.Random) -> None:
    """Bytes, damaged and cut messages, other versions, too large ones; each is answered or cut."""
    sound = [encode(StatsRequest()), encode(Fetch(1, 2, 3, [4])), encode(Hint(1, 2, 3, [4], 1))]
    frames = [rng.randbytes(rng.randrange(1, 200)) for _ in range(50)]
    for _ in range(50):
        damaged = bytearray(rng.choice(sound))
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        frames += [bytes(damaged), rng.choice(sound)[: rng.randrange(1, 20)]]
    # [version, ...]: a small integer in one byte, behind the array's head.
    frames += [sound[0][:1] + bytes([version]) + sound[0][2:] for version in range(16)]
    with ExitStack() as stack:
        dealer = _dealer(stack)
        for frame in frames:
            dealer.send(frame)
        dealer.send(encode(StatsRequest()))
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        try:
            while isinstance(decode(dealer.recv()), Refused):
                pass
        except zmq.Again as error:
            raise Broken("a question after garbage is not answered") from error
        _dealer(stack).send(bytes(MAX_MESSAGE_BYTES + 1))
    for frame in (rng.randbytes(100), encode(StatsRequest()), bytes(1 << 16), b"\x93"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unix:
            unix.settimeout(DEADLINE_S)
            unix.connect(str(Endpoints.of(NAME).unix_path))
            unix.sendall(frame)
            with suppress(ConnectionResetError):
                if not isinstance(decode(unix.recv(MAX_MESSAGE_BYTES)), Refused):
                    raise Broken("garbage was let in")


def flood_with_hints(world: World, rng: random.Random) -> None:
    """Of experts that exist and that do not, for sections that pass and that never come: over its
    own connection, and over ZeroMQ, where all are refused."""
    with ExitStack() as stack:
        raw = Raw(world)
        stack.callback(raw.close)
        attached = raw.answer()
        if isinstance(attached, Refused):
            return
        assert isinstance(attached, Attached)
        dealer = _dealer(stack)
        for _ in range(3000):
            experts = [rng.randrange(-3, attached.n_experts + 3) for _ in range(MAX_HINT_EXPERTS)]
            layer = rng.randrange(-1, attached.n_layers + 1)
            section = rng.choice((0, 1, 5, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)))
            hint = encode(Hint(attached.ticket, section, layer, experts, len(experts)))
            with suppress(zmq.Again):  # its queue is full, which is its trouble
                dealer.send(hint, zmq.NOBLOCK)
            with suppress(OSError):
                raw.unix.send(hint, socket.MSG_DONTWAIT)


def lie_in_shared_memory(world: World, rng: random.Random) -> None:
    """Anything at all in the area that is the client's to write, its doorbell never answered."""
    with ExitStack() as stack:
        raw = Raw(world)
        stack.callback(raw.close)
        attached = raw.answer()
        if isinstance(attached, Refused):
            return
        assert isinstance(attached, Attached)
        shape = TableShape(attached.n_layers, attached.n_experts)
        area = shm.map_writable(raw.descriptors[1], shape.area_bytes)
        stack.callback(area.close)
        dealer = _dealer(stack)
        os.set_blocking(raw.descriptors[-1], True)  # as if that could make the daemon wait for us
        for _ in range(20):
            fill = rng.choice((b"\xff", b"\0", b"\x7f", b""))
            area[:] = fill * shape.area_bytes or rng.randbytes(shape.area_bytes)
            section = int.from_bytes(area[8:16], "little")
            experts = [rng.randrange(attached.n_experts)]
            fetch = encode(Fetch(attached.ticket, section, rng.randrange(4), experts))
            dealer.send(fetch)
            with suppress(OSError):  # its queue is full; what is refused is never read
                raw.unix.send(fetch, socket.MSG_DONTWAIT)
            world.stats()
            time.sleep(0.02)


def come_in_a_crowd(world: World, rng: random.Random) -> None:
    """As many clients at once as there may be; each is let in or told why not."""
    with ExitStack() as stack:
        crowd = []
        for _ in range(CROWD):
            crowd.append(Raw(world))
            stack.callback(crowd[-1].close)
        answers = [raw.answer() for raw in crowd]
        let_in = sum(isinstance(answer, Attached) for answer in answers)
        refused = sum(isinstance(answer, Refused) for answer in answers)
        if let_in + refused < CROWD:
            raise Broken(f"of {CROWD} at once {let_in} came in and {refused} were refused")
        pause(rng, 0.2)


def connect_and_say_nothing(_world: World, rng: random.Random) -> None:
    with ExitStack() as stack:
        silent = []
        for _ in range(20):
            unix = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            unix.connect(str(Endpoints.of(NAME).unix_path))
            silent.append(unix)
        pause(rng)
        if select.select(silent, [], [], 0)[0]:
            raise Broken("connections that say nothing were cut")


FAULTS: dict[str, Callable[[World, random.Random], None]] = {
    fault.__name__: fault
    for fault in (
        kill_a_client,
        stop_a_client,
        hold_on,
        stop_the_daemon,
        kill_the_daemon,
        end_the_daemon,
        reload_the_daemon,
        fail_reads,
        slow_reads,
        take_memory,
        talk_garbage,
        flood_with_hints,
        lie_in_shared_memory,
        come_in_a_crowd,
        connect_and_say_nothing,
    )
}
# After these a client's answer may be a refusal that says so.
EXCUSES = {"fail_reads": {"read-failed"}}
