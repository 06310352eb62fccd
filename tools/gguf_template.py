"""A GGUF file without its tensors' contents, from a config.json and a tokenizer alone.

    python tools/gguf_template.py ~/configs/GLM-5.2 -o glm.gguf --type '*_exps=IQ2_XXS'
    infer inspect glm.gguf
    streamd plan --model glm.gguf

says what a model that is not downloaded would be as a GGUF of these types, and what of it would fit
this machine. The file is a header only; nothing can be served from it.
"""

import argparse
import sys
from pathlib import Path

from gguf_convert import DEFAULT_TYPES
from gguf_layout import TensorPlan, write_header_only
from gguf_making import add_output_options, check_out, show, summary
from gguf_types import add_type_options, chooser
from hf_families import convert_model
from hf_metadata import file_metadata
from safetensors_files import read_json

from shared.command import run_command
from shared.quants import TensorType


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with config.json and tokenizer.json")
    add_output_options(parser, resumable=False)
    add_type_options(parser, "experts Q4_K, norms and routers F32, all else Q8_0", quantising=False)
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP blocks out")
    parser.add_argument("--name", help="general.name (default: the folder's)")
    parser.add_argument("--pre", help="tokenizer.ggml.pre (default: the family's)")
    return parser.parse_args(words)


def write_template(arguments: argparse.Namespace) -> None:
    config = read_json(arguments.folder / "config.json")
    model = convert_model(config, None, not arguments.no_mtp)
    types = chooser(arguments, DEFAULT_TYPES, model.n_layers)
    metadata = file_metadata(arguments.folder, config, model, arguments.name, arguments.pre)
    choices = [types.choose(p.name, p.shape, int(TensorType.F32)) for p in model.pieces]
    plans = [
        TensorPlan(piece.name, piece.shape, choice.type_id)
        for piece, choice in zip(model.pieces, choices, strict=True)
    ]
    if arguments.dry_run:
        show(metadata, plans, [choice.note for choice in choices])
        return
    check_out(arguments, [])
    write_header_only(arguments.out, metadata, plans)
    print(f"{arguments.out}: the header of {summary(metadata, plans)}", file=sys.stderr)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    return run_command("gguf_template", lambda: write_template(arguments))


if __name__ == "__main__":
    sys.exit(main())
