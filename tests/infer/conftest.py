"""A vocabulary small enough to write expectations by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer.bpe import BYTE_ALPHABET
from infer.tokenizer import Tokenizer
from infer.vocabulary import TokenType


def _metadata(merges=("a b", "ab c"), extra=(), pre="gpt-2", **keys) -> dict[str, Any]:
    """Token i is byte i; then come one token a merge, and `extra`: pairs of text and type."""
    merges = list(merges)
    tokens = [*BYTE_ALPHABET, *dict.fromkeys(m.replace(" ", "") for m in merges)]
    types = [TokenType.NORMAL] * len(tokens)
    tokens += [text for text, _ in extra]
    types += [kind for _, kind in extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="session")
def small_metadata() -> Callable[..., dict[str, Any]]:
    """Builds the metadata of 256 bytes, `ab` = 256, `abc` = 257, and what a test adds."""
    return _metadata


@pytest.fixture(scope="session")
def small_tokenizer() -> Callable[..., Tokenizer]:
    """Builds the tokenizer of such metadata."""
    return lambda **arguments: Tokenizer.from_metadata(_metadata(**arguments))
