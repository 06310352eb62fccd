"""Where each slot lies in the host arena.

    arena   [ class 0: slot 0 | slot 1 | ... ][ class 1: slot n | ... ]
    slot    [ gate stretch | up stretch | down stretch ]
    stretch [ up to align-1 bytes | payload | rest of the last block ]

A direct read must begin and end on multiples of `align` in the file, so a stretch holds the widened
read: its payload begins `file offset % align` into it. A stretch is as long as the longest widened
read it can get, which is `roundup(align + payload, align)`. Slots of one size class have the same
stretches; slot numbers run through all classes.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PART_COUNT = 3  # gate, up, down
# In a GPU arena nothing is read directly: each payload begins with its stretch, on a boundary that
# every vector load and copy engine likes.
GPU_ALIGN_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def stretch_bytes(payload_bytes: int, align: int) -> int:
    return round_up(align + payload_bytes, align)


def slot_bytes(part_bytes: tuple[int, ...], align: int) -> int:
    """What one slot of these parts takes in the arena."""
    return sum(stretch_bytes(part, align) for part in part_bytes)


@dataclass(frozen=True)
class ArenaLayout:
    """Slots of every size class, back to back.

    class_part_bytes: for each size class the payload bytes of gate, up and down.
    class_slot_counts: slots of each size class.
    align: bytes; file offsets, lengths and addresses of direct reads are multiples of it.
    """

    class_part_bytes: tuple[tuple[int, int, int], ...]
    class_slot_counts: tuple[int, ...]
    align: int

    @property
    def slot_count(self) -> int:
        return sum(self.class_slot_counts)

    @property
    def total_bytes(self) -> int:
        return sum(
            count * slot_bytes(parts, self.align)
            for parts, count in zip(self.class_part_bytes, self.class_slot_counts, strict=True)
        )

    def first_slot(self, class_id: int) -> int:
        return sum(self.class_slot_counts[:class_id])

    def stretches(self) -> npt.NDArray[np.int64]:
        """int64 [slot_count, 3, 2]: offset in the arena and length of each stretch, bytes."""
        out = np.empty((self.slot_count, PART_COUNT, 2), np.int64)
        offset = slot = 0
        for parts, count in zip(self.class_part_bytes, self.class_slot_counts, strict=True):
            for _ in range(count):
                for part, payload_bytes in enumerate(parts):
                    length = stretch_bytes(payload_bytes, self.align)
                    out[slot, part] = (offset, length)
                    offset += length
                slot += 1
        return out
