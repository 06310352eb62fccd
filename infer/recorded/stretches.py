"""How a model is cut for recording."""

from collections.abc import Iterator, Sequence

from infer.blocks.moe import MoeFfn
from infer.model import Layer


def stretches(layers: Sequence[Layer]) -> Iterator[list[tuple[int, Layer]]]:
    """Layers by number, cut behind each router; the last stretch may be empty."""
    stretch: list[tuple[int, Layer]] = []
    for number, layer in enumerate(layers):
        stretch.append((number, layer))
        if isinstance(layer.ffn, MoeFfn):
            yield stretch
            stretch = []
    yield stretch
