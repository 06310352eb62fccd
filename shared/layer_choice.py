"""Which layers' matrices stay in host memory, where GPU memory cannot hold all of them.

Copies to the GPU are what a token costs. A byte of GPU memory that holds part of a layer saves a
byte of them for every token; one that holds part of an expert's slot saves it only for the tokens
that use the expert, so less. Layers have precedence, therefore, and slots get what is left; where
layers have to be streamed, as few of them are as leave the slots their least. What streaming costs
is the buffers that a client copies them through.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.streamed import BUFFERS

# Of the floor, for the slots beside streamed layers. Hints may hold an eighth of the slots: of so
# many that is a layer's top-k.
SLOT_FLOORS = 2


@dataclass(frozen=True)
class Residents:
    """Bytes of the resident tensors: of all, and by layer of those that can be streamed.

    wanted_bytes: of layers, to be kept in GPU memory at the most; None: as many as fit.
    """

    total_bytes: int
    layer_bytes: Mapping[int, int] = field(default_factory=dict)
    wanted_bytes: int | None = None


@dataclass(frozen=True)
class LayerChoice:
    """streamed_bytes: what is copied for a token; buffers_bytes: of both, in each client."""

    layers: tuple[int, ...]
    streamed_bytes: int
    buffers_bytes: int

    @property
    def freed_bytes(self) -> int:
        return self.streamed_bytes - self.buffers_bytes


NOTHING_STREAMED = LayerChoice((), 0, 0)


def choose_layers(residents: Residents, fits: Callable[[LayerChoice], bool]) -> LayerChoice:
    """The fewest layers with which the rest `fits`, or which --gpu-resident demands.

    If it fits with none, those that free the most.
    """
    layer_bytes, wanted_bytes = residents.layer_bytes, residents.wanted_bytes
    all_bytes = sum(layer_bytes.values())
    choices = [_spread(layer_bytes, count) for count in range(len(layer_bytes) + 1)]
    if wanted_bytes is not None:
        return next(c for c in choices if all_bytes - c.streamed_bytes <= wanted_bytes)
    return next(filter(fits, choices), max(choices, key=lambda c: c.freed_bytes))


def _spread(layer_bytes: Mapping[int, int], count: int) -> LayerChoice:
    """So many layers, evenly over the model: what lies between them is computed during the copies.

    None of them is larger than it must be, for the buffers' sake.
    """
    if count == 0:
        return NOTHING_STREAMED
    largest_bytes = sorted(layer_bytes.values())[count - 1]
    pool: Sequence[int] = [n for n in sorted(layer_bytes) if layer_bytes[n] <= largest_bytes]
    layers = tuple(pool[place * len(pool) // count] for place in range(count))
    sizes = [layer_bytes[layer] for layer in layers]
    return LayerChoice(layers, sum(sizes), BUFFERS * max(sizes))
