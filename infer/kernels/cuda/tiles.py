"""Lists of work for the experts' kernels: tiles of pairs, and how they reach the device."""

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from infer.kernels.cuda.linear import TILE_TOKENS
from infer.kernels.interface import ExpertBatch

_RING_SIZE = 8


class Tiles(ctypes.Structure):
    """`Tiles` of tiles.cuh."""

    _fields_ = (
        ("expert", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("top_k", ctypes.c_int),
    )


class Plan(NamedTuple):
    """Addresses [experts] of each part and the tiles over them, on the device."""

    gate: int
    up: int
    down: int
    tiles: Tiles
    tile_count: int
    most_pairs: int  # in a tile


class TileLists:
    """Fills pinned memory and copies it over; a buffer is filled again once its copy is done."""

    def __init__(self, device: torch.device, experts: int, pairs: int) -> None:
        tiles = experts + pairs // TILE_TOKENS
        self._experts, self._tile_room, self._pairs = experts, tiles, pairs
        size = 3 * 8 * experts + 4 * (3 * tiles + pairs)
        self._on_device = torch.empty(size, dtype=torch.uint8, device=device)
        self._ring = [torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(_RING_SIZE)]
        self._copied = [torch.cuda.Event() for _ in range(_RING_SIZE)]
        self._turn = 0

    def send(self, batch: ExpertBatch, top_k: int, tile_pairs: int) -> Plan:
        """Queue the copy of a batch's lists on the current stream. tile_pairs: TILE_TOKENS or more
        pairs of a tile, at the most."""
        assert tile_pairs >= TILE_TOKENS
        starts = batch.group_start.astype(np.int64)
        counts = np.diff(starts)
        tiles_each = -(-counts // tile_pairs)
        expert = np.repeat(np.arange(len(counts)), tiles_each)
        within = np.arange(len(expert)) - np.repeat(np.cumsum(tiles_each) - tiles_each, tiles_each)
        first = starts[expert] + tile_pairs * within
        end = np.minimum(first + tile_pairs, starts[expert + 1])
        assert len(counts) <= self._experts
        assert len(batch.pairs) <= self._pairs
        assert len(expert) <= self._tile_room
        self._copy((batch.gate, batch.up, batch.down), (expert, first, end, batch.pairs))
        base = self._on_device.data_ptr()
        lists = base + 24 * self._experts
        room = 4 * self._tile_room
        return Plan(
            *(base + 8 * self._experts * part for part in range(3)),
            Tiles(lists, lists + room, lists + 2 * room, lists + 3 * room, top_k),
            len(expert),
            int((end - first).max(initial=0)),
        )

    def _copy(self, addresses: tuple[np.ndarray, ...], lists: tuple[np.ndarray, ...]) -> None:
        index = self._turn
        self._turn = (index + 1) % _RING_SIZE
        self._copied[index].synchronize()
        buffer = self._ring[index]
        words = buffer.numpy()
        long_words = words[: 24 * self._experts].view(np.int64).reshape(3, -1)
        for row, values in zip(long_words, addresses, strict=True):
            row[: len(values)] = values
        short_words = words[24 * self._experts :].view(np.int32)
        for part, values in enumerate(lists):
            short_words[part * self._tile_room :][: len(values)] = values
        self._on_device.copy_(buffer, non_blocking=True)
        self._copied[index].record()
