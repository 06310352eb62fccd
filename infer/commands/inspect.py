"""`infer inspect`: what a GGUF file holds, what it needs, and what of it we cannot use.

A header alone is enough. A file that ends inside its header, or lacks its siblings, is described as
far as it goes.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infer.text.template import ChatTemplate
from infer.text.tokenizer import Tokenizer
from shared.errors import MalformedModel, StreamError
from shared.experts import ExpertIndex, resident_tensors, trunk_layer_count
from shared.gguf_fragment import UNKNOWN_ARCHITECTURE, read_fragment
from shared.gguf_index import GgufIndex
from shared.gguf_shard import TensorInfo
from shared.quants import TensorType

# What a KV cache takes of a number, unless --exact.
CACHE_VALUE_BYTES = 2


def inspect(arguments: argparse.Namespace) -> int:
    index, faults, is_cut = open_to_look(arguments.file)
    values = describe(index, faults, is_cut)
    if arguments.json:
        if arguments.tensors:
            values["tensors"] = [_tensor_values(tensor) for tensor in index.tensors.values()]
        print(json.dumps(values))
        return 0
    for line in render(values):
        print(line)
    if arguments.tensors:
        for tensor in index.tensors.values():
            shape = " x ".join(map(str, tensor.shape))
            kind = TensorType(tensor.type_id).name
            print(f"  {tensor.name:<40} {kind:<8} {tensor.byte_count:>16,} bytes  {shape}")
    return 0


def open_to_look(path: Path) -> tuple[GgufIndex, list[str], bool]:
    """The file as far as it can be read, what is wrong with it; whether it ends in its header."""
    try:
        index = GgufIndex.open(path, partial=True)
    except MalformedModel as error:
        fragment = read_fragment(path.absolute())
        read = (
            f"read: {len(fragment.index.metadata)} of {fragment.key_count} keys,"
            f" {len(fragment.index.tensors)} of {fragment.tensor_count} tensors"
        )
        if fragment.fault:
            read += "; what is not told here is probably behind that"
        return fragment.index, [fragment.fault or error.message, read], bool(fragment.fault)
    missing = [
        t for t in index.tensors.values() if _end(t) > index.fingerprints[t.file_index].size_bytes
    ]
    if not missing:
        return index, [], False
    lacking_bytes = sum(tensor.byte_count for tensor in missing)
    fault = (
        f"{len(missing)} of {len(index.tensors)} tensors, {lacking_bytes:,} bytes, are not in the"
        " file: it is a header alone, or was cut"
    )
    return index, [fault], False


def _end(tensor: TensorInfo) -> int:
    return tensor.offset + tensor.byte_count


def describe(index: GgufIndex, faults: Iterable[str] = (), is_cut: bool = False) -> dict[str, Any]:
    """Shapes, quant mix, sizes, tokenizer; `unsupported` says what cannot be used, and why.

    is_cut: the file ends in its header. What is missing proves nothing then.
    """
    values: dict[str, Any] = {
        "file": str(index.paths[0]),
        "shards": len(index.paths),
        "file_bytes": sum(fingerprint.size_bytes for fingerprint in index.fingerprints),
        "architecture": index.architecture,
        "model": index.metadata.get("general.name", "?"),
    }
    problems = []
    is_named = index.architecture != UNKNOWN_ARCHITECTURE
    judged_by_what_is_there = (_check_kernels, _check_family) if is_named else (_check_kernels,)
    for part in (
        _describe_experts,
        _describe_types,
        _check_kernels,
        _check_family,
        _describe_family,
        _describe_tokenizer,
        _describe_template,
    ):
        try:
            values |= part(index)
        except StreamError as error:
            if not is_cut or part in judged_by_what_is_there:
                problems.append(str(error))
    if problems:
        values["unsupported"] = list(dict.fromkeys(problems))
    if broken := list(faults):
        values["incomplete"] = broken
    return values


def _describe_experts(index: GgufIndex) -> dict[str, Any]:
    experts = ExpertIndex.from_gguf(index)
    trunk_count = trunk_layer_count(index)
    return {
        "layers": experts.n_layers,
        "dense_layers": int((experts.layer_class < 0).sum()),
        "mtp_layers": index.arch_optional("nextn_predict_layers", int, 0),
        "experts_per_layer": experts.n_experts,
        "top_k": experts.top_k,
        "slab_classes": [
            {
                "layers": ranges(c.layers),
                "slab_bytes": c.slab_bytes,
                "part_bytes": list(c.part_bytes),
                "experts": c.expert_count,
            }
            for c in experts.classes
        ],
        "expert_bytes": sum(c.slab_bytes * c.expert_count for c in experts.classes),
        "resident_bytes": sum(t.byte_count for t in resident_tensors(index)),
        "mtp_bytes": sum(
            t.byte_count for t in index.tensors.values() if (_layer_of(t.name) or 0) >= trunk_count
        ),
        "cold_bytes_per_token": sum(
            experts.top_k * c.slab_bytes * len(c.layers) for c in experts.classes
        ),
    }


def _describe_types(index: GgufIndex) -> dict[str, Any]:
    """Which types, and layers of the same ones together."""
    types = Counter(TensorType(t.type_id).name for t in index.tensors.values())
    of_layer: dict[int, dict[str, str]] = {}
    elsewhere: dict[str, str] = {}
    for tensor in index.tensors.values():
        kind = TensorType(tensor.type_id).name
        layer = _layer_of(tensor.name)
        if layer is None:
            elsewhere[tensor.name.removesuffix(".weight")] = kind
        else:
            part = tensor.name.split(".", 2)[2].removesuffix(".weight")
            of_layer.setdefault(layer, {})[part] = kind
    mixes: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for layer in sorted(of_layer):
        mixes.setdefault(tuple(sorted(of_layer[layer].items())), []).append(layer)
    return {
        "tensors": len(index.tensors),
        "tensor_types": dict(types.most_common()),
        "types_outside_layers": elsewhere,
        "layer_types": [
            {"layers": ranges(layers), "types": dict(mix)} for mix, layers in mixes.items()
        ],
    }


def _check_kernels(index: GgufIndex) -> dict[str, Any]:
    """UnsupportedModel for a matrix of a type that nothing multiplies; nothing to describe."""
    from infer.kernels.ggml_library import load  # noqa: PLC0415 - the library, for this alone

    library = load()
    for kind in sorted({t.type_id for t in index.tensors.values() if len(t.shape) > 1}):
        library.functions(kind)
    return {}


def _check_family(index: GgufIndex) -> dict[str, Any]:
    """UnsupportedModel for an architecture that is not ours; nothing to describe."""
    from infer.families import family_of  # noqa: PLC0415 - torch

    family_of(index)
    return {}


def _describe_family(index: GgufIndex) -> dict[str, Any]:
    from infer.families import family_of  # noqa: PLC0415 - torch, last

    family = family_of(index)
    shape = family.read_shape(index)
    return {
        "family": family.name,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "vocab_size": shape.vocab_size,
        "context_length": shape.context_length,
        "kv_bytes_per_token": CACHE_VALUE_BYTES * shape.cache.token_values,
    }


def _describe_tokenizer(index: GgufIndex) -> dict[str, Any]:
    tokenizer = Tokenizer.from_metadata(index.metadata)
    return {
        "tokenizer": index.metadata.get("tokenizer.ggml.pre", "?"),
        "stop_tokens": {tokenizer.token_text(t): t for t in sorted(tokenizer.stop_ids)},
    }


def _describe_template(index: GgufIndex) -> dict[str, Any]:
    tokenizer = Tokenizer.from_metadata(index.metadata)
    template = ChatTemplate.from_metadata(index.metadata, tokenizer)
    in_file = "tokenizer.chat_template" in index.metadata
    return {
        "chat_template": "in the file" if in_file else "built in",
        "reasoning": ", ".join(template.reasoning_choices) or "none",
    }


def _tensor_values(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "type": TensorType(tensor.type_id).name,
        "bytes": tensor.byte_count,
        "shard": tensor.file_index,
        "offset": tensor.offset,
    }


def render(values: dict[str, Any]) -> list[str]:
    """A line a value, a list's below its name."""
    lines = []
    for name, value in values.items():
        if isinstance(value, list):
            lines.append(name)
            show = _shown_mix if name == "layer_types" else _shown
            lines += [f"  {show(item)}" for item in value]
        else:
            lines.append(f"{name:<24} {_shown(value)}")
    return lines


def _shown_mix(mix: dict[str, Any]) -> str:
    """The tensors of each type, together."""
    names: dict[str, list[str]] = {}
    for name, kind in mix["types"].items():
        names.setdefault(kind, []).append(name)
    return f"{mix['layers']}: " + "; ".join(f"{kind} {' '.join(n)}" for kind, n in names.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " + ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _layer_of(name: str) -> int | None:
    """The N of blk.N.*"""
    words = name.split(".", 2)
    return int(words[1]) if words[0] == "blk" and len(words) == 3 and words[1].isdecimal() else None


def ranges(numbers: Iterable[int]) -> str:
    """'1-5,8' of (1, 2, 3, 4, 5, 8)."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
