"""All keys of a converted file: general, the family's, the tokenizer's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_families import ConvertedModel
from hf_tokenizer import tokenizer_metadata

QUANTIZATION_VERSION = 2  # ggml's, of the block formats


def file_metadata(
    folder: Path,
    config: Mapping[str, Any],
    model: ConvertedModel,
    name: str | None,
    pre_tokenizer: str | None,
) -> dict[str, Any]:
    """`name` and `pre_tokenizer` replace the folder's name and the family's pre-tokenizer."""
    return {
        "general.architecture": model.family.architecture,
        "general.type": "model",
        "general.name": name or folder.resolve().name,
        "general.quantization_version": QUANTIZATION_VERSION,
        **model.metadata,
        **tokenizer_metadata(
            folder, config, model.vocab_size, pre_tokenizer or model.family.pre_tokenizer
        ),
    }
