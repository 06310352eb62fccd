"""Open a GGUF file with a large vocabulary: our index against the gguf package's reader.

Prints the import time (a fresh interpreter each, numpy included in both) and the open time, the
best of a few, side by side. `python tools/bench_gguf_open.py`
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from shared.gguf_index import GgufIndex

IMPORT_SNIPPET = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def write_model(path: Path, token_count: int, merge_count: int, tensor_count: int) -> None:
    writer = gguf.GGUFWriter(path, "hy_v3")
    tokens = [f"token{index}" for index in range(token_count)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * token_count)
    writer.add_token_merges([f"left{index} right{index}" for index in range(merge_count)])
    for index in range(tensor_count):
        writer.add_tensor(f"blk.{index // 20}.tensor{index % 20}.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def best_seconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def import_seconds(module: str) -> float:
    command = [sys.executable, "-c", IMPORT_SNIPPET.format(module)]
    return min(float(subprocess.check_output(command)) for _ in range(7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=150_000)
    parser.add_argument("--merges", type=int, default=300_000)
    parser.add_argument("--tensors", type=int, default=1_800)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "large.gguf"
        write_model(path, options.tokens, options.merges, options.tensors)
        index = GgufIndex.open(path)
        rows = [
            ("import", import_seconds("shared.gguf_index"), import_seconds("gguf")),
            (
                "open",
                best_seconds(lambda: GgufIndex.open(path), 5),
                best_seconds(lambda: gguf.GGUFReader(path), 1),
            ),
        ]
        decode_seconds = best_seconds(lambda: index.metadata["tokenizer.ggml.merges"], 3)
    print(f"{options.tokens} tokens, {options.merges} merges, {options.tensors} tensors; seconds")
    print(f"{'':8}{'own':>10}{'gguf':>10}")
    for label, own, other in rows:
        print(f"{label:8}{own:10.3f}{other:10.3f}")
    print(f"decoding the merges, on demand: {decode_seconds:.3f}")


if __name__ == "__main__":
    main()
