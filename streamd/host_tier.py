"""The host tier: the arena's memory, and reads of experts into its slots."""

from shared.arena import PART_COUNT, ArenaLayout
from shared.errors import StreamError
from shared.experts import ExpertIndex
from streamd.cache import Grant
from streamd.checksums import SlabChecksums
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Extent, SlabRead
from streamd.regions import Region

# Completion keys of slab reads are slot numbers; see streamd/resident.py for the other kind.


class HostTier:
    """checksums: None unless slabs are to be verified when they are read again."""

    def __init__(
        self,
        layout: ArenaLayout,
        experts: ExpertIndex,
        reader: Reader,
        checksums: SlabChecksums | None = None,
    ) -> None:
        self.layout = layout
        self._checksums = checksums
        self._grants: dict[int, Grant] = {}  # of the reads in flight
        self.region = Region("streamd-slots", layout.total_bytes)
        self._experts = experts
        self._reader = reader
        whole = memoryview(self.region.memory)
        # One view a stretch, made once: engines may keep only the address of what they are given.
        stretches = layout.stretches().tolist()
        self._stretches = [
            [whole[offset : offset + length] for offset, length in slot] for slot in stretches
        ]
        self._slots = [whole[slot[0][0] : slot[-1][0] + slot[-1][1]] for slot in stretches]
        self._registered = [False] * layout.slot_count

    @property
    def room(self) -> int:
        """How many grants can be submitted now."""
        return self._reader.room

    def submit(self, grant: Grant) -> None:
        """Read an expert's gate, up and down into its slot's stretches."""
        if not self._registered[grant.slot]:
            # Now rather than at start: its pages have to come now anyway.
            self._registered[grant.slot] = True
            self._reader.register(self._slots[grant.slot])
        parts = self._experts.extents(grant.layer, grant.expert)
        stretches = self._stretches[grant.slot]
        extents = tuple(
            Extent(parts[part].file_index, parts[part].offset, parts[part].length, stretches[part])
            for part in range(PART_COUNT)
        )
        self._grants[grant.slot] = grant
        self._reader.submit(SlabRead(grant.slot, extents))

    def arrived(self, slot: int, error: StreamError | None) -> StreamError | None:
        """What is wrong with a slab whose read has ended, with `error` or without."""
        grant = self._grants.pop(slot)
        if error is not None or self._checksums is None:
            return error
        parts = self._experts.extents(grant.layer, grant.expert)
        payloads = (
            stretch[(delta := part.offset % self.layout.align) : delta + part.length]
            for part, stretch in zip(parts, self._stretches[slot], strict=True)
        )
        return self._checksums.check(grant.layer, grant.expert, payloads)

    def close(self) -> None:
        self.region.close()
