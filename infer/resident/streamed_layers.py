"""Layers that GPU memory does not hold: copied from the daemon's host memory, a layer ahead.

    copying    | 4 -> A | 8 -> B |    | 12 -> A    | 16 -> B
    computing           | layer 4 ... | layer 8 .. | layer 12 ..

Two rules keep a copy and a reader apart, whatever the host does in between, and the GPU keeps them:
a copy begins behind everything that was queued for computing before it, so behind the last reader
of its buffer; and a layer is computed behind its copy.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Protocol

from shared.device_copies import Copy
from shared.resident import ResidentLayout
from shared.streamed import BUFFERS


class Stream(Protocol):
    """As torch.cuda.Stream: work in order."""

    def wait_event(self, event: Any) -> None: ...


class Event(Protocol):
    """As torch.cuda.Event: a place in a stream, that of the last `record`."""

    def record(self, stream: Any) -> None: ...


class CopyLane(Protocol):
    """A GPU's stream for copies from the host, beside the one it computes on.

    buffers: addresses of BUFFERS stretches of device memory.
    """

    @property
    def buffers(self) -> tuple[int, ...]: ...

    @property
    def copying(self) -> Stream: ...

    def computing(self) -> Stream: ...

    def event(self) -> Event: ...

    def copy(self, copy: Copy) -> None:
        """Queue it on `copying`."""


class StreamedLayers:
    """layouts: what is copied for each layer, ascending; addresses: of the buffer it comes to.

    `source` lies at `source_address` in host memory, and has the tensors of all of them.
    """

    def __init__(
        self,
        layouts: Mapping[int, ResidentLayout],
        source: ResidentLayout,
        source_address: int,
        lane: CopyLane,
    ) -> None:
        self.layouts = layouts
        self._lane = lane
        self._buffer = {layer: place % BUFFERS for place, layer in enumerate(layouts)}
        self.addresses = {layer: lane.buffers[at] for layer, at in self._buffer.items()}
        starts = {p.tensor.name: source_address + p.payload_offset for p in source.tensors}
        self._copies = {
            layer: [
                Copy(
                    self.addresses[layer] + placed.payload_offset,
                    starts[placed.tensor.name],
                    placed.tensor.byte_count,
                )
                for placed in layout.tensors
            ]
            for layer, layout in layouts.items()
        }
        self._next = _next_in_buffer(list(layouts))
        self._held: list[int | None] = [None] * BUFFERS
        self._read = lane.event()
        self._copied = [lane.event() for _ in range(BUFFERS)]
        for layer in itertools.islice(layouts, BUFFERS):
            self._begin_copy(layer)

    def enter(self, layer: int) -> None:
        """What is queued for computing from here on may read the layer's matrices."""
        buffer = self._buffer.get(layer)
        if buffer is None:
            return
        if self._held[buffer] != layer:  # the last pass was cut short
            self._begin_copy(layer)
        self._lane.computing().wait_event(self._copied[buffer])

    def leave(self, layer: int) -> None:
        """All that reads the layer's matrices in this pass is queued."""
        following = self._next.get(layer, layer)
        if following != layer:
            self._begin_copy(following)

    def _begin_copy(self, layer: int) -> None:
        """Queue it, for the buffer's readers to leave first."""
        lane, buffer = self._lane, self._buffer[layer]
        self._held[buffer] = None  # in case of an error
        self._read.record(lane.computing())
        lane.copying.wait_event(self._read)
        for copy in self._copies[layer]:
            lane.copy(copy)
        self._copied[buffer].record(lane.copying)
        self._held[buffer] = layer


def _next_in_buffer(layers: list[int]) -> dict[int, int]:
    """The layer that a buffer gets after each one; after the last it is the next pass's first."""
    following: dict[int, int] = {}
    for first in range(BUFFERS):
        own = layers[first::BUFFERS]
        following |= zip(own, own[1:] + own[:1], strict=True)
    return following
