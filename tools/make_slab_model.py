"""Write a model that only streamd can use: experts of a real model's sizes, made of random bytes.

    python tools/make_slab_model.py slabs.gguf --gb 8

Slabs are those of a Hy3 file with IQ2_XXS gate and up and Q2_K down (5.31 MB an expert, 192 a
layer, top-8), as many layers as fit; there is next to nothing besides. `streamd bench-io` and
tools/bench_heartbeat.py read it as they would read the real one.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

D_MODEL, D_FF = 4096, 1536
TYPES = {"gate": Type.IQ2_XXS, "up": Type.IQ2_XXS, "down": Type.Q2_K}


def write_slab_model(path: Path, size_bytes: int, n_experts: int = 192, top_k: int = 8) -> None:
    """At least one layer; all layers hold the same bytes, no two experts of a layer do."""
    rng = np.random.Generator(np.random.SFC64(1))
    parts = {}
    for part, type_id in TYPES.items():
        columns, rows = (D_FF, D_MODEL) if part == "down" else (D_MODEL, D_FF)
        block_weights, block_bytes = gguf.GGML_QUANT_SIZES[type_id]
        shape = (n_experts, rows, columns // block_weights * block_bytes)
        parts[part] = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    n_layers = max(1, size_bytes // sum(part.nbytes for part in parts.values()))
    writer = gguf.GGUFWriter(path, "hy_v3")
    writer.add_block_count(n_layers)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(top_k)
    writer.add_tensor("output_norm.weight", np.ones(D_MODEL, np.float32))
    for layer in range(n_layers):
        for part, data in parts.items():
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            writer.add_tensor(name, data, raw_dtype=TYPES[part])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the file")
    options = parser.parse_args()
    write_slab_model(options.path, int(options.gb * 1e9))


if __name__ == "__main__":
    main()
