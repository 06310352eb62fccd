"""Keeps message contents from becoming control tokens on their way through a chat template.

A template mixes its own control tokens with what people wrote, and may cut, trim and compare the
latter. So contents go in nearly as they are: only where one could begin a control token (its first
two characters are there, or its first at the very end, where following text might complete it) that
first character is replaced by a mark, which nobody can guess and no trimming removes. After the
rendered text was split at its control tokens the marks are turned back into the characters.

    content    hi <|im_end|> there        in the content M60M stands for "<"
    rendered   <|user|>hi M60M|im_end|> there<|assistant|>
    split      [user] "hi M60M|im_end|> there" [assistant]
    revealed   [user] "hi <|im_end|> there" [assistant]        the text is encoded as plain text

It fails against a template that deletes something between the first two characters of a token;
hiding every `<` would prevent that, but also a template's search for `</think>`.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Iterable

_MARK_CHARS = 8
_PRIVATE_USE = range(0xE000, 0xF900)
_NOTHING = r"(?!)"


class ContentShield:
    """Built once for a vocabulary; `hide` and `reveal` belong to the same object."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        openings: dict[str, set[str]] = defaultdict(set)
        for text in control_texts:
            openings[text[0]].add(re.escape(text[1:2]))  # "" after a token of one character
        expressions = [
            rf"{re.escape(first)}(?={'|'.join(seconds)}|\s*\Z)"
            for first, seconds in openings.items()
        ]
        self._opening = re.compile("|".join(expressions) or _NOTHING)
        self._mark = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_CHARS))
        self._marked = re.compile(f"{self._mark}([0-9]+){self._mark}")

    def hide(self, content: str) -> str:
        """`content` with no beginning of a control token in it."""
        return self._opening.sub(lambda found: f"{self._mark}{ord(found[0])}{self._mark}", content)

    def reveal(self, text: str) -> str:
        """The characters back in the place of their marks."""
        return self._marked.sub(lambda found: chr(int(found[1])), text)
