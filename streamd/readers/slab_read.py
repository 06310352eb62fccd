"""What is asked of a reader, and what it answers."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from shared.errors import StreamError


class Priority(IntEnum):
    """Who goes first. What is read ahead must never hold up what somebody waits for."""

    DEMAND = 0
    PREFETCH = 1
    BACKFILL = 2


class Extent(NamedTuple):
    """`length` bytes at `offset` of a file. `target`: aligned memory for the widened read."""

    file_index: int
    offset: int
    length: int
    target: memoryview


class SlabRead(NamedTuple):
    key: Hashable
    extents: tuple[Extent, ...]  # empty ones are skipped; at least one is not
    owner: int = 0  # for whom: owners take turns


class Completion(NamedTuple):
    """All of a slab has landed, or nothing more of it will: its targets are the caller's again."""

    key: Hashable
    error: StreamError | None  # ReadFailed or ModelChanged: the targets hold no valid slab
    bytes_read: int  # from the disk: widened
    latency_ms: float  # since submit, waiting included


@dataclass(frozen=True, slots=True)
class ReadStats:
    """Counts since the start; `in_flight` and `waiting` are of this moment."""

    engine: str
    reads: int
    bytes_read: int  # from the disk: widened, repeated or failed reads included
    useful_bytes: int  # of slabs completed without an error
    retries: int
    slabs: int  # completed without an error, resident tensors too
    failed_slabs: int
    in_flight_bytes: int
    in_flight_byte_s: float  # their sum over time: a difference by the time between is a mean
    in_flight_reads: int
    waiting_reads: int
    limit_bytes: int  # in flight at the most, found while reading
    latency_ms_p50: float  # of one read, from the engine taking it to its end
    latency_ms_p99: float
