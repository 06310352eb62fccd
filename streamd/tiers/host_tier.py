"""The host tier: the arena's memory, and reads of experts into its slots.

A slot gets its pages when it is first needed, so that start-up need not wait for a whole arena:

    submit --> first time: pages, found by a thread --> registered with the reader --+
       |                                                                             v
       +---- any other time -----------------------------------------------------> read --> poll

What is withdrawn while its slot waits for pages is not read; the slot gets them all the same, and
may be given anew meanwhile.
"""

from collections.abc import Callable

from shared.arena import PART_COUNT, ArenaLayout
from shared.errors import ReadFailed, StreamError
from shared.experts import ExpertIndex
from streamd.readers.reader import Reader
from streamd.readers.slab_read import Completion, Extent, Priority, SlabRead
from streamd.slot_cache.grants import Grant
from streamd.tiers.checksums import SlabChecksums
from streamd.tiers.populate import PageFinder, Populator
from streamd.tiers.regions import Region

# Completion keys of slab reads are slot numbers; see streamd/tiers/resident.py for the other kind.


class HostTier:
    """checksums: None unless slabs are to be verified when they are read again.

    find_pages: of Populator, instead of the usual one.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        experts: ExpertIndex,
        reader: Reader,
        checksums: SlabChecksums | None = None,
        find_pages: Callable[[memoryview], None] | None = None,
        returnable: bool = False,
    ) -> None:
        self.layout = layout
        self._checksums = checksums
        self._grants: dict[int, Grant] = {}  # submitted and not arrived
        self._without_pages: set[int] = set()  # slots that wait for them, granted or not
        self._page_finder = PageFinder()
        self._populator = Populator(find_pages or self._page_finder)
        self.region = Region("streamd-slots", layout.total_bytes, returnable)
        self._experts = experts
        self._reader = reader
        whole = memoryview(self.region.memory)
        # One view a stretch, made once: engines may keep only the address of what they are given.
        stretches = layout.stretches().tolist()
        self._stretches = [
            [whole[offset : offset + length] for offset, length in slot] for slot in stretches
        ]
        self._slots = [whole[slot[0][0] : slot[-1][0] + slot[-1][1]] for slot in stretches]
        self._populated = [False] * layout.slot_count

    @property
    def room(self) -> int:
        """How many grants can be submitted now."""
        return self._reader.room - len(self._without_pages)

    def fileno(self) -> int:
        """Readable when `poll` has something to do; so is the reader's."""
        return self._populator.fileno()

    def submit(self, grant: Grant) -> None:
        """Read an expert into its slot; exactly one completion comes from a later `poll`."""
        self._grants[grant.slot] = grant
        if self._populated[grant.slot]:
            self._read(grant)
        elif grant.slot not in self._without_pages:
            self._without_pages.add(grant.slot)
            self._populator.submit(grant.slot, self._slots[grant.slot], grant.priority)

    def promote(self, slot: int, owner: int) -> None:
        """A client waits now for what is read into `slot`."""
        grant = self._grants[slot]._replace(priority=Priority.DEMAND, owner=owner)
        self._grants[slot] = grant
        if self._populated[slot]:
            self._reader.promote(slot, owner)

    def withdraw(self, slot: int) -> bool:
        """Forget what is read into `slot` unless the disk has begun; whether it is forgotten."""
        withdrawn = slot in self._without_pages or self._reader.withdraw(slot)
        if withdrawn:
            del self._grants[slot]
        return withdrawn

    def poll(self) -> list[Completion]:
        """Start the reads whose slots have got their pages; what has ended."""
        refused = []
        for slot, fault in self._populator.ended():
            assert isinstance(slot, int)
            self._without_pages.remove(slot)
            grant = self._grants.get(slot)
            if not fault:
                self._populated[slot] = True
                self._reader.register(self._slots[slot])
                if grant is not None:
                    self._read(grant)
            elif grant is not None:
                error = ReadFailed(
                    f"there is no memory for a slot of the host cache: {fault}",
                    "end other programs, or restart the daemon with a smaller --host-cache",
                )
                refused.append(Completion(slot, error, 0, 0.0))
        return refused + self._reader.poll()

    def _read(self, grant: Grant) -> None:
        """Its gate, up and down into its slot's stretches."""
        parts = self._experts.extents(grant.layer, grant.expert)
        stretches = self._stretches[grant.slot]
        extents = tuple(
            Extent(parts[part].file_index, parts[part].offset, parts[part].length, stretches[part])
            for part in range(PART_COUNT)
        )
        self._reader.submit(SlabRead(grant.slot, extents, grant.owner), grant.priority)

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

    @property
    def held_bytes(self) -> int:
        """What slots have in memory by now."""
        sizes = zip(self._slots, self._populated, strict=True)
        return sum(slot.nbytes for slot, populated in sizes if populated)

    def has_pages(self, slot: int) -> bool:
        return self._populated[slot]

    def give_back(self, slot: int) -> None:
        """Let the pages go of a slot that nothing reads or will be read into before it is asked
        for again, as if it had never been."""
        if self._populated[slot]:
            self._reader.forget(self._slots[slot])
            self.region.give_back(self._slots[slot])
            self._populated[slot] = False

    def close(self) -> None:
        self._populator.close()
        self._page_finder.close()
        self.region.close()
