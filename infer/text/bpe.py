"""Byte-level byte-pair encoding of one piece of text.

Vocabularies of this kind spell bytes as printable characters: byte 0x20 is `Ġ`, 0x0A is `Ċ`,
`!` is itself (the table of GPT-2's encoder). Merges and tokens are written in that alphabet.
"""

import codecs
import heapq
from collections.abc import Mapping
from functools import lru_cache

from shared.errors import MalformedModel

CACHED_PIECES = 1 << 16
CACHED_PIECE_CHARS = 64  # longer pieces hardly recur and would let the cache grow without bound


def _byte_alphabet() -> str:
    """Character of each byte 0..255: printable Latin-1 stands for itself, the rest moves up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(moved)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = codecs.charmap_build(BYTE_ALPHABET)


def spell(data: bytes) -> str:
    """`data` in the byte alphabet, one character a byte."""
    return codecs.charmap_decode(data, "strict", BYTE_ALPHABET)[0]


def unspell(token: str) -> bytes:
    """The bytes a token's text stands for; text outside the alphabet is taken literally."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_OF)[0]
    except UnicodeEncodeError:
        return token.encode("utf-8", "surrogateescape")


class BytePairEncoder:
    """Merges the characters of a piece by rank, lowest first, leftmost first among equals.

    merges: `"left right"` in order of rank, as GGUF stores them. The strings themselves are the
    dictionary's keys: no symbol contains a space, so nothing has to be split at start-up.
    ids: text of a token (in the byte alphabet) -> its id.
    """

    def __init__(self, merges: list[str], ids: Mapping[str, int], ignore_merges: bool) -> None:
        # Backwards, so that of a pair listed twice the lower rank stays.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._ids = ids
        self._ignore_merges = ignore_merges
        self._encode_cached = lru_cache(CACHED_PIECES)(self._encode)

    def encode(self, piece: str) -> tuple[int, ...]:
        """Token ids of a piece of text. O(n log n) in its length.

        Raises MalformedModel if the vocabulary lacks a byte that is needed.
        """
        if len(piece) > CACHED_PIECE_CHARS:
            return self._encode(piece)
        return self._encode_cached(piece)

    def _encode(self, piece: str) -> tuple[int, ...]:
        spelled = spell(piece.encode())
        if self._ignore_merges and (whole := self._ids.get(spelled)) is not None:
            return (whole,)
        ids: list[int] = []
        for symbol in self._merge(spelled):
            token = self._ids.get(symbol)
            if token is not None:
                ids.append(token)
            else:  # a merge whose result is no token
                ids += (self._byte_id(character) for character in symbol)
        return tuple(ids)

    def _byte_id(self, character: str) -> int:
        token = self._ids.get(character)
        if token is None:
            raise MalformedModel(
                f"the vocabulary has no token for byte 0x{unspell(character).hex()}",
                "the file's tokenizer is incomplete; convert the model again",
            )
        return token

    def _merge(self, spelled: str) -> list[str]:
        """Symbols left when no merge applies any more.

        symbols: a b c d     a heap of (rank, position, length of the result) over a linked list;
        after:    .ip          merging b+c at 1 leaves  a bc '' d, and 1's neighbours are 0 and 3.

        An entry is stale once either side has grown or gone. Symbols only grow, so comparing the
        lengths is enough: the pair at a living position is the one meant if and only if its
        length is still what it was.
        """
        symbols = list(spelled)
        count = len(symbols)
        following = [*range(1, count + 1)]
        previous = [*range(-1, count - 1)]
        ranks = self._ranks
        heap: list[tuple[int, int, int]] = []
        for position in range(count - 1):
            rank = ranks.get(f"{symbols[position]} {symbols[position + 1]}")
            if rank is not None:
                heap.append((rank, position, 2))
        heapq.heapify(heap)

        while heap:
            _, left, length = heapq.heappop(heap)
            right = following[left]
            if not symbols[left] or right == count:
                continue
            merged = symbols[left] + symbols[right]
            if len(merged) != length:
                continue
            symbols[left], symbols[right] = merged, ""
            after = following[left] = following[right]
            before = previous[left]
            if after < count:
                previous[after] = left
                rank = ranks.get(f"{merged} {symbols[after]}")
                if rank is not None:
                    heapq.heappush(heap, (rank, left, length + len(symbols[after])))
            if before >= 0:
                rank = ranks.get(f"{symbols[before]} {merged}")
                if rank is not None:
                    heapq.heappush(heap, (rank, before, length + len(symbols[before])))
        return [symbol for symbol in symbols if symbol]
