"""`infer tokenize` and `infer inspect`: what a file says, without running it."""

import argparse
import json
from collections import Counter
from typing import Any

from infer.template import ChatTemplate
from infer.tokenizer import Tokenizer
from shared.errors import StreamError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.quants import TensorType
from shared.runtime_dir import find_daemon


def _open(arguments: argparse.Namespace) -> GgufIndex:
    path = arguments.model or find_daemon(arguments.name, None).model
    return GgufIndex.open(path)


def tokenize(arguments: argparse.Namespace) -> int:
    tokenizer = Tokenizer.from_metadata(_open(arguments).metadata)
    print(json.dumps(tokenizer.encode(arguments.text, special=arguments.special)))
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    values = describe(GgufIndex.open(arguments.file))
    if arguments.json:
        print(json.dumps(values))
        return 0
    for name, value in values.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {count}" for key, count in value.items())
        print(f"{name:<26} {shown}")
    return 0


def describe(index: GgufIndex) -> dict[str, Any]:
    """Short form: shapes, quant mix, sizes, tokenizer. What cannot be used says why."""
    experts = ExpertIndex.from_gguf(index)
    types = Counter(TensorType(t.type_id).name for t in index.tensors.values())
    values: dict[str, Any] = {
        "file": str(index.paths[0]),
        "shards": len(index.paths),
        "architecture": index.architecture,
        "layers": experts.n_layers,
        "experts_per_layer": experts.n_experts,
        "top_k": experts.top_k,
        "tensor_types": dict(types.most_common()),
        "expert_slab_bytes": {f"layers {_ranges(c.layers)}": c.slab_bytes for c in experts.classes},
        "expert_bytes": sum(c.slab_bytes * c.expert_count for c in experts.classes),
        "resident_bytes": sum(t.byte_count for t in resident_tensors(index)),
        "cold_bytes_per_token": sum(
            experts.top_k * c.slab_bytes * len(c.layers) for c in experts.classes
        ),
    }
    for describe_part in (_describe_family, _describe_text):
        try:
            values |= describe_part(index)
        except StreamError as error:
            values["unsupported"] = str(error)
    return values


def _describe_family(index: GgufIndex) -> dict[str, Any]:
    from infer.families import family_of  # noqa: PLC0415 - torch, which `tokenize` does not need

    family = family_of(index)
    shape = family.read_shape(index)
    return {
        "family": family.name,
        "width": shape.width,
        "vocab_size": shape.vocab_size,
        "context_length": shape.context_length,
        "kv_bytes_per_token": 2 * 2 * shape.n_layers * shape.kv_heads * shape.head_dim,
    }


def _describe_text(index: GgufIndex) -> dict[str, Any]:
    tokenizer = Tokenizer.from_metadata(index.metadata)
    template = ChatTemplate.from_metadata(index.metadata, tokenizer)
    return {
        "tokenizer": index.metadata.get("tokenizer.ggml.pre", "?"),
        "stop_tokens": {tokenizer.token_text(t): t for t in sorted(tokenizer.stop_ids)},
        "chat_template": "in the file"
        if "tokenizer.chat_template" in index.metadata
        else "built in",
        "reasoning": ", ".join(template.reasoning_choices) or "none",
    }


def _ranges(numbers: tuple[int, ...]) -> str:
    """'1-5,8' of (1, 2, 3, 4, 5, 8)."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
