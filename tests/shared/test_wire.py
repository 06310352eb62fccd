"""Messages survive the wire; whatever else arrives is a ProtocolMismatch and nothing else."""

import os
import types
import typing
from dataclasses import fields

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import DaemonBusy, ProtocolMismatch
from shared.wire import (
    MAX_HINT_EXPERTS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Failed,
    Fetch,
    Hint,
    Message,
    Refused,
    Stats,
    Stop,
    decode,
    encode,
)

KINDS = typing.get_args(Message)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
# What a statistics value may be: as in JSON.
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def values_of(hint):
    if isinstance(hint, types.GenericAlias):
        if hint.__origin__ is list:
            return st.lists(values_of(hint.__args__[0]), max_size=5)
        return st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
    return {
        int: INTEGERS,
        str: st.text(max_size=20),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
    }[hint]


def messages_of(kind):
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in fields(kind)})


def frame_of(*parts):
    return msgpack.packb(list(parts))


@given(st.one_of([messages_of(kind) for kind in KINDS]))
def test_every_message_comes_back_as_it_was(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=64))
def test_garbage_is_a_mismatch(frame):
    with pytest.raises(ProtocolMismatch):
        decode(frame)


@given(
    st.one_of([messages_of(kind) for kind in KINDS]).map(encode),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_a_damaged_message_is_a_mismatch_or_another_sound_one(frame, damage, cut):
    damaged = bytearray(frame)
    for place, byte in damage:
        damaged[place % len(damaged)] = byte
    for mangled in (bytes(damaged), frame[: cut % len(frame)], frame + b"\x00"):
        try:
            message = decode(mangled)
        except ProtocolMismatch:
            continue
        assert isinstance(message, KINDS)
        assert encode(decode(encode(message))) == encode(message)


@given(VALUES)
def test_any_other_structure_is_a_mismatch(value):
    with pytest.raises(ProtocolMismatch):
        decode(msgpack.packb(value))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_version_is_named_whatever_it_says(version):
    with pytest.raises(ProtocolMismatch, match=f"protocol version {version}, this") as refusal:
        decode(frame_of(version, "Novelty", {"something": "new"}))
    assert "restart the daemon" in refusal.value.remedy


@pytest.mark.parametrize(
    "parts",
    [
        (PROTOCOL_VERSION, "Novelty", {}),
        (PROTOCOL_VERSION, "Message", {}),
        (PROTOCOL_VERSION, "__class__", {}),
        (PROTOCOL_VERSION, b"Stop", {}),
        (PROTOCOL_VERSION, "Stop", []),
        (PROTOCOL_VERSION, "Stop"),
        (PROTOCOL_VERSION, "Stop", {}, {}),
        (str(PROTOCOL_VERSION), "Stop", {}),
        (float(PROTOCOL_VERSION), "Stop", {}),
        (None, "Stop", {}),
        (),
    ],
)
def test_what_is_no_message(parts):
    with pytest.raises(ProtocolMismatch):
        decode(frame_of(*parts))


GOOD_FETCH = {"ticket": 1, "section": 2, "layer": 3, "experts": [4, 5]}


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": "1"},
        {"ticket": 1.0},
        {"ticket": True},
        {"ticket": None},
        {"experts": 4},
        {"experts": ["4"]},
        {"experts": [4, None]},
        {"experts": {"4": 5}},
        {"extra": 0},
    ],
)
def test_fields_of_a_wrong_type(change):
    assert decode(frame_of(PROTOCOL_VERSION, "Fetch", GOOD_FETCH)) == Fetch(1, 2, 3, [4, 5])
    with pytest.raises(ProtocolMismatch, match="Fetch with wrong fields"):
        decode(frame_of(PROTOCOL_VERSION, "Fetch", GOOD_FETCH | change))


@pytest.mark.parametrize("name", GOOD_FETCH)
def test_a_missing_field(name):
    body = {key: value for key, value in GOOD_FETCH.items() if key != name}
    with pytest.raises(ProtocolMismatch, match="Fetch with wrong fields"):
        decode(frame_of(PROTOCOL_VERSION, "Fetch", body))


def test_keys_that_are_no_names():
    with pytest.raises(ProtocolMismatch, match="Stats with wrong fields"):
        decode(frame_of(PROTOCOL_VERSION, "Stats", {"values": {b"hits": 1}}))
    for body in (b"\x81\x01\x02", b"\x81\xc4\x01a\x02", b"\x81\x90\x02", b"\x81\xc0\x02"):
        frame = b"\x93" + msgpack.packb(PROTOCOL_VERSION) + msgpack.packb("Stats") + body
        with pytest.raises(ProtocolMismatch):
            decode(frame)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc7\x03\xff\x00\x00\x00",  # a time stamp of a length that there is not
        b"\xc1",
        b"\x91" * 3000,
    ],
    ids=["list", "map", "bytes", "text", "time", "unused", "deep"],
)
def test_headers_that_promise_too_much(body):
    for frame in (body, b"\x93" + body, body * 2):
        with pytest.raises(ProtocolMismatch):
            decode(frame)


def test_the_longest_message():
    experts = [7] * (MAX_MESSAGE_BYTES - 200)
    frame = encode(Fetch(1, 2, 3, experts))
    assert decode(frame) == Fetch(1, 2, 3, experts)
    with pytest.raises(ProtocolMismatch, match=f"{MAX_MESSAGE_BYTES} is the most"):
        decode(frame + bytes(MAX_MESSAGE_BYTES))
    with pytest.raises(AssertionError, match="Fetch of"):
        encode(Fetch(1, 2, 3, experts * 2))


def test_the_longest_hint():
    """Its bound is checked by who reads it: what a peer sends is never trusted."""
    hint = Hint(1, 2, 3, list(range(MAX_HINT_EXPERTS)), 4)
    assert decode(encode(hint)) == hint
    with pytest.raises(ProtocolMismatch, match=f"{MAX_HINT_EXPERTS} go"):
        decode(encode(Hint(1, 2, 3, list(range(MAX_HINT_EXPERTS + 1)), 4)))


def test_paths_that_are_no_text_survive():
    """A file name may hold any bytes; Python has it as text with surrogates."""
    path = os.fsdecode(b"/models/\xff\xfe.gguf")
    failed = Failed(1, 2, 3, "read-failed", f"cannot read {path}", "")
    received = decode(encode(failed))
    assert received == failed
    assert os.fsencode(received.message) == b"cannot read /models/\xff\xfe.gguf"
    assert decode(encode(Stats({"model": path}))).values == {"model": path}


def test_a_refusal_is_raised_as_what_it_was():
    refused = decode(encode(Refused.because(DaemonBusy("no room", "end another client"))))
    error = refused.error()
    assert type(error) is DaemonBusy
    assert (error.message, error.remedy) == ("no room", "end another client")


def test_messages_without_fields():
    assert decode(encode(Stop())) == Stop()
