"""Loading the resident tensors: once, at start, into a region that every client maps.

Where all of the clients compute on a GPU, only those stay in host memory that they copy from there
for every token; the others go to the GPU straight away (streamd/tiers/resident_uploads.py).
"""

import logging
import select
import time
from collections.abc import Callable

from shared.experts import resident_tensors
from shared.gguf_index import GgufIndex
from shared.gpu_plan import GpuPlan
from shared.resident import ResidentLayout, resident_layout
from shared.sizes import size_text
from shared.streamed import chosen_layers
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.tiers.regions import Region

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
WAIT_MS = 200
# Slabs submitted ahead of the disk; the reader splits large ones itself.
AHEAD_COUNT = 64


class Progress:
    """Says now and then how much of `total_bytes` has been loaded."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._told_s = time.monotonic()

    def add(self, loaded_bytes: int) -> None:
        self._loaded_bytes += loaded_bytes
        now_s = time.monotonic()
        if now_s - self._told_s > PROGRESS_INTERVAL_S:
            self._told_s = now_s
            log.info(
                "resident tensors: %s of %s",
                size_text(self._loaded_bytes),
                size_text(self._total_bytes),
            )


def host_residents(
    index: GgufIndex, align: int, gpu: GpuPlan | None, cpu_clients: bool
) -> ResidentLayout:
    """The tensors that are to be in host memory, and where. gpu: None without a GPU tier."""
    whole = resident_layout(resident_tensors(index), align)
    if gpu is None or cpu_clients:
        return whole
    layouts = chosen_layers(index, gpu.streamed.layers).values()
    return whole.only({placed.tensor.name for layout in layouts for placed in layout.tensors})


def load_resident(layout: ResidentLayout, reader: Reader, stopped: Callable[[], bool]) -> Region:
    """Read every tensor of `layout`; raises the read's error. Returns early when `stopped()`."""
    sparse = layout.held_bytes < layout.total_bytes
    region = Region("streamd-resident", layout.total_bytes, sparse=sparse)
    try:
        _load(layout, memoryview(region.memory), reader, stopped)
    except BaseException:
        region.close()
        raise
    return region


def _load(
    layout: ResidentLayout, memory: memoryview, reader: Reader, stopped: Callable[[], bool]
) -> None:
    waiting = iter(layout.tensors)
    in_flight_count = 0
    bell = select.poll()
    bell.register(reader.fileno(), select.POLLIN)
    progress = Progress(layout.held_bytes)
    exhausted = False
    while not stopped():
        while in_flight_count < min(AHEAD_COUNT, reader.room) and not exhausted:
            placed = next(waiting, None)
            if placed is None:
                exhausted = True
                break
            tensor = placed.tensor
            if tensor.byte_count == 0:
                continue
            target = memory[placed.offset : placed.offset + placed.capacity_bytes]
            extent = Extent(tensor.file_index, tensor.offset, tensor.byte_count, target)
            reader.submit(SlabRead(("resident", tensor.name), (extent,)))
            in_flight_count += 1
        if exhausted and in_flight_count == 0:
            return
        bell.poll(WAIT_MS)
        for completion in reader.poll():
            in_flight_count -= 1
            if completion.error is not None:
                raise completion.error
            progress.add(completion.bytes_read)
