"""Reading experts, a section at a time, whoever has the slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ClientRevoked
from shared.residency import NOT_RESIDENT

MAX_REVOCATIONS = 5

Integers = npt.NDArray[np.integer[Any]]
# Takes places in a section's experts, and the addresses of these experts' parts int64 [n, 3].
Compute = Callable[[npt.NDArray[np.intp], npt.NDArray[np.int64]], None]


def nothing_meanwhile() -> None:
    """Work for the time in which the disk reads, where there is none."""


@dataclass
class Section:
    """What one section reads: its experts, the slots they are in, and those that have none yet.

    present, missing: places in `experts`; slots: int32, of all of them, -1 where missing.
    asked_s, asked_count: when and for how many experts the daemon was asked.
    """

    number: int
    layer: int
    experts: Integers
    row: npt.NDArray[np.int32]  # of the residency table
    slots: npt.NDArray[np.int32]
    present: npt.NDArray[np.intp]
    missing: npt.NDArray[np.intp]
    asked_s: float
    asked_count: int


class SectionReader:
    """What a client does in a section; the steps are its own.

    rows: which slot has which expert, int32 [n_layers, n_experts], NOT_RESIDENT where none has.
    """

    rows: npt.NDArray[np.int32]

    def read(
        self,
        layer: int,
        experts: Integers,
        use_counts: Integers | int,
        compute: Compute,
        meanwhile: Callable[[], None] = nothing_meanwhile,
    ) -> None:
        """`compute(places, addresses)` while the slabs of experts[places] are safe to read.

        It is called for those that are there, then for others as they come, each of them once.
        `meanwhile()` comes first, when the others have been asked for. All of it is done again if
        this client was stopped for so long that the slots may have been reused.
        experts: distinct, at most `wave_experts(layer)`; use_counts: how often each was chosen.
        Raises what kept an expert from coming: ReadFailed, ModelChanged, DaemonLost.
        """
        for _ in range(MAX_REVOCATIONS):
            try:
                self._read_once(layer, experts, use_counts, compute, meanwhile)
                return
            except ClientRevoked:
                self.attach_again()
        raise self.given_up()

    def given_up(self) -> ClientRevoked:
        return ClientRevoked(
            f"the daemon has given up on this client {MAX_REVOCATIONS} times in a row",
            "this process gets too little CPU time: end others, or raise --stall-deadline-ms",
        )

    def _read_once(
        self,
        layer: int,
        experts: Integers,
        use_counts: Integers | int,
        compute: Compute,
        meanwhile: Callable[[], None],
    ) -> None:
        try:
            try:
                section = self.begin(layer, experts, use_counts)
                meanwhile()
                if len(section.present):
                    compute(section.present, self.addresses(section, section.present))
                while len(section.missing):
                    arrived = self.wait_some(section)
                    compute(arrived, self.addresses(section, arrived))
            finally:
                self.settle()
            self.check_revoked()
        finally:
            self.leave()

    def absent(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        """Which of some experts are in no slot now."""
        absent: npt.NDArray[np.bool_] = self.rows[layer][experts] == NOT_RESIDENT
        return absent

    def unread(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        """Which of some experts the disk would have to read: they are in no tier."""
        return self.absent(layer, experts)

    def is_complete(self, layer: int) -> bool:
        """Whether every expert of a layer is in a slot now."""
        return bool(self.rows[layer].min() != NOT_RESIDENT)

    def attach_again(self) -> None:
        """After ClientRevoked: a new attachment."""
        raise NotImplementedError

    def begin(self, layer: int, experts: Integers, use_counts: Integers | int) -> Section:
        """Enter a section, and so end the one before; ask for the experts that are missing."""
        raise NotImplementedError

    def wait_some(self, section: Section) -> npt.NDArray[np.intp]:
        """Until more of the missing are there; their places, which `missing` has no more."""
        raise NotImplementedError

    def addresses(self, section: Section, places: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """int64 [len(places), 3], where gate, up and down of each begin."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for queued work, where nothing else keeps slots from being reused under it."""
        raise NotImplementedError

    def check_revoked(self) -> None:
        """ClientRevoked if what this section has read may have been overwritten under it."""
        raise NotImplementedError

    def leave(self) -> None:
        """End the section; without one it does nothing."""
        raise NotImplementedError
