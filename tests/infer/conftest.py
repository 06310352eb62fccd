"""A vocabulary small enough to write expectations by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from infer.bpe import BYTE_ALPHABET

NORMAL = 1


def _metadata(merges=("a b", "ab c"), extra=(), pre="gpt-2", **keys) -> dict[str, Any]:
    """Token i is byte i; then come one token a merge, and `extra`: pairs of text and type."""
    merges = list(merges)
    tokens = [*BYTE_ALPHABET, *dict.fromkeys(m.replace(" ", "") for m in merges)]
    types = [NORMAL] * len(tokens)
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
    """Metadata of a tokenizer with 256 bytes, `ab` = 256, `abc` = 257, and what a test adds."""
    return _metadata
