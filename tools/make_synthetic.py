"""A model of real widths with random weights, any number of layers and any quant mix.

    python tools/make_synthetic.py --out /tmp/hy3-16.gguf --layers 16
    python tools/make_synthetic.py --family glm --out /tmp/glm-8.gguf --layers 8

Its blocks are valid and its activations stay finite, but it says nothing. Routing is skewed as real
routing is: each layer's router has a bias by which its experts are chosen about as unevenly as
Zipf's law says (--skew 0: evenly, which no real model is). Layers are written one at a time.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf_blocks import random_blocks
from gguf_factory import TinyModel, TinyTensor, add_value, float_tensor, hy3_model
from gguf_glm import GlmSizes, glm_model

from shared.command import run_command
from shared.errors import ConfigError

TOP_K = 8  # of both families
HY3_WIDTHS = {
    "width": 4096,
    "expert_width": 1536,
    "dense_width": 13312,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 128,
    "n_experts": 192,
    "top_k": TOP_K,
    "vocab_count": 32768,  # of 120,832: the embedding is not what is measured
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.gguf")
    parser.add_argument("--force", action="store_true", help="replace FILE.gguf where it exists")
    parser.add_argument("--family", choices=("hy3", "glm"), default="hy3")
    parser.add_argument("--layers", type=int, default=16, help="2 or more: the first one is dense")
    parser.add_argument("--expert-count", type=int, help="instead of the real 192 or 256")
    parser.add_argument("--experts", default="IQ2_XXS,IQ2_XXS,Q2_K", metavar="GATE,UP,DOWN")
    parser.add_argument("--resident", default="Q8_0", metavar="TYPE")
    parser.add_argument("--skew", type=float, default=0.7, help="Zipf exponent of popularity")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    check(arguments)
    started_s = time.monotonic()
    total_bytes = write_model(arguments)
    print(f"{arguments.out}: {total_bytes / 1e9:.2f} GB in {time.monotonic() - started_s:.0f} s")


def check(arguments: argparse.Namespace) -> None:
    """ConfigError for what no model, or no file, can be made of."""
    if arguments.layers < 2:
        raise ConfigError(
            f"--layers {arguments.layers}: the first layer is dense, experts begin in the second",
            "give 2 or more",
        )
    if arguments.expert_count is not None and arguments.expert_count < TOP_K:
        raise ConfigError(
            f"--expert-count {arguments.expert_count}: each token goes to {TOP_K} experts of a"
            " layer",
            f"give {TOP_K} or more, or leave it out",
        )
    expert_types(arguments.experts)
    tensor_type("--resident", arguments.resident)
    out = arguments.out
    if out.exists() and not arguments.force:
        raise ConfigError(f"{out} exists", "give another --out, or --force to replace it")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(
            f"{out} cannot be written: {out.parent} is no directory that we may write to",
            "make it, or give another --out",
        )


def expert_types(text: str) -> tuple[Type, Type, Type]:
    """Of gate, up and down. ConfigError for what are not three known types."""
    names = text.split(",")
    if len(names) != 3:
        raise ConfigError(
            f"--experts {text}: an expert has three matrices",
            "give the types of GATE,UP,DOWN such as IQ2_XXS,IQ2_XXS,Q2_K",
        )
    gate, up, down = (tensor_type("--experts", name) for name in names)
    return gate, up, down


def tensor_type(option: str, name: str) -> Type:
    """ConfigError for a name that is none, or of a type of which no blocks can be made."""
    try:
        kind = Type[name]
        random_blocks(np.random.default_rng(0), kind, 1, 256)
    except (KeyError, NotImplementedError, ValueError):
        raise ConfigError(
            f"{option}: no tensor of type {name!r} can be made",
            "give one such as F16, Q8_0, Q4_K, Q2_K or IQ2_XXS",
        ) from None
    return kind


def write_model(arguments: argparse.Namespace) -> int:
    """A layer is made, written and forgotten, so that memory holds one."""
    knobs = {
        "expert_types": expert_types(arguments.experts),
        "resident_type": tensor_type("--resident", arguments.resident),
        "seed": arguments.seed,
    }
    if arguments.expert_count is not None:
        knobs["n_experts"] = arguments.expert_count
    rng = np.random.default_rng(arguments.seed)
    make_pattern = hy3_pattern if arguments.family == "hy3" else glm_pattern
    pattern, likes = make_pattern(knobs, arguments.layers)
    names = _names(pattern.tensors, likes)
    writer = gguf.GGUFWriter(arguments.out, pattern.architecture)
    for key, value in pattern.metadata.items():
        add_value(writer, key, value)
    for name, source in names:
        tensor = pattern.tensors[source]
        shape = (*tensor.shape[:0:-1], tensor.data.shape[-1])
        writer.add_tensor_info(
            name, shape, np.dtype(np.uint8), tensor.data.nbytes, raw_dtype=Type(tensor.type_id)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in names:
        writer.write_tensor_data(_data(rng, name, pattern.tensors[source], arguments.skew))
        if sys.stderr.isatty():
            print(f"\r{name:<40}", end="", file=sys.stderr)
    writer.close()
    return arguments.out.stat().st_size


def hy3_pattern(knobs: dict[str, Any], n_layers: int) -> tuple[TinyModel, list[int]]:
    """A model with every kind of layer there is, which metadata call one of `n_layers`; and which
    of its layers each of those is like: one is dense, one has experts."""
    pattern = hy3_model(**(HY3_WIDTHS | knobs), n_layers=2)
    pattern.metadata |= {"hy_v3.block_count": n_layers, "hy_v3.context_length": 131072}
    return pattern, [0] + [1] * (n_layers - 1)


def glm_pattern(knobs: dict[str, Any], n_layers: int) -> tuple[TinyModel, list[int]]:
    """As `hy3_pattern`: of the layers with experts one owns an index, one does not."""
    pattern = glm_model(GlmSizes.real(), n_layers=3, index_layers=(True, True, False), **knobs)
    owns = [layer < 2 or layer % 4 == 2 for layer in range(n_layers)]
    pattern.metadata |= {
        "glm-dsa.block_count": n_layers,
        "glm-dsa.attention.indexer.types": owns,
    }
    return pattern, [0] + [1 if own else 2 for own in owns[1:]]


def _names(tensors: dict[str, TinyTensor], likes: list[int]) -> list[tuple[str, str]]:
    """(name, tensor of the pattern that it is like) of every tensor, in file order."""
    names = [(name, name) for name in tensors if not name.startswith("blk.")]
    for layer, like_layer in enumerate(likes):
        like, own = f"blk.{like_layer}.", f"blk.{layer}."
        names += [
            (own + name.removeprefix(like), name) for name in tensors if name.startswith(like)
        ]
    return names


def _data(rng: np.random.Generator, name: str, tensor: TinyTensor, skew: float) -> np.ndarray:
    """The pattern's blocks in another order for every layer: as random, and made in a moment."""
    if "exp_probs_b" in name:
        ranks = rng.permutation(tensor.shape[0]) + 1.0
        # Added to sigmoid's values, which spread by about 0.2 here.
        bias = 0.2 * (ranks**-skew - np.mean(ranks**-skew)) if skew else np.zeros(len(ranks))
        return float_tensor(bias).data
    if "norm" in name or tensor.data.ndim != 2 or tensor.data.shape[0] < 2:
        return tensor.data
    return np.roll(tensor.data, int(rng.integers(1, tensor.data.shape[0])), axis=0)


if __name__ == "__main__":
    sys.exit(run_command("make_synthetic", main))
