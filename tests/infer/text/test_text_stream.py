import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.text.text_stream import MAX_STOP_CHARS, MAX_STOP_STRINGS, TextStream
from infer.text.vocabulary import TokenType
from shared.errors import RequestError

LETTERS = "ab<|é"


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer):
    """Token i is byte i; tokens of several characters are ab, abab, <|, <|a and ab<|a."""
    merges = ["a b", "ab ab", "< |", "<| a", "ab <|a"]
    return small_tokenizer(merges=merges, extra=[("<end>", TokenType.CONTROL)])


def stream_text(tokenizer, ids, stops=()):
    stream = TextStream(tokenizer, stops)
    return "".join(map(stream.feed, ids)) + stream.flush(), stream.stopped_by


def test_a_character_split_over_tokens_comes_whole(tokenizer):
    stream = TextStream(tokenizer)
    shown = [stream.feed(byte) for byte in "a中🙂b".encode()]
    assert shown == ["a", "", "", "中", "", "", "", "🙂", "b"]
    assert stream.flush() == ""


def test_bytes_that_become_no_character_are_replaced(tokenizer):
    stream = TextStream(tokenizer)
    assert [stream.feed(0xE4), stream.feed(ord("a"))] == ["", "\ufffda"]
    assert stream.feed(0xFF) == "\ufffd"
    assert stream.feed(0xF0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@given(data=st.binary(max_size=40))
def test_equals_decoding_at_once(tokenizer, data):
    assert stream_text(tokenizer, data) == (data.decode("utf-8", "replace"), None)


def test_control_tokens_are_not_shown(tokenizer):
    assert stream_text(tokenizer, [ord("x"), tokenizer.token_id("<end>"), ord("y")]) == ("xy", None)


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    stream = TextStream(tokenizer, ["\nUser:"])
    shown = [stream.feed(byte) for byte in b"hi\nUse\nUser: more"]
    assert shown[:2] == ["h", "i"]
    assert shown[2:6] == ["", "", "", ""]
    assert shown[6] == "\nUse"  # no stop string after all, but its line end may begin one
    assert "".join(shown) == "hi\nUse"
    assert stream.stopped_by == "\nUser:"
    assert stream.flush() == ""


def test_held_text_is_given_out_at_the_end(tokenizer):
    assert stream_text(tokenizer, b"ab<", ["<|end|>"]) == ("ab<", None)


def test_a_stop_string_within_one_token(tokenizer):
    assert stream_text(tokenizer, [ord("x"), tokenizer.token_id("ab")], ["b"]) == ("xa", "b")


def test_within_one_token_the_first_to_be_complete_wins(tokenizer):
    token = tokenizer.token_id("ab<|a")
    assert stream_text(tokenizer, [token], ["ab<|", "b"]) == ("a", "b")
    assert stream_text(tokenizer, [token], ["b<", "ab<"]) == ("", "ab<")


def first_to_be_complete(text, stops):
    """The definition, one character after the other."""
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(LETTERS, max_size=30),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
)
def test_stops_as_defined_however_tokens_divide_the_text(tokenizer, text, stops):
    expected = first_to_be_complete(text, stops)
    assert stream_text(tokenizer, text.encode(), stops) == expected
    assert stream_text(tokenizer, tokenizer.encode(text), stops) == expected


@given(
    text=st.text(LETTERS, max_size=30),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
)
def test_no_more_is_held_than_could_become_a_stop_string(tokenizer, text, stops):
    stream = TextStream(tokenizer, stops)
    shown = "".join(map(stream.feed, text.encode()))
    held = text[len(shown) :]
    if stream.stopped_by is None and held:
        assert any(stop.startswith(held) for stop in stops)
    assert codecs.decode(shown.encode(), "utf-8") == text[: len(shown)]


@pytest.mark.parametrize(
    "stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOP_STRINGS + 1)]
)
def test_bad_stop_strings_are_refused(tokenizer, stops):
    with pytest.raises(RequestError, match="stop string"):
        TextStream(tokenizer, stops)
