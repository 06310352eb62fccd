"""Text to token ids and back.

Which tokens a text may contain is decided by their type: control tokens are found in text only
where the caller asks for it, so that a user's `<|im_end|>` stays ten harmless characters;
user-defined ones are always found.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from infer.text.bpe import BytePairEncoder, unspell
from infer.text.vocabulary import TokenType, Vocabulary
from shared.errors import RequestError

MAX_TEXT_CHARS = 1 << 26


class Tokenizer:
    """Byte-level BPE over a vocabulary; immutable.

    bos_id, eos_id: None where the file names none.
    stop_ids: every token that ends an answer.
    add_bos: whether a prompt that does not begin with `bos_id` gets it put in front.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.stop_ids = vocabulary.stop_ids
        self.add_bos = vocabulary.add_bos
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._control_ids = vocabulary.of_types(TokenType.CONTROL, TokenType.UNKNOWN)
        self._user_defined_ids = vocabulary.of_types(TokenType.USER_DEFINED)
        self._special_ids = self._user_defined_ids | self._control_ids
        self._ids = vocabulary.ids.copy()
        for text, token in self._control_ids.items():
            if self._ids[text] == token:  # merging plain text must never arrive at it
                del self._ids[text]
        cut = vocabulary.pre_tokenizer
        self._split = cut.split
        self._bpe = BytePairEncoder(vocabulary.merges, self._ids, cut.ignore_merges)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """From a GGUF file's metadata; arguments and errors as Vocabulary.from_metadata."""
        return cls(Vocabulary.from_metadata(metadata))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def control_texts(self) -> Iterable[str]:
        """Texts of the tokens that only a template may put into a prompt."""
        return self._control_ids.keys()

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled exactly so in the file, control tokens included."""
        return self._control_ids.get(text, self._ids.get(text))

    def token_text(self, token: int) -> str:
        """A token as the file spells it; raises RequestError for an id outside the vocabulary."""
        return self._tokens[self._checked(token)]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`, no BOS added.

        special: recognise control tokens in the text too, not only user-defined ones.
        Raises RequestError for text that is too long or no valid Unicode.
        """
        _check_text(text)
        out: list[int] = []
        for part in self._partition(text, self._special if special else self._user_defined):
            if isinstance(part, int):
                out.append(part)
            else:
                for piece in self._split(part):
                    out += self._bpe.encode(piece)
        return out

    def split_special(self, text: str) -> Iterator[str | int]:
        """The ids of the control and user-defined tokens in `text`, and the text between them."""
        return self._partition(text, self._special)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. special: show control tokens."""
        return b"".join(self.token_bytes(i, special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """The bytes a token stands for; none for control and unused ones unless `special`.

        Raises RequestError for an id outside the vocabulary.
        """
        kind = self._types[self._checked(token)]
        if kind == TokenType.NORMAL:
            return unspell(self._tokens[token])
        if kind == TokenType.USER_DEFINED or special:
            return self._tokens[token].encode("utf-8", "surrogateescape")
        return b""

    def _checked(self, token: int) -> int:
        if not 0 <= token < len(self._tokens):
            raise RequestError(
                f"token {token} is outside the vocabulary",
                f"use ids from 0 to {len(self._tokens) - 1}",
            )
        return token

    def _partition(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[str | int]:
        end = 0
        for match in pattern.finditer(text) if pattern else ():
            if match.start() > end:
                yield text[end : match.start()]
            yield self._special_ids[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:]

    # Compiled at first use: real vocabularies have a thousand control tokens, and much of what is
    # tokenized contains none.
    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        return _any_of(self._special_ids)

    @cached_property
    def _user_defined(self) -> re.Pattern[str] | None:
        return _any_of(self._user_defined_ids)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """An expression for any of `texts`: the leftmost, and of those that begin there the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise RequestError(
            f"the text has {len(text)} characters, more than the {MAX_TEXT_CHARS} taken at once",
            "give it in parts",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode at character {error.start}",
            "give UTF-8 text",
        ) from None
