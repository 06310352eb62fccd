"""Convert a Hugging Face checkpoint (hy_v3, glm_moe_dsa; BF16 or FP8) straight to a GGUF file.

    python tools/gguf_convert.py ~/models/Hy3 -o hy3.gguf
    python tools/gguf_convert.py ~/models/Hy3 -o hy3.gguf --type '*_exps=IQ3_XXS' --dry-run

Tensors are read, quantised and written a stretch at a time, so memory stays below about 1 GB.
An interrupted run goes on where it stopped when it is started again; the file gets its name when
it is whole.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from gguf_making import Output, add_output_options, make, quantised
from gguf_types import TypeChooser, add_type_options, chooser
from hf_families import ConvertedModel, convert_model, mtp_tensors
from hf_metadata import file_metadata
from hf_pieces import check_against
from safetensors_files import Checkpoint

from shared.command import run_command
from shared.quants import TensorType

DEFAULT_TYPES = (("*", "Q8_0"), ("*_exps", "Q4_K"))
# No type: every tensor is chosen anew, none is of its source's type.
_FROM_CHECKPOINT = int(TensorType.F32)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with config.json and safetensors files")
    add_output_options(parser)
    add_type_options(parser, "experts Q4_K, norms and routers F32, all else Q8_0")
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP blocks out")
    parser.add_argument("--name", help="general.name (default: the folder's)")
    parser.add_argument("--pre", help="tokenizer.ggml.pre (default: the family's)")
    return parser.parse_args(words)


def convert(arguments: argparse.Namespace) -> None:
    checkpoint = Checkpoint(arguments.folder)
    try:
        names = checkpoint.tensors.keys()
        model = convert_model(checkpoint.config, names, not arguments.no_mtp)
        left_out = mtp_tensors(names, model.n_layers) if arguments.no_mtp else set()
        check_against(checkpoint, model.pieces, left_out)
        types = chooser(arguments, DEFAULT_TYPES, model.n_layers)
        sources = [*checkpoint.paths, *([arguments.imatrix] if arguments.imatrix else [])]
        metadata = file_metadata(
            arguments.folder, checkpoint.config, model, arguments.name, arguments.pre
        )
        make(arguments, metadata, _outputs(checkpoint, model, types), sources)
    finally:
        checkpoint.close()


def _outputs(checkpoint: Checkpoint, model: ConvertedModel, types: TypeChooser) -> list[Output]:
    return [
        quantised(
            piece.name,
            piece.shape,
            types.choose(piece.name, piece.shape, _FROM_CHECKPOINT),
            partial(piece.load, checkpoint),
            types.importance,
        )
        for piece in model.pieces
    ]


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run_command("gguf_convert", lambda: convert(arguments))


if __name__ == "__main__":
    sys.exit(main())
