"""Loading the resident tensors: once, at start, into a region that every client maps."""

import logging
import select
import time
from collections.abc import Callable

from shared.resident import ResidentLayout
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.tiers.regions import Region

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 1.0
WAIT_MS = 200
# Slabs submitted ahead of the disk; the reader splits large ones itself.
AHEAD_COUNT = 64


def load_resident(layout: ResidentLayout, reader: Reader, stopped: Callable[[], bool]) -> Region:
    """Read every tensor of `layout`; raises the read's error. Returns early when `stopped()`."""
    region = Region("streamd-resident", layout.total_bytes)
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
    in_flight_count = loaded_bytes = 0
    bell = select.poll()
    bell.register(reader.fileno(), select.POLLIN)
    reported_s = time.monotonic()
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
            loaded_bytes += completion.bytes_read
            if completion.error is not None:
                raise completion.error
        if time.monotonic() - reported_s > PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            log.info("resident tensors: %.0f of %.0f MB", loaded_bytes / 1e6, memory.nbytes / 1e6)
