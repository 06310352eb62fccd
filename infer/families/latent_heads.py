"""Each head's matrices of latent attention, from the two ways in which files have them.

Split, as the absorbed form wants them (columns first, as ggml writes shapes):

    attn_k_b [nope, kv_lora, heads]     attn_v_b [kv_lora, value, heads]

or as trained, where a head's rows are first those of its key, then those of its value:

    attn_kv_b [kv_lora, heads * (nope + value)]
"""

import torch

from infer.blocks.mla import MlaShape
from infer.families.parts import Parts
from infer.kernels.interface import Kernels
from infer.kernels.quant_matrix import QuantMatrix
from shared.quants import TensorType

MlaMatrices = list[QuantMatrix]


def key_matrices(parts: Parts, prefix: str, shape: MlaShape) -> MlaMatrices:
    """[kv_lora, nope] a head. MalformedModel if they are missing or of another shape.

    Unsplit ones are transposed here, which takes them out of their blocks: float32 in memory.
    """
    name = f"{prefix}.attn_k_b.weight"
    if name in parts.weights:
        return parts.weights.matrices(name, shape.heads, shape.kv_lora, shape.nope)
    whole = _unsplit(parts, prefix, shape)
    step = shape.nope + shape.value_dim
    return [
        _transposed(parts.kernels, whole.part(head * step, shape.nope), parts.weights.device)
        for head in range(shape.heads)
    ]


def value_matrices(parts: Parts, prefix: str, shape: MlaShape) -> MlaMatrices:
    """[value, kv_lora] a head, in place. MalformedModel as for `key_matrices`."""
    name = f"{prefix}.attn_v_b.weight"
    if name in parts.weights:
        return parts.weights.matrices(name, shape.heads, shape.value_dim, shape.kv_lora)
    whole = _unsplit(parts, prefix, shape)
    step = shape.nope + shape.value_dim
    return [whole.part(head * step + shape.nope, shape.value_dim) for head in range(shape.heads)]


def _unsplit(parts: Parts, prefix: str, shape: MlaShape) -> QuantMatrix:
    name = parts.weights.first(f"{prefix}.attn_kv_b.weight", f"{prefix}.attn_k_b.weight")
    rows = shape.heads * (shape.nope + shape.value_dim)
    return parts.weights.matrix(name, rows, shape.kv_lora)


def _transposed(kernels: Kernels, matrix: QuantMatrix, device: torch.device) -> QuantMatrix:
    ids = torch.arange(matrix.rows, device=device)
    dense = kernels.embed(matrix, ids).T.contiguous()
    return QuantMatrix(int(TensorType.F32), matrix.columns, matrix.rows, dense.data_ptr(), dense)
