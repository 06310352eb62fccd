"""Give tensors of a GGUF file other types, or those of a second file.

    python tools/gguf_mix.py hy3-q8.gguf -o hy3-mix.gguf --imatrix hy3.imatrix.gguf \\
        --type '*_exps=IQ2_XXS' --type '*down_exps=Q2_K' --type 'blk.{74..79}.*_exps=Q4_K'
    python tools/gguf_mix.py hy3-iq2.gguf -o hy3-mix.gguf \\
        --splice hy3-q4.gguf --take 'blk.{74..79}.*_exps'

What no rule names stays as it is, bit for bit; so does what is spliced in. Any shard names a split
model; the result is one file. An interrupted run goes on where it stopped when it is started again.
Requantise from Q8_0 or better where you can: every quantisation's error adds to the one before.
"""

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gguf_importance import Importance
from gguf_layout import TensorPlan
from gguf_making import Output, add_output_options, make, quantised
from gguf_quantize import type_name
from gguf_sources import GgufSource
from gguf_types import Choice, TypeChooser, add_type_options, chooser, compile_pattern

from shared.command import run_command
from shared.errors import ConfigError, MalformedModel
from shared.experts import trunk_layer_count
from shared.gguf_index import TensorInfo

MTP_EXPERTS = "Q2_K"


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="SOURCE.gguf")
    add_output_options(parser)
    add_type_options(
        parser,
        f"as in the source. MTP experts that a rule names get {MTP_EXPERTS} (--mtp-experts)",
    )
    parser.add_argument("--splice", type=Path, metavar="OTHER.gguf", help="take tensors from it")
    parser.add_argument(
        "--take",
        action="append",
        default=[],
        metavar="PATTERN",
        help="which tensors of OTHER.gguf replace the source's; may be repeated",
    )
    return parser.parse_args(words)


def mix(arguments: argparse.Namespace) -> None:
    if bool(arguments.splice) != bool(arguments.take):
        raise ConfigError("--splice and --take belong together", "give both or none")
    with ExitStack() as stack:
        source = stack.enter_context(GgufSource(arguments.model))
        types = chooser(arguments, (), trunk_layer_count(source.index), MTP_EXPERTS)
        taken: dict[str, TensorInfo] = {}
        other = source
        if arguments.splice:
            other = stack.enter_context(GgufSource(arguments.splice))
            taken = _taken(source, other, arguments.take)
        outputs = [
            _spliced(other, taken[tensor.name], arguments.splice)
            if tensor.name in taken
            else _output(source, tensor, types)
            for tensor in sorted(
                source.index.tensors.values(), key=lambda t: (t.file_index, t.offset)
            )
        ]
        sources = {*source.index.paths, *other.index.paths}
        if arguments.imatrix:
            sources.add(arguments.imatrix)
        metadata = source.metadata() | _provenance(types.importance)
        make(arguments, metadata, outputs, sorted(sources))


def _output(source: GgufSource, tensor: TensorInfo, types: TypeChooser) -> Output:
    choice = types.choose(tensor.name, tensor.shape, tensor.type_id)
    if choice.type_id == tensor.type_id:
        return _copied(source, tensor, "")
    note = f"was {type_name(tensor.type_id)}" + (f"; {choice.note}" if choice.note else "")
    return quantised(
        tensor.name,
        tensor.shape,
        Choice(choice.type_id, note),
        partial(source.rows, tensor),
        types.importance,
    )


def _spliced(other: GgufSource, tensor: TensorInfo, path: Path) -> Output:
    return _copied(other, tensor, f"from {path.name}")


def _copied(source: GgufSource, tensor: TensorInfo, note: str) -> Output:
    plan = TensorPlan(tensor.name, tensor.shape, tensor.type_id)
    return Output(plan, note, partial(source.copy, tensor))


def _taken(source: GgufSource, other: GgufSource, patterns: list[str]) -> dict[str, TensorInfo]:
    """The other file's tensors that replace the source's, by name."""
    found: dict[str, TensorInfo] = {}
    for text in patterns:
        pattern = compile_pattern(text)
        names = [name for name in other.index.tensors if pattern.fullmatch(name)]
        if not names:
            raise ConfigError(
                f"--take {text} names no tensor of {other.index.paths[0]}",
                "see `infer inspect --tensors` for the names",
            )
        found |= {name: other.index.tensors[name] for name in names}
    for name, tensor in found.items():
        ours = source.index.tensors.get(name)
        if ours is None or ours.shape != tensor.shape:
            raise MalformedModel(
                f"{other.index.paths[0]} has {name} with shape {tensor.shape},"
                f" {source.index.paths[0]} with {ours.shape if ours else 'none'}",
                "splice files of one and the same model",
            )
    return found


def _provenance(importance: Importance | None) -> dict[str, str | int]:
    """What llama.cpp's quantiser writes of an importance matrix."""
    if importance is None:
        return {}
    return {
        "quantize.imatrix.file": importance.path.name,
        "quantize.imatrix.entries_count": len(importance.sums),
        "quantize.imatrix.chunks_count": importance.chunk_count,
    }


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run_command("gguf_mix", lambda: mix(arguments))


if __name__ == "__main__":
    sys.exit(main())
