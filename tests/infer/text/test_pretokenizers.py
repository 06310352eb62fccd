"""The cuts of each pre-tokenizer, against examples worked out by the published expressions."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.text.pretokenizers import pre_tokenizer
from shared.errors import UnsupportedModel

NAMES = ["gpt-2", "smollm", "qwen2", "llama-bpe", "glm4", "deepseek-v3", "hunyuan-dense"]

# Each example is cut as the `tokenizers` library cuts it with the model's own expressions.
TEXT = "It's WE'LL 12345 a_b  c\n\n x!?\r\n"
CUTS = {
    "gpt-2": "It|'s| WE|'|LL| 12345| a|_|b| | c|\n\n| x|!?|\r\n",
    "smollm": "It|'s| WE|'|LL| |1|2|3|4|5| a|_|b| | c|\n\n| x|!?|\r\n",
    "qwen2": "It|'s| WE|'LL| |1|2|3|4|5| a|_b| | c|\n\n| x|!?\r\n",
    "llama-bpe": "It|'s| WE|'LL| |123|45| a|_b| | c|\n\n| x|!?\r\n",
    "glm4": "It|'s| WE|'LL| |123|45| a|_b| | c|\n\n| x|!?\r\n",
    "deepseek-v3": "It|'s| WE|'LL| |123|45| a|_b| | c|\n\n| x|!?\r\n",
    "hunyuan-dense": "It|'s| WE|'LL| |123|45| a|_b| | c|\n\n| x|!?\r\n",
}
CJK = "a中文かな・カb ٣½"
CJK_CUTS = {
    "gpt-2": "a中文かな|・|カb| ٣½",
    "smollm": "a中文かな|・|カb| |٣|½",
    "qwen2": "a中文かな|・カb| |٣|½",
    "llama-bpe": "a中文かな|・カb| |٣½",
    "glm4": "a中文かな|・カb| |٣½",
    # The middle dot belongs to the kana range, then the third expression parts it off again.
    "deepseek-v3": "a|中文かな|・|カ|b| |٣½",
    "hunyuan-dense": "a|中文かな|・|カ|b| |٣½",
}


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    cut = pre_tokenizer(name)
    assert cut.split(TEXT) == CUTS[name].split("|")
    assert cut.split(CJK) == CJK_CUTS[name].split("|")


def test_combining_marks_stay_with_their_letter_only_where_the_expression_says_so():
    assert pre_tokenizer("hunyuan-dense").split("e\u0301te\u0301") == ["e\u0301te\u0301"]
    assert pre_tokenizer("qwen2").split("e\u0301te\u0301") == ["e", "\u0301te", "\u0301"]


def test_each_expression_sees_the_end_of_its_piece_as_the_end_of_the_text():
    assert pre_tokenizer("hunyuan-dense").split("a  7") == ["a", "  ", "7"]
    assert pre_tokenizer("qwen2").split("a  7") == ["a", " ", " ", "7"]


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(max_size=60))
def test_pieces_join_to_the_text(name, text):
    pieces = pre_tokenizer(name).split(text)
    assert "".join(pieces) == text
    assert "" not in pieces


def test_aliases_and_ignore_merges():
    assert pre_tokenizer("chatglm-bpe") == pre_tokenizer("glm4")
    assert pre_tokenizer("llama3") == pre_tokenizer("llama-v3") == pre_tokenizer("llama-bpe")
    assert pre_tokenizer("deepseek-r1-qwen") == pre_tokenizer("qwen2")
    assert {name for name in NAMES if pre_tokenizer(name).ignore_merges} == {"llama-bpe", "glm4"}


@pytest.mark.parametrize("name", ["default", "", "GPT-2", 7])
def test_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(UnsupportedModel, match="pre-tokenizer") as caught:
        pre_tokenizer(name)
    assert repr(name) in caught.value.message
    assert "hunyuan-dense" in caught.value.remedy


def test_missing_name_is_refused():
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.pre"):
        pre_tokenizer(None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unit", [" ", "\n", " x", "a", "7", "!", "中", "\u0301"])
def test_time_is_linear_in_the_text(name, unit):
    cut = pre_tokenizer(name)
    start = time.process_time()
    cut.split(unit * 50_000)
    assert time.process_time() - start < 2  # quadratic: minutes
