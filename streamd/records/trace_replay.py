"""A recorded routing trace, replayed through the daemon's own choice of victims.

What `streamd --trace FILE` has written; see streamd/records/trace.py for its format. Keys are
`layer * n_experts + expert`.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError
from shared.experts import MAX_EXPERTS, MAX_LAYERS
from shared.policy import LfuAgeing
from shared.slots import ClassSlots
from shared.victims import VictimChooser

_FORMAT = "streamd-trace"
# What a trace of a long day may be; the rest of a longer one is not looked at.
MAX_FILE_BYTES = 1 << 28
# Of decode steps. More of them say little more, and take longer than a few seconds.
MAX_LOOKUPS = 200_000
_HEAD_CELLS = 4


@dataclass(frozen=True)
class RoutingTrace:
    """groups: keys of each decode step in each layer, in order, the first MAX_LOOKUPS of them."""

    n_layers: int
    n_experts: int
    top_k: int
    groups: list[list[int]]


def read_trace(path: Path) -> RoutingTrace:
    """ConfigError for a file that cannot be read or is no trace."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
            body = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    match _header(line):
        case {
            "format": str(kind),
            "n_layers": int(n_layers),
            "n_experts": int(n_experts),
            "top_k": int(top_k),
        } if (
            kind == _FORMAT and 0 < n_layers <= MAX_LAYERS and 0 < top_k <= n_experts <= MAX_EXPERTS
        ):
            cells = np.frombuffer(body, "<u2", len(body) // 2)
            groups = _decode_groups(cells, n_layers, n_experts, top_k)
            return RoutingTrace(n_layers, n_experts, top_k, groups)
    raise ConfigError(f"{path} is no routing trace", "record one with streamd --trace FILE")


def _header(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _decode_groups(
    cells: npt.NDArray[np.uint16], n_layers: int, n_experts: int, top_k: int
) -> list[list[int]]:
    """Of the records `client | layer | use count | count | experts`, those of decode steps."""
    groups: list[list[int]] = []
    at = 0
    while at + _HEAD_CELLS <= len(cells) and len(groups) < MAX_LOOKUPS // top_k:
        _, layer, use_count, count = cells[at : at + _HEAD_CELLS].tolist()
        experts = cells[at + _HEAD_CELLS : at + _HEAD_CELLS + count]
        at += _HEAD_CELLS + count
        is_whole = at <= len(cells) and layer < n_layers
        if is_whole and use_count == count <= top_k and bool((experts < n_experts).all()):
            groups.append((layer * n_experts + experts.astype(np.int64)).tolist())
    return groups


class ReplayedTier:
    """One tier's slots, victims and heat, without memory; all lookups are of one client.

    slot_counts: of each size class; layer_class: each layer's class, as ExpertIndex has it.
    """

    def __init__(
        self, slot_counts: Sequence[int], layer_class: Sequence[int], n_experts: int
    ) -> None:
        key_count = len(layer_class) * n_experts
        self._n_experts = n_experts
        self._layer_class = layer_class
        self._policy = LfuAgeing(key_count)
        self._uses: npt.NDArray[np.uint32] = np.zeros(key_count, np.uint32)
        self._slots = [ClassSlots(0, count, key_count, 1) for count in slot_counts]
        self._choosers = [VictimChooser(s, self._policy, self._absorb) for s in self._slots]
        self._slot_of: dict[int, int] = {}

    def serve(self, keys: Sequence[int]) -> list[int]:
        """Look up what one layer needs at once; what of it was missing, and is there now.

        None of them is evicted for another one of them: at most as many as there are slots.
        """
        if not keys:
            return []
        class_id = self._layer_class[keys[0] // self._n_experts]
        slots = self._slots[class_id]
        self._uses[list(keys)] += np.uint32(1)
        missed = [key for key in keys if key not in self._slot_of]
        pinned = [self._slot_of[key] for key in keys if key in self._slot_of]
        for slot in pinned:
            slots.pin(slot)
        for key in missed:
            slot = self._admit(slots, self._choosers[class_id], key)
            slots.pin(slot)
            pinned.append(slot)
        for slot in pinned:
            slots.unpin(slot)
        return missed

    def _admit(self, slots: ClassSlots, chooser: VictimChooser, key: int) -> int:
        if not slots.free:
            (victim,) = chooser.choose(1)
            del self._slot_of[slots.key_of(victim)]
            slots.retire(victim, 0)
            slots.reclaim(0)
        slot = slots.take(key)
        slots.publish(slot)
        self._slot_of[key] = slot
        return slot

    def _absorb(self) -> None:
        self._policy.absorb(self._uses)
        self._uses[:] = 0


def miss_shares(
    groups: Iterable[Sequence[int]], tiers: Sequence[ReplayedTier], first: int
) -> list[float]:
    """Of the lookups from group `first` on, the share that misses each of the tiers.

    What the first tier misses, the next one is asked for.
    """
    lookup_count = 0
    miss_counts = [0] * len(tiers)
    for number, group in enumerate(groups):
        keys: Sequence[int] = group
        lookup_count += len(keys) if number >= first else 0
        for at, tier in enumerate(tiers):
            keys = tier.serve(keys)
            miss_counts[at] += len(keys) if number >= first else 0
    return [count / max(1, lookup_count) for count in miss_counts]
