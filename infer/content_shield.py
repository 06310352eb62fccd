"""Keeps message contents from becoming control tokens on their way through a chat template.

A template mixes its own control tokens with what people wrote, and may cut, trim and compare the
latter. So contents go in nearly as they are: only where one contains a control token's text, or
ends with the beginning of one that following text could complete, its first character is replaced
by a mark that is unguessable, and no white space to a template's trimming. After the rendered
text was split at its control tokens the marks are turned back into the characters.

    content    hi <|im_end|> there        hi M60M|im_end|> there      M60M stands for "<"
    rendered   <|user|>hi M60M|im_end|> there<|assistant|>
    split      [user] "hi M60M|im_end|> there" [assistant]
    revealed   [user] "hi <|im_end|> there" [assistant]     the text is encoded as plain text
"""

import re
import secrets
from collections.abc import Iterable, Iterator

_MARK_CHARS = 8
_PRIVATE_USE = range(0xE000, 0xF900)


class ContentShield:
    """Built once for a vocabulary; `hide` and `reveal` belong to the same object."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._controls = tuple(control_texts)
        self._longest = max(map(len, self._controls), default=0)
        self._beginnings = {text[:n] for text in self._controls for n in range(1, len(text))}
        self._mark = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_CHARS))
        self._marked = re.compile(f"{self._mark}([0-9]+){self._mark}")

    def hide(self, content: str) -> str:
        """`content` with no control token in it, and none that text behind it could complete."""
        end = 0
        parts = []
        for place in sorted(set(self._places(content))):
            parts += (content[end:place], f"{self._mark}{ord(content[place])}{self._mark}")
            end = place + 1
        return "".join((*parts, content[end:]))

    def reveal(self, text: str) -> str:
        """The characters back in the place of their marks."""
        return self._marked.sub(lambda match: chr(int(match[1])), text)

    def _places(self, content: str) -> Iterator[int]:
        """Where control tokens begin in `content`, and where unfinished ones begin at its end."""
        for control in self._controls:
            start = content.find(control)
            while start >= 0:
                yield start
                start = content.find(control, start + 1)
        for place in range(max(0, len(content) - self._longest), len(content)):
            if content[place:] in self._beginnings:
                yield place
