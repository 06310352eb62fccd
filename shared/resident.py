"""Where each resident (non-expert) tensor lies in the region that the daemon shares.

Both sides derive the same layout from the GGUF index and the read alignment: one stretch a tensor,
as in shared/arena.py, in file order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.arena import stretch_bytes
from shared.gguf_shard import TensorInfo


@dataclass(frozen=True)
class ResidentTensor:
    """offset: of the stretch; payload_offset: of the first byte of the tensor in it."""

    tensor: TensorInfo
    offset: int
    capacity_bytes: int
    payload_offset: int


@dataclass(frozen=True)
class ResidentLayout:
    tensors: tuple[ResidentTensor, ...]
    total_bytes: int


def resident_layout(tensors: Iterable[TensorInfo], align: int) -> ResidentLayout:
    """Stretches for `tensors`; `align` in bytes. The region is never empty."""
    placed: list[ResidentTensor] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda t: (t.file_index, t.offset)):
        capacity_bytes = stretch_bytes(tensor.byte_count, align)
        placed.append(
            ResidentTensor(tensor, offset, capacity_bytes, offset + tensor.offset % align)
        )
        offset += capacity_bytes
    return ResidentLayout(tuple(placed), max(offset, align))
