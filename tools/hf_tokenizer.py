"""A checkpoint's tokenizer as GGUF metadata: byte-level BPE, special tokens, chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors_files import read_json

from shared.errors import MalformedModel, UnsupportedModel

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
_REMEDY = "download the tokenizer's files again"


def tokenizer_metadata(
    folder: Path, config: Mapping[str, Any], vocab_size: int, pre_tokenizer: str
) -> dict[str, Any]:
    """From tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja.

    Ids beyond the tokenizer's get placeholders of type unused, up to `vocab_size`.
    UnsupportedModel for another kind than byte-level BPE.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    settings = _optional_json(folder / "tokenizer_config.json")
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedModel(
            f"{folder}/tokenizer.json is not byte-level BPE", "no family here has another kind"
        )
    tokens, types = _tokens(folder, tokenizer, vocab_size)
    ids = {text: number for number, text in enumerate(tokens)}
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [_merge(merge) for merge in model.get("merges", [])],
    }
    metadata |= _special_ids(folder, config, settings, ids)
    # The templates of these families emit the first token themselves.
    metadata["tokenizer.ggml.add_bos_token"] = bool(settings.get("add_bos_token", False))
    template = _chat_template(folder, settings)
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def _tokens(
    folder: Path, tokenizer: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Texts and types by id."""
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    entries = [(text, number, NORMAL) for text, number in tokenizer["model"]["vocab"].items()]
    entries += [
        (added["content"], added["id"], CONTROL if added.get("special") else USER_DEFINED)
        for added in tokenizer.get("added_tokens", [])
    ]
    for text, number, kind in entries:
        if not 0 <= number < vocab_size:
            raise MalformedModel(
                f"{folder}: token {number} is beyond the {vocab_size} of config.json", _REMEDY
            )
        texts[number], types[number] = text, kind
    return texts, types


def _merge(merge: str | list[str]) -> str:
    """Older files have one text, newer ones two."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _special_ids(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, int]:
    """bos, eos, pad, unk by id. Further ends of an answer become eot and eom."""
    generation = _optional_json(folder / "generation_config.json")
    found: dict[str, int] = {}
    ends: list[int] = []
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        text = settings.get(f"{name}_token")
        text = text["content"] if isinstance(text, Mapping) else text
        numbers = generation.get(f"{name}_token_id", config.get(f"{name}_token_id"))
        listed = numbers if isinstance(numbers, list) else [numbers]
        number = ids[text] if text in ids else listed[0]
        if number is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = number
        if name == "eos":
            ends = [end for end in listed if end not in (None, number)]
    for key, number in zip(("eot", "eom"), ends, strict=False):
        found[f"tokenizer.ggml.{key}_token_id"] = number
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template", "")
    if isinstance(template, list):  # several, by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default", "")
    return template or ""


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
