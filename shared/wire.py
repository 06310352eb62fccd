"""The messages between daemon and client, and their form on the wire.

A message is one msgpack array `[PROTOCOL_VERSION, kind, {field: value}]`, at most
MAX_MESSAGE_BYTES long. Fields are checked against the dataclass when a message is read: what a peer
sends is never trusted. Attach and its answer travel over a unix socket (the answer carries
descriptors); over the same connection an attached client sends its fetches and hints, and is told
what has become of them. Everything else travels over ZeroMQ.
"""

import types
import typing
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from shared.errors import ProtocolMismatch, StreamError, from_wire

PROTOCOL_VERSION = 7
MAX_MESSAGE_BYTES = 1 << 20
MAX_HINT_EXPERTS = 64
HOST_TIER = "host"
GPU_TIER = "gpu"

# Names of files need not be valid UTF-8; Python has them as str with surrogates for odd bytes.
_UNICODE_ERRORS = "surrogateescape"
_UPGRADE = "daemon and client are of different versions: restart the daemon"


@dataclass(frozen=True)
class Attach:
    """Client -> daemon: let me in.

    shards: [device, inode, size, mtime_ns] of each model file.
    tier: HOST_TIER or GPU_TIER, whose slots the client computes from.
    """

    pid: int
    shards: list[list[int]]
    tier: str


@dataclass(frozen=True)
class Attached:
    """The answer; its descriptors are, in order: table, client area, arena, resident, the host's
    resident where layers are streamed, doorbell.

    Slots, waves, arena and resident tensors are those of the tier that was asked for; a GPU's two
    descriptors are allocations to import, and their sizes whole multiples of its granularity.
    device_uuid: of the GPU, in hexadecimal, "" for the host tier. Ordinals differ between
    processes (CUDA_VISIBLE_DEVICES); device_ordinal, the daemon's own, is for messages (host: -1).
    client_bytes: GPU memory that the daemon has left for a client's KV cache and activations (host:
    0); client_limited: it must not take more, though there may be more.
    resident_bytes: of the host tier, 0 where the tensors are in GPU memory alone.
    client: index in the table's `revoked`; ticket: names this attachment in requests.
    streamed_layers: those whose matrices are not among a GPU's resident tensors; the client copies
    them from the host's, of host_resident_bytes, laid out for reads aligned to host_align (both 0
    where there are none). See shared/streamed.py.
    """

    client: int
    ticket: int
    n_layers: int
    n_experts: int
    align: int
    class_slot_counts: list[int]
    wave_experts: list[int]
    arena_bytes: int
    resident_bytes: int
    device_ordinal: int
    device_uuid: str
    client_bytes: int
    client_limited: bool
    streamed_layers: list[int]
    host_resident_bytes: int
    host_align: int

    @property
    def descriptor_count(self) -> int:
        return MAX_ATTACHED_DESCRIPTORS if self.streamed_layers else MAX_ATTACHED_DESCRIPTORS - 1


MAX_ATTACHED_DESCRIPTORS = 6


@dataclass(frozen=True)
class Fetch:
    """Client -> daemon: I wait for these experts of `layer` in my section `section`."""

    ticket: int
    section: int
    layer: int
    experts: list[int]


@dataclass(frozen=True)
class Hint:
    """Client -> daemon: I may soon need these experts of `layer`, the likeliest first.

    section: the one in which I expect to read that layer (decode: my section + layers ahead);
    once I am past it the hint has expired. At most MAX_HINT_EXPERTS. The first upload_count of them
    are likely enough for a GPU slot, the others only for a read; a client of the host tier has
    nothing to say there. Never answered, not even with a refusal, and never for what the table
    names already: the daemon may drop it.
    """

    ticket: int
    section: int
    layer: int
    experts: list[int]
    upload_count: int


@dataclass(frozen=True)
class Failed:
    """Daemon -> client: this expert will not come, and why."""

    section: int
    layer: int
    expert: int
    code: str
    message: str
    remedy: str


@dataclass(frozen=True)
class StatsRequest:
    """watching: from a program that asks again and again; `since_last` ignores it."""

    watching: bool = False


@dataclass(frozen=True)
class Stats:
    values: dict[str, Any]


@dataclass(frozen=True)
class HeatRequest:
    """How much each expert is used, and where it is."""


@dataclass(frozen=True)
class Heat:
    """Arrays [n_layers, n_experts], rows after one another.

    heat: float32, uses by now, older ones counting less. tiers: uint8, 1 if the expert is in a host
    slot, plus 2 if it is in a GPU slot. dense_layers have no experts.
    """

    n_layers: int
    n_experts: int
    dense_layers: list[int]
    heat: bytes
    tiers: bytes


IN_HOST, IN_GPU = 1, 2
# What a message has room for; the largest model we know of has 19,200 experts.
MAX_HEAT_CELLS = 200_000


@dataclass(frozen=True)
class Stop:
    pass


@dataclass(frozen=True)
class Reload:
    """Open the model anew; clients lose their attachment."""


@dataclass(frozen=True)
class Stopping:
    """The answer to Stop and Reload."""

    pid: int


@dataclass(frozen=True)
class Refused:
    """The answer to anything the daemon will not do."""

    code: str
    message: str
    remedy: str

    @classmethod
    def because(cls, error: StreamError) -> "Refused":
        return cls(error.code, error.message, error.remedy)

    def error(self) -> StreamError:
        return from_wire(self.code, self.message, self.remedy)


Message = (
    Attach
    | Attached
    | Fetch
    | Hint
    | Failed
    | StatsRequest
    | Stats
    | HeatRequest
    | Heat
    | Stop
    | Reload
    | Stopping
    | Refused
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message)}
_HINTS = {kind: typing.get_type_hints(kind) for kind in _KINDS.values()}


def encode(message: Message) -> bytes:
    body = {field.name: getattr(message, field.name) for field in fields(message)}
    frame: bytes = msgpack.packb(
        [PROTOCOL_VERSION, type(message).__name__, body], unicode_errors=_UNICODE_ERRORS
    )
    assert len(frame) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} of {len(frame)} bytes"
    return frame


def decode(frame: bytes) -> Message:
    """The message in `frame`; ProtocolMismatch for anything else, whatever it is."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolMismatch(f"a message of {len(frame)} bytes, {MAX_MESSAGE_BYTES} is the most")
    try:
        unpacked = msgpack.unpackb(frame, unicode_errors=_UNICODE_ERRORS)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolMismatch(f"a message that is not msgpack: {error}", _UPGRADE) from error
    match unpacked:
        case [int(version), str(), dict()] if version != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"protocol version {version}, this side speaks {PROTOCOL_VERSION}", _UPGRADE
            )
        case [int(), str(kind), dict(body)] if kind in _KINDS:
            return _checked(_KINDS[kind], body)
    raise ProtocolMismatch("a message of unknown kind", _UPGRADE)


def _checked(kind: type, body: dict[Any, Any]) -> Message:
    hints = _HINTS[kind]
    if body.keys() != hints.keys() or not all(_fits(body[n], h) for n, h in hints.items()):
        raise ProtocolMismatch(f"{kind.__name__} with wrong fields", _UPGRADE)
    message: Message = kind(**body)
    if isinstance(message, Hint) and len(message.experts) > MAX_HINT_EXPERTS:
        raise ProtocolMismatch(f"a hint of {len(message.experts)} experts, {MAX_HINT_EXPERTS} go")
    return message


def _fits(value: object, hint: Any) -> bool:
    """Whether a decoded value has the type that the field declares."""
    if isinstance(hint, types.GenericAlias):
        container, args = typing.cast(type, hint.__origin__), hint.__args__
        if not isinstance(value, container):
            return False
        if container is list:
            items = typing.cast(list[object], value)
            if isinstance(args[0], type):
                return {*map(type, items)} <= {args[0]}
            return all(_fits(item, args[0]) for item in items)
        return all(isinstance(key, str) for key in typing.cast(dict[object, object], value))
    return type(value) is hint
