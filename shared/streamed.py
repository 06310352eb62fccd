"""Layers whose matrices may lie in host memory and be copied to a GPU in their turn.

    GPU    [ what every token needs out of turn | whole layers ]  [ buffer A ][ buffer B ]
    host   [ all resident tensors ]                                  ^ a streamed layer each

Both sides derive from the GGUF index which tensors are copied for a layer, and where they lie in a
buffer: as `gpu_resident_layout` has it. Everything else stays in GPU memory: what belongs to no
layer, norms and biases, the MTP block, and layers without experts, which a GPU computes in one go
with the layer behind them.
"""

import re
from collections.abc import Collection, Mapping

from shared.errors import ProtocolMismatch
from shared.experts import resident_tensors, trunk_layer_count
from shared.gguf_index import GgufIndex
from shared.gguf_shard import TensorInfo
from shared.resident import ResidentLayout, gpu_resident_layout

# That a client copies streamed layers through, each as large as the largest of them.
BUFFERS = 2

_LAYER_TENSOR = re.compile(r"blk\.([0-9]{1,9})\.(.+)")
# Guesses apply routers layers ahead; unsplit matrices are transposed when a model is built.
_READ_OUT_OF_TURN = ("ffn_gate_inp.weight", "attn_kv_b.weight")


def streamable_layers(index: GgufIndex) -> dict[int, ResidentLayout]:
    """By layer, ascending: what would be copied for it, and where it would lie in a buffer."""
    matrices: dict[int, list[TensorInfo]] = {}
    for tensor in resident_tensors(index):
        layer = _streamable_layer(tensor, index)
        if layer is not None:
            matrices.setdefault(layer, []).append(tensor)
    return {layer: gpu_resident_layout(matrices[layer]) for layer in sorted(matrices)}


def _streamable_layer(tensor: TensorInfo, index: GgufIndex) -> int | None:
    named = _LAYER_TENSOR.fullmatch(tensor.name)
    if named is None or len(tensor.shape) < 2 or named[2] in _READ_OUT_OF_TURN:
        return None
    layer = int(named[1])
    has_experts = f"blk.{layer}.ffn_gate_exps.weight" in index.tensors
    return layer if has_experts and layer < trunk_layer_count(index) else None


def kept_tensors(index: GgufIndex, streamed: Mapping[int, ResidentLayout]) -> list[TensorInfo]:
    """The resident tensors that stay in GPU memory while some layers are streamed."""
    copied = {placed.tensor.name for layout in streamed.values() for placed in layout.tensors}
    return [tensor for tensor in resident_tensors(index) if tensor.name not in copied]


def chosen_layers(index: GgufIndex, numbers: Collection[int]) -> dict[int, ResidentLayout]:
    """Those of `streamable_layers` that a daemon's `numbers` name; ProtocolMismatch for others."""
    layers = streamable_layers(index)
    if not layers.keys() >= set(numbers):
        raise ProtocolMismatch(
            "the daemon streams other layers than this version can",
            "daemon and client are of different versions: restart the daemon",
        )
    return {layer: layers[layer] for layer in sorted(numbers)}
