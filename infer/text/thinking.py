"""Telling a model's reasoning from its answer, by the think tokens of its vocabulary."""

import re
from collections.abc import Iterable

from infer.text.tokenizer import Tokenizer

# <think>, or with a suffix such as Hy3's <think:opensource>.
_OPEN = re.compile(r"<think(:[^<>]*)?>")
_CLOSE = re.compile(r"</think(:[^<>]*)?>")


class ThinkingTracker:
    """Whether the token that comes next is reasoning."""

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int]) -> None:
        # Plain ones may be user-defined tokens, which GLM's are: then they are no control texts.
        texts = [*tokenizer.control_texts, "<think>", "</think>"]
        self._open = _ids(tokenizer, texts, _OPEN)
        self._close = _ids(tokenizer, texts, _CLOSE)
        self.thinking = False
        for token in prompt:
            self.see(token)

    def see(self, token: int) -> bool:
        """Take note of a token; True if it is a think token itself, which is no text."""
        if token in self._open:
            self.thinking = True
        elif token in self._close:
            self.thinking = False
        else:
            return False
        return True


def _ids(tokenizer: Tokenizer, texts: list[str], pattern: re.Pattern[str]) -> frozenset[int]:
    ids = (tokenizer.token_id(text) for text in texts if pattern.fullmatch(text))
    return frozenset(token for token in ids if token is not None)
