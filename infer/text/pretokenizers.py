"""How a text is cut into the pieces that byte-pair encoding may not merge across.

`tokenizer.ggml.pre` names one of the entries below. A wrong cut yields valid but different tokens
and a quietly worse model, so an unknown name is refused, never guessed.
Sources of the expressions: the `pre_tokenizer` section of each model's `tokenizer.json`, in the
spelling of llama.cpp, which writes case-insensitive contractions out as character classes.
"""

from dataclasses import dataclass
from typing import Any

import regex

from shared.errors import UnsupportedModel

_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WHITESPACE = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def _words(digits: str) -> str:
    """The Llama-3 expression and its kin; they differ in how many digits make a piece."""
    return "|".join(
        (
            f"(?:{_CONTRACTION})",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            *_WHITESPACE,
        )
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "|".join(
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            *_WHITESPACE,
        )
    ),
)


@dataclass(frozen=True)
class PreTokenizer:
    """Expressions applied in turn, each to every piece the one before it left.

    `ignore_merges`: a piece that is in the vocabulary as a whole is that one token, even where
    the merges would not arrive at it.
    """

    expressions: tuple["regex.Pattern[str]", ...]
    ignore_merges: bool

    def split(self, text: str) -> list[str]:
        """Pieces in order; joined they are `text` again. Linear in the length of `text`."""
        pieces = [text] if text else []
        for expression in self.expressions:
            pieces = [part for piece in pieces for part in _isolate(expression, piece)]
        return pieces


def _isolate(expression: "regex.Pattern[str]", piece: str) -> list[str]:
    """Matches and the gaps between them, both as pieces of their own."""
    parts = []
    end = 0
    for match in expression.finditer(piece):
        if match.start() > end:
            parts.append(piece[end : match.start()])
        parts.append(match.group())
        end = match.end()
    if end < len(piece):
        parts.append(piece[end:])
    return parts


# name -> (expressions, ignore_merges)
_KNOWN: dict[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((_GPT2,), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "qwen2": ((_words(r"\p{N}"),), False),
    "llama-bpe": ((_words(r"\p{N}{1,3}"),), True),
    "glm4": ((_words(r"\p{N}{1,3}"),), True),
    "deepseek-v3": (_DEEPSEEK_V3, False),
    "hunyuan-dense": (_DEEPSEEK_V3, False),
}
_ALIASES = {
    "chatglm-bpe": "glm4",
    "deepseek-r1-qwen": "qwen2",
    "llama-v3": "llama-bpe",
    "llama3": "llama-bpe",
}


def pre_tokenizer(name: Any) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names.

    Raises UnsupportedModel for an unknown name and for None (the key is missing).
    """
    if name is None:
        raise UnsupportedModel(
            "the file does not say how text is cut before tokenizing (tokenizer.ggml.pre)",
            "use a file written by a converter of 2024-05 or later",
        )
    known = _KNOWN.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
    if known is None:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} is not supported",
            f"supported are {', '.join(sorted(_KNOWN | _ALIASES))}",
        )
    expressions, ignore_merges = known
    return PreTokenizer(tuple(regex.compile(e) for e in expressions), ignore_merges)
