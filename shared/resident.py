"""Where each resident (non-expert) tensor lies in the region that the daemon shares.

Both sides derive the same layout from the GGUF index and the read alignment: one stretch a tensor,
as in shared/arena.py, in file order. On a GPU the payload begins with its stretch.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shared.arena import GPU_ALIGN_BYTES, round_up, stretch_bytes
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
    """Where tensors lie in a region of `total_bytes`."""

    tensors: tuple[ResidentTensor, ...]
    total_bytes: int

    @property
    def held_bytes(self) -> int:
        """Of its stretches: less than `total_bytes` where some tensors have been left out."""
        return sum(placed.capacity_bytes for placed in self.tensors)

    def only(self, names: Collection[str]) -> "ResidentLayout":
        """The same region with some of the tensors, each where it was."""
        kept = tuple(placed for placed in self.tensors if placed.tensor.name in names)
        return ResidentLayout(kept, self.total_bytes)


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


def gpu_resident_layout(tensors: Iterable[TensorInfo]) -> ResidentLayout:
    """As `resident_layout`, with every payload on a multiple of GPU_ALIGN_BYTES."""
    placed: list[ResidentTensor] = []
    offset = 0
    for tensor in sorted(tensors, key=lambda t: (t.file_index, t.offset)):
        capacity_bytes = round_up(tensor.byte_count, GPU_ALIGN_BYTES)
        placed.append(ResidentTensor(tensor, offset, capacity_bytes, offset))
        offset += capacity_bytes
    return ResidentLayout(tuple(placed), max(offset, GPU_ALIGN_BYTES))
