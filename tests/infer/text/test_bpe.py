"""Byte-pair merging, against its definition carried out step by step."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.text.bpe import (
    BYTE_ALPHABET,
    CACHED_PIECE_CHARS,
    CACHED_PIECES,
    BytePairEncoder,
    spell,
    unspell,
)
from shared.errors import MalformedModel


def symbols_of(merges, text, ignore_merges=False, more_tokens=()):
    """What `text` is merged to where every merge's result is a token."""
    results = [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys([*BYTE_ALPHABET, *results, *more_tokens]))
    ids = {token: at for at, token in enumerate(tokens)}
    return [tokens[i] for i in BytePairEncoder(merges, ids, ignore_merges).encode(text)]


@st.composite
def vocabularies(draw):
    """Merges that may use the results of earlier ones, over three letters."""
    symbols = ["a", "b", "c"]
    merges = []
    for _ in range(draw(st.integers(1, 12))):
        left, right = draw(st.sampled_from(symbols)), draw(st.sampled_from(symbols))
        if f"{left} {right}" not in merges and len(left + right) < 20:
            merges.append(f"{left} {right}")
            symbols.append(left + right)
    return merges


def merge_one_at_a_time(merges, text):
    """The definition: merge the leftmost pair of the lowest rank, then look at all pairs anew."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    symbols = list(text)
    while True:
        known = ((ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks)
        best = min(known, default=None)
        if best is None:
            return symbols
        at = best[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@given(merges=vocabularies(), text=st.text("abc", max_size=80))
@settings(max_examples=300, deadline=None)
def test_merging_follows_the_definition(merges, text):
    assert symbols_of(merges, text) == merge_one_at_a_time(merges, text)


def test_of_a_pair_listed_twice_the_first_rank_counts():
    assert symbols_of(["a b", "b c", "a b"], "abc") == ["ab", "c"]


def test_a_piece_in_the_vocabulary_is_one_token_where_merges_are_ignored():
    assert symbols_of([], "bcb", ignore_merges=True, more_tokens=["bcb"]) == ["bcb"]
    assert symbols_of([], "bcb", ignore_merges=False, more_tokens=["bcb"]) == ["b", "c", "b"]


def test_a_merge_that_is_no_token_falls_back_to_bytes():
    ids = {character: byte for byte, character in enumerate(BYTE_ALPHABET)} | {"ab": 256}
    encoder = BytePairEncoder(["a b", "ab c"], ids, False)
    assert encoder.encode("ab") == (256,)
    assert encoder.encode("abc") == tuple(b"abc")


def test_a_vocabulary_without_a_needed_byte_is_refused():
    encoder = BytePairEncoder(["a b"], {"ab": 0}, False)
    assert encoder.encode("ab") == (0,)
    with pytest.raises(MalformedModel, match="0x7a"):
        encoder.encode("z")


def test_the_byte_alphabet():
    assert len(set(BYTE_ALPHABET)) == 256
    assert spell(b" \n!~") == "ĠĊ!~"
    assert [unspell(character) for character in BYTE_ALPHABET] == [bytes([i]) for i in range(256)]
    assert unspell("中") == "中".encode()


def test_the_cache_of_pieces_is_bounded():
    encoder = BytePairEncoder(["a b"], {c: i for i, c in enumerate(BYTE_ALPHABET)}, False)
    for number in range(CACHED_PIECES + 1000):
        encoder.encode(str(number))
    before = encoder._encode_cached.cache_info()
    assert before.currsize == before.maxsize == CACHED_PIECES
    encoder.encode("x" * (CACHED_PIECE_CHARS + 1))
    assert encoder._encode_cached.cache_info() == before
