"""The resident tensors of a model, wherever the daemon has decided that they lie."""

import mmap
from collections.abc import Callable

import torch

from infer.daemon.mapping import Mapping
from infer.resident.copy_lane import CudaLane
from infer.resident.streamed_layers import CopyLane, StreamedLayers
from infer.resident.weights import Weights
from shared import shm
from shared.errors import ProtocolMismatch
from shared.experts import resident_tensors
from shared.gguf_index import GgufIndex
from shared.resident import gpu_resident_layout, resident_layout
from shared.streamed import chosen_layers, kept_tensors

# Takes the device, bytes of a buffer, stretches of host memory and what keeps them: see CudaLane.
MakeLane = Callable[[torch.device, int, list[tuple[int, int]], object], CopyLane]


def open_streamed(
    index: GgufIndex, memory: Mapping, device: torch.device, make_lane: MakeLane = CudaLane
) -> StreamedLayers | None:
    """As the daemon has decided; None where nothing is streamed. GpuError, ProtocolMismatch."""
    attached = memory.attached
    if not attached.streamed_layers:
        return None
    assert memory.host_resident is not None
    layouts = chosen_layers(index, attached.streamed_layers)
    source = resident_layout(resident_tensors(index), attached.host_align)
    if source.total_bytes > attached.host_resident_bytes:
        raise ProtocolMismatch(
            "the daemon lays its resident tensors out in another way than this version does",
            "daemon and client are of different versions: restart the daemon",
        )
    address = shm.address(memory.host_resident)
    names = {placed.tensor.name for layout in layouts.values() for placed in layout.tensors}
    stretches = [
        (address + placed.offset, placed.capacity_bytes)
        for placed in source.tensors
        if placed.tensor.name in names
    ]
    buffer_bytes = max(layout.total_bytes for layout in layouts.values())
    # Where stretches share pages, each copy would cross from one pinned range into the next.
    pinnable = stretches if attached.host_align % mmap.PAGESIZE == 0 else []
    lane = make_lane(device, buffer_bytes, pinnable, memory.host_resident)
    return StreamedLayers(layouts, source, address, lane)


def open_weights(
    index: GgufIndex, memory: Mapping, device: torch.device, streamed: StreamedLayers | None
) -> Weights:
    """The resident tensors where the daemon has put them, or where they come to in their turn."""
    layouts = streamed.layouts if streamed is not None else {}
    tensors = kept_tensors(index, layouts)
    if memory.packed:
        layout = gpu_resident_layout(tensors)
    else:
        layout = resident_layout(tensors, memory.attached.align)
    path, keepalive = index.paths[0], (memory, streamed)
    weights = Weights(path, layout, memory.resident_address, keepalive, device)
    for layer, copied in layouts.items():
        weights.add(copied, streamed.addresses[layer])
    return weights
