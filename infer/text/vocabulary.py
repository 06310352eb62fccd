"""The vocabulary a GGUF file declares: token texts, their types, merges and named tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from infer.text.pretokenizers import PreTokenizer, pre_tokenizer
from shared.errors import MalformedModel, UnsupportedModel

MAX_VOCAB = 1 << 22
_REMEDY = "convert or download the model again"

# Tokens that end a turn whatever the metadata say of them.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",  # GLM ends its turn by naming whose turn it is
    "<|observation|>",
    *(
        f"<{bar}hy_{name}{suffix}{bar}>"
        for name in ("eos", "EOT", "end_of_sentence", "end▁of▁sentence")
        for suffix in (":opensource", "")
        for bar in ("｜", "|")
    ),
)
# What a program reads in an answer: some files call these control tokens, which are not shown.
_TOOL_CALL = tuple(
    f"<{slash}{name}>"
    for name in ("tool_call", "tool_response", "arg_key", "arg_value")
    for slash in ("", "/")
)
# <|user|>, <｜User｜>, <think:opensource>
_FRAMED = re.compile(r"<[|｜][^<>\s]+[|｜]>|</?[^<>\s]+:opensource>")
# Texts as ordinary as these end a turn only where their type says control.
_END_OF_TURN_IF_CONTROL = ("</s>", "<eos>", "<EOT>", "[EOT]", "[EOS]", "<eop>")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, one value a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """
    tokens: text of every token, in the byte alphabet where its type is normal.
    types: int8 [len(tokens)], values of TokenType.
    ids: text -> id; of two tokens with one text the lower id.
    bos_id, eos_id: None where the file names none.
    stop_ids: every token that ends an answer.
    """

    tokens: list[str]
    types: np.ndarray
    ids: dict[str, int]
    merges: list[str]
    pre_tokenizer: PreTokenizer
    bos_id: int | None
    eos_id: int | None
    stop_ids: frozenset[int]
    add_bos: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """metadata: a GGUF file's key-value pairs; arrays of strings as list[str], of numbers as
        numpy arrays or lists.

        Raises UnsupportedModel for another kind of tokenizer, MalformedModel for missing or
        contradictory keys.
        """
        _check_model(metadata.get("tokenizer.ggml.model"))
        cut = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        merges = _strings(metadata, "tokenizer.ggml.merges")
        if len(tokens) > MAX_VOCAB:
            raise MalformedModel(
                f"{len(tokens)} tokens are more than any model has ({MAX_VOCAB})", _REMEDY
            )
        types = _token_types(metadata.get("tokenizer.ggml.token_type"), tokens)
        ids = dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))
        _show_tool_calls(ids, types)
        named = {
            name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
            for name in ("bos", "eos", "eot", "eom")
        }
        return cls(
            tokens=tokens,
            types=types,
            ids=ids,
            merges=merges,
            pre_tokenizer=cut,
            bos_id=named["bos"],
            eos_id=named["eos"],
            stop_ids=_by_text(ids, types) | {i for i in _ends(named) if i is not None},
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        )

    def of_types(self, *types: TokenType) -> dict[str, int]:
        """text -> id of the tokens of these types, those without a text left out."""
        found = np.flatnonzero(np.isin(self.types, types))
        return {self.tokens[i]: i for i in found.tolist() if self.tokens[i]}


def _ends(named: Mapping[str, int | None]) -> tuple[int | None, ...]:
    return named["eos"], named["eot"], named["eom"]


def _by_text(ids: Mapping[str, int], types: np.ndarray) -> frozenset[int]:
    """Ids of the end-of-turn tokens by their texts. Files exist that call them normal text; their
    type is set to control, so that they are neither shown nor found in a user's text."""
    found = [ids[text] for text in _END_OF_TURN if text in ids]
    types[found] = TokenType.CONTROL
    ordinary = [ids[text] for text in _END_OF_TURN_IF_CONTROL if text in ids]
    return frozenset(found + [i for i in ordinary if types[i] == TokenType.CONTROL])


def _show_tool_calls(ids: Mapping[str, int], types: np.ndarray) -> None:
    for text in _TOOL_CALL:
        if text in ids and types[ids[text]] == TokenType.CONTROL:
            types[ids[text]] = TokenType.USER_DEFINED


def _check_model(model: Any) -> None:
    if model is None:
        raise MalformedModel(
            "the file has no tokenizer (tokenizer.ggml.model is missing)",
            "use a file converted with its tokenizer",
        )
    if model != "gpt2":
        kind = "a SentencePiece tokenizer" if model == "llama" else f"tokenizer model {model!r}"
        raise UnsupportedModel(
            f"{kind} is not supported",
            "only byte-level BPE is (tokenizer.ggml.model = gpt2)",
        )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or set(map(type, value)) != {str}:
        raise MalformedModel(
            f"{key} is missing or no list of strings",
            "use a file converted with its tokenizer",
        )
    return value


def _token_types(value: Any, tokens: list[str]) -> np.ndarray:
    """int8 [len(tokens)], a copy; where the file does not say, what is framed is control."""
    count = len(tokens)
    if value is None:
        framed = [_FRAMED.fullmatch(text) is not None for text in tokens]
        return np.where(framed, TokenType.CONTROL, TokenType.NORMAL).astype(np.int8)
    types = np.asarray(value)
    if types.shape != (count,) or types.dtype.kind not in "iu":
        raise MalformedModel(f"tokenizer.ggml.token_type does not have {count} integers", _REMEDY)
    if types.min() < TokenType.UNDEFINED or types.max() > TokenType.BYTE:
        raise MalformedModel("tokenizer.ggml.token_type has values that mean nothing", _REMEDY)
    if (types == TokenType.BYTE).any():
        raise UnsupportedModel(
            "the vocabulary falls back to byte tokens, as SentencePiece ones do",
            "only byte-level BPE is supported",
        )
    return types.astype(np.int8)


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or not 0 <= value < count:
        raise MalformedModel(f"{key} is {value!r}, but there are {count} tokens", _REMEDY)
    return int(value)
