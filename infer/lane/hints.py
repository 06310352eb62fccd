"""Hints while a compute lane is on: into host slots, where the CPU can compute what comes."""

import numpy as np
import numpy.typing as npt

from infer.daemon.client import SlotClient
from infer.daemon.sections import Integers
from infer.daemon.waits import Waits
from infer.lane.compute_lane import ComputeLane


class LaneHints:
    """infer.ahead.prefetch.HintSink of a GPU's client: while the lane is off, that client's own.

    While it is on, an expert in a host slot is there, as one in a GPU slot is.
    """

    def __init__(self, client: SlotClient, lane: ComputeLane) -> None:
        self._client, self._lane = client, lane

    @property
    def waits(self) -> Waits:
        return self._client.waits

    @property
    def has_source(self) -> bool:
        return not self._lane.is_on

    def absent(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        absent = self._client.absent(layer, experts)
        return absent & self._lane.host.absent(layer, experts) if self._lane.is_on else absent

    def is_complete(self, layer: int) -> bool:
        if not self._lane.is_on:
            return self._client.is_complete(layer)
        slots = np.maximum(self._client.rows[layer], self._lane.host.rows[layer])
        return bool(slots.min() >= 0)

    @property
    def drive_us(self) -> tuple[int, int]:
        return self._client.drive_us

    def unread(self, layer: int, experts: Integers) -> npt.NDArray[np.bool_]:
        return self._client.unread(layer, experts)

    def hint(
        self, layer: int, experts: Integers, layers_ahead: int, upload_count: int | None = None
    ) -> None:
        hinting = self._lane.host if self._lane.is_on else self._client
        hinting.hint(layer, experts, layers_ahead, upload_count)
