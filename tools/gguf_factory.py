"""GGUF files with random weights: small ones for tests, of real widths for benchmarks.

`hy3_model(...)` gives a TinyModel, two dictionaries: delete, add or replace entries, then `write`.
Everything is written by the gguf package, never by the code under test; tests/gguf_bytes.py makes
and damages files in ways it would not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf_blocks import random_blocks


@dataclass
class TinyTensor:
    """`shape` in ggml order (columns first); `data` uint8 [rows of all higher axes, row bytes]."""

    shape: tuple[int, ...]
    type_id: int
    data: np.ndarray

    def weights(self) -> np.ndarray:
        """float32 in numpy order: the last axis is the columns."""
        flat = gguf.quants.dequantize(self.data, Type(self.type_id))
        return flat.reshape(self.shape[::-1])


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], type_id: int, std: float = 0.05
) -> TinyTensor:
    rows = int(np.prod(shape[1:], dtype=int))
    return TinyTensor(shape, int(type_id), random_blocks(rng, type_id, rows, shape[0], std))


def float_tensor(values: np.ndarray) -> TinyTensor:
    """An F32 tensor of numpy values."""
    values = np.ascontiguousarray(values, np.float32)
    return TinyTensor(
        values.shape[::-1], int(Type.F32), values.reshape(-1, values.shape[-1]).view(np.uint8)
    )


@dataclass
class TinyModel:
    """A model in memory. Delete, add or replace entries, then `write`."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, TinyTensor]

    def write(self, path: Path, *, alignment: int = 32, shard_tensors: int = 0) -> Path:
        """Write `path`, or shards of at most `shard_tensors` tensors; returns the first file."""
        writer = gguf.GGUFWriter(path, self.architecture, split_max_tensors=shard_tensors)
        writer.add_custom_alignment(alignment)
        for key, value in self.metadata.items():
            add_value(writer, key, value)
        for name, tensor in self.tensors.items():
            row_bytes = tensor.data.shape[-1]
            data = tensor.data.reshape(*tensor.shape[:0:-1], row_bytes)
            writer.add_tensor(name, data, raw_dtype=Type(tensor.type_id))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if not shard_tensors:
            return path
        shard_count = -(-len(self.tensors) // shard_tensors)
        return path.with_name(f"{path.stem}-00001-of-{shard_count:05}.gguf")


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@dataclass(frozen=True)
class Hy3Shape:
    """Knobs of `hy3_model`. The first `dense_layers` layers are dense.

    `expert_types` are those of gate, up and down; `layer_expert_types` overrides single layers.
    With `mtp` one MTP block follows the `n_layers` of the trunk.
    """

    architecture: str = "hy_v3"
    n_layers: int = 3
    dense_layers: int = 1
    mtp: bool = False
    n_experts: int = 8
    top_k: int = 2
    width: int = 256
    expert_width: int = 256
    dense_width: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab_count: int = 384
    expert_types: Sequence[int] = (Type.IQ2_XXS, Type.IQ2_XXS, Type.Q2_K)
    layer_expert_types: Mapping[int, Sequence[int]] = field(default_factory=dict)
    resident_type: int = Type.Q8_0
    bias_name: str = "exp_probs_b"
    tokenizer: bool = True
    seed: int = 0


def hy3_model(**knobs: Any) -> TinyModel:
    """A valid random Hy3 model (architectures `hy_v3`, `hy-v3`); `knobs` as in Hy3Shape."""
    shape = Hy3Shape(**knobs)
    rng = np.random.default_rng(shape.seed)
    tensors = {
        "token_embd.weight": _matrix(rng, shape, shape.width, shape.vocab_count),
        "output_norm.weight": _norm(rng, shape.width),
        "output.weight": _matrix(rng, shape, shape.width, shape.vocab_count),
    }
    for layer in range(shape.n_layers + shape.mtp):
        block = _attention(rng, shape)
        if layer < shape.dense_layers:
            block |= _dense_ffn(rng, shape, shape.dense_width)
        else:
            types = shape.layer_expert_types.get(layer, shape.expert_types)
            block |= _moe_ffn(rng, shape, types)
        if layer >= shape.n_layers:
            block["nextn.eh_proj.weight"] = _matrix(rng, shape, 2 * shape.width, shape.width)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                block[f"nextn.{name}.weight"] = _norm(rng, shape.width)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return TinyModel(shape.architecture, _hy3_metadata(shape), tensors)


def _hy3_metadata(shape: Hy3Shape) -> dict[str, Any]:
    keys = {
        "block_count": shape.n_layers + shape.mtp,
        "context_length": 1024,
        "embedding_length": shape.width,
        "feed_forward_length": shape.dense_width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 11158840.0,
        "vocab_size": shape.vocab_count,
        "expert_count": shape.n_experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_feed_forward_length": shape.expert_width,
        "expert_weights_scale": 2.826,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    if shape.mtp:
        keys["nextn_predict_layers"] = 1
    metadata = {f"{shape.architecture}.{name}": value for name, value in keys.items()}
    return metadata | (tokenizer_metadata(shape.vocab_count) if shape.tokenizer else {})


def _norm(rng: np.random.Generator, count: int) -> TinyTensor:
    return float_tensor(rng.normal(1, 0.1, count))


def _matrix(
    rng: np.random.Generator, shape: Hy3Shape, *axes: int, type_id: int | None = None
) -> TinyTensor:
    type_id = shape.resident_type if type_id is None else type_id
    return random_tensor(rng, axes, type_id, std=axes[0] ** -0.5)


def _attention(rng: np.random.Generator, shape: Hy3Shape) -> dict[str, TinyTensor]:
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_norm.weight": _norm(rng, shape.width),
        "attn_q.weight": _matrix(rng, shape, shape.width, q_width),
        "attn_k.weight": _matrix(rng, shape, shape.width, kv_width),
        "attn_v.weight": _matrix(rng, shape, shape.width, kv_width),
        "attn_q_norm.weight": _norm(rng, shape.head_dim),
        "attn_k_norm.weight": _norm(rng, shape.head_dim),
        "attn_output.weight": _matrix(rng, shape, q_width, shape.width),
        "ffn_norm.weight": _norm(rng, shape.width),
    }


def _dense_ffn(
    rng: np.random.Generator, shape: Hy3Shape, inner: int, suffix: str = ""
) -> dict[str, TinyTensor]:
    return {
        f"ffn_gate{suffix}.weight": _matrix(rng, shape, shape.width, inner),
        f"ffn_up{suffix}.weight": _matrix(rng, shape, shape.width, inner),
        f"ffn_down{suffix}.weight": _matrix(rng, shape, inner, shape.width),
    }


def _moe_ffn(
    rng: np.random.Generator, shape: Hy3Shape, types: Sequence[int]
) -> dict[str, TinyTensor]:
    wide, narrow, experts = shape.width, shape.expert_width, shape.n_experts
    gate, up, down = types
    return {
        "ffn_gate_inp.weight": _matrix(rng, shape, wide, experts, type_id=Type.F32),
        shape.bias_name: float_tensor(rng.normal(0, 0.1, experts)),
        "ffn_gate_exps.weight": _matrix(rng, shape, wide, narrow, experts, type_id=gate),
        "ffn_up_exps.weight": _matrix(rng, shape, wide, narrow, experts, type_id=up),
        "ffn_down_exps.weight": _matrix(rng, shape, narrow, wide, experts, type_id=down),
    } | _dense_ffn(rng, shape, narrow, "_shexp")


def tokenizer_metadata(vocab_count: int) -> dict[str, Any]:
    """A byte-level BPE vocabulary: 4 control tokens, the 256 bytes, a few merges, unused ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(len(others))]
    merges = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and"]
    control = ["<bos>", "<eos>", "<user>", "<assistant>"]
    tokens = control + alphabet + [merge.replace(" ", "") for merge in merges]
    types = [3] * len(control) + [1] * (len(tokens) - len(control))  # 3 control, 1 normal
    unused_count = vocab_count - len(tokens)
    assert unused_count >= 0, f"the vocabulary needs {len(tokens)} ids"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "hunyuan-dense",
        "tokenizer.ggml.tokens": tokens + [f"<unused{at}>" for at in range(unused_count)],
        "tokenizer.ggml.token_type": types + [5] * unused_count,  # 5 unused
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    }
