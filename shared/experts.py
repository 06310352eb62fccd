"""Where every routed expert lies: (layer, expert) -> three extents, and the sizes slots need.

Works for any architecture whose experts are stacked in `blk.N.ffn_{gate,up,down}_exps.weight`:

    gate, up: [d, ff, experts]      down: [ff, d, experts]      (ggml order, columns first)

An expert is the last axis, so each of its three parts is one contiguous stretch of its tensor.
MTP blocks (the last `nextn_predict_layers` of `block_count`) are no layers here, except the first
one where it is served: it is the layer behind the trunk then.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shared.errors import MalformedModel, UnsupportedModel
from shared.gguf_index import GgufIndex, TensorInfo
from shared.index_layers import index_layers, is_unused_indexer

MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 12

PARTS = ("gate", "up", "down")

_BLOCK_NAME = re.compile(r"blk\.([0-9]{1,9})\.")

_REMEDY = "convert or download the model again"


class Extent(NamedTuple):
    """`length` bytes at `offset` of the file `GgufIndex.paths[file_index]`."""

    file_index: int
    offset: int
    length: int


@dataclass(frozen=True)
class SizeClass:
    """The layers whose experts have slabs of one layout: the same bytes in gate, up and down."""

    class_id: int
    part_bytes: tuple[int, int, int]
    layers: tuple[int, ...]
    expert_count: int  # in all its layers together

    @property
    def slab_bytes(self) -> int:
        return sum(self.part_bytes)


@dataclass(frozen=True, eq=False)
class ExpertIndex:
    """All routed experts of a model. Arrays are read-only; dense layers hold -1 in all of them.

    layer_class   int32 [n_layers]                 class_id, an index into `classes`
    part_offsets  int64 [n_layers, n_experts, 3]   bytes from the file's start
    part_files    int32 [n_layers, 3]              index into GgufIndex.paths
    part_types    int32 [n_layers, 3]              GGML type id
    """

    n_layers: int
    n_experts: int
    top_k: int
    classes: tuple[SizeClass, ...]
    layer_class: NDArray[np.int32]
    part_offsets: NDArray[np.int64]
    part_files: NDArray[np.int32]
    part_types: NDArray[np.int32]

    @property
    def expert_count(self) -> int:
        """In all layers."""
        return sum(c.expert_count for c in self.classes)

    @classmethod
    def from_gguf(cls, index: GgufIndex) -> Self:
        """MalformedModel for missing tensors and keys and for shapes that contradict each other;
        UnsupportedModel for a model without routed experts."""
        n_layers = served_layer_count(index)
        layers = [_layer_tensors(index, layer) for layer in range(n_layers)]
        if not any(layers):
            raise UnsupportedModel(
                f"{index.paths[0]} has no routed experts (blk.N.ffn_gate_exps.weight)",
                "use a mixture-of-experts model",
            )
        n_experts = index.arch_key("expert_count", int)
        top_k = index.arch_key("expert_used_count", int)
        _check_counts(index, n_experts, top_k)

        part_bytes = np.full((n_layers, 3), -1, np.int64)
        part_offsets = np.full((n_layers, n_experts, 3), -1, np.int64)
        part_files = np.full((n_layers, 3), -1, np.int32)
        part_types = np.full((n_layers, 3), -1, np.int32)
        expert_ids = np.arange(n_experts)[:, np.newaxis]
        for layer, tensors in enumerate(layers):
            if tensors is None:
                continue
            _check_shapes(tensors, n_experts)
            part_bytes[layer] = [tensor.byte_count // n_experts for tensor in tensors]
            first_offsets = [tensor.offset for tensor in tensors]
            part_offsets[layer] = first_offsets + expert_ids * part_bytes[layer]
            part_files[layer] = [tensor.file_index for tensor in tensors]
            part_types[layer] = [tensor.type_id for tensor in tensors]
        layer_class, classes = _size_classes(part_bytes, n_experts)
        for array in (layer_class, part_offsets, part_files, part_types):
            array.flags.writeable = False
        return cls(
            n_layers, n_experts, top_k, classes, layer_class, part_offsets, part_files, part_types
        )

    def extents(self, layer: int, expert: int) -> tuple[Extent, Extent, Extent]:
        """Gate, up and down of one expert; `layer` must be one that has experts."""
        assert 0 <= layer < self.n_layers, layer
        assert 0 <= expert < self.n_experts, expert
        assert self.layer_class[layer] >= 0, f"layer {layer} is dense"
        lengths = self.classes[self.layer_class[layer]].part_bytes
        files, offsets = self.part_files[layer].tolist(), self.part_offsets[layer, expert].tolist()
        gate, up, down = map(Extent, files, offsets, lengths)
        return gate, up, down


def trunk_layer_count(index: GgufIndex) -> int:
    """Layers without the MTP blocks: block_count - nextn_predict_layers."""
    block_count = index.arch_key("block_count", int)
    mtp_count = index.arch_optional("nextn_predict_layers", int, 0)
    if not 0 <= mtp_count < block_count or block_count > MAX_LAYERS:
        raise MalformedModel(
            f"{index.paths[0]}: block_count {block_count} with nextn_predict_layers {mtp_count}"
            " makes no sense",
            _REMEDY,
        )
    return block_count - mtp_count


def served_layer_count(index: GgufIndex) -> int:
    """Layers with the MTP block, where it is served."""
    return trunk_layer_count(index) + index.mtp


def resident_tensors(index: GgufIndex) -> list[TensorInfo]:
    """All tensors but the routed experts' and those that nobody reads: of blocks that are not
    served, and of indexers in layers that do not own one.

    In the order they lie on disk.
    """
    n_layers = served_layer_count(index)
    experts = {name for layer in range(n_layers) for name in _part_names(layer)}
    trunk_count = trunk_layer_count(index)
    index_owners = (*index_layers(index, trunk_count), *range(trunk_count, n_layers))
    resident = [
        tensor
        for tensor in index.tensors.values()
        if tensor.name not in experts
        and not _is_behind(tensor.name, n_layers)
        and not is_unused_indexer(tensor.name, index_owners)
    ]
    return sorted(resident, key=lambda tensor: (tensor.file_index, tensor.offset))


def _is_behind(name: str, n_layers: int) -> bool:
    block = _BLOCK_NAME.match(name)
    return block is not None and int(block[1]) >= n_layers


def _part_names(layer: int) -> list[str]:
    return [f"blk.{layer}.ffn_{part}_exps.weight" for part in PARTS]


def _layer_tensors(index: GgufIndex, layer: int) -> list[TensorInfo] | None:
    """The layer's gate, up and down; None for a dense layer."""
    names = _part_names(layer)
    missing = [name for name in names if name not in index.tensors]
    if len(missing) == len(names):
        return None
    if missing:
        raise MalformedModel(
            f"{index.paths[0]} lacks the tensor {missing[0]}, though it has others of that layer",
            _REMEDY,
        )
    return [index.tensors[name] for name in names]


def _check_counts(index: GgufIndex, n_experts: int, top_k: int) -> None:
    if not 0 < n_experts <= MAX_EXPERTS:
        raise MalformedModel(f"{index.paths[0]}: expert_count {n_experts} is absurd", _REMEDY)
    if not 0 < top_k <= n_experts:
        raise MalformedModel(
            f"{index.paths[0]}: expert_used_count {top_k} of {n_experts} experts is absurd", _REMEDY
        )


def _check_shapes(tensors: list[TensorInfo], n_experts: int) -> None:
    gate = tensors[0]
    if len(gate.shape) != 3 or gate.shape[2] != n_experts:
        raise MalformedModel(
            f"tensor {gate.name} has shape {gate.shape}, not (in, out, {n_experts})", _REMEDY
        )
    width, expert_width, _ = gate.shape
    expected = (gate.shape, gate.shape, (expert_width, width, n_experts))
    for tensor, shape in zip(tensors, expected, strict=True):
        if tensor.shape != shape:
            raise MalformedModel(
                f"tensor {tensor.name} has shape {tensor.shape}; {gate.name} demands {shape}",
                _REMEDY,
            )


def _size_classes(
    part_bytes: NDArray[np.int64], n_experts: int
) -> tuple[NDArray[np.int32], tuple[SizeClass, ...]]:
    """Classes numbered in the order of their first layer; int32 [n_layers] of ids, -1 if dense."""
    layers_of: dict[tuple[int, int, int], list[int]] = {}
    for layer, (gate, up, down) in enumerate(part_bytes.tolist()):
        if gate >= 0:
            layers_of.setdefault((gate, up, down), []).append(layer)
    classes = tuple(
        SizeClass(class_id, sizes, tuple(layers), len(layers) * n_experts)
        for class_id, (sizes, layers) in enumerate(layers_of.items())
    )
    layer_class = np.full(len(part_bytes), -1, np.int32)
    for size_class in classes:
        layer_class[list(size_class.layers)] = size_class.class_id
    return layer_class, classes
