import json
import random
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.text.tokenizer import MAX_TEXT_CHARS, Tokenizer
from infer.text.vocabulary import TokenType
from shared.errors import RequestError
from shared.gguf_index import GgufIndex


@pytest.fixture(scope="module")
def demo(demo_model):
    return Tokenizer.from_metadata(GgufIndex.open(demo_model).metadata)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_equals_the_independent_engine(shared_dir, name):
    path = shared_dir / "models" / f"{name}-hy3-iq2mix.gguf"
    tokenizer = Tokenizer.from_metadata(GgufIndex.open(path).metadata)
    expected = json.loads(path.with_suffix(".expect.json").read_text())
    for case in expected["tokenize"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
    for case in expected["greedy"]:
        prompt = expected["template_prefix"] % case["prompt"]
        assert tokenizer.encode(prompt, special=True) == case["prompt_ids"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    book = expected["perplexity"]
    assert len(tokenizer.encode(book["text"])) + 1 == book["n_tokens"]  # BOS is the one


def test_demo_vocabulary(demo):
    assert (demo.vocab_size, demo.bos_id, demo.eos_id, demo.add_bos) == (8192, 0, 1, False)
    assert demo.stop_ids == {1}
    assert demo.token_id("<｜hy_User:opensource｜>") == 3
    assert demo.token_id("no such token") is None
    assert demo.token_text(4) == "<｜hy_Assistant:opensource｜>"


@given(text=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(demo_model, text):
    tokenizer = _cached(demo_model)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, special=True), special=True) == text


@cache
def _cached(path):
    return Tokenizer.from_metadata(GgufIndex.open(path).metadata)


def test_long_pieces_take_no_quadratic_time(demo):
    letters = "".join(random.Random(1).choices("etaoinshrdlu", k=100_000))

    def seconds(text):
        start = time.process_time()
        ids = demo.encode(text)
        taken = time.process_time() - start
        assert demo.decode(ids) == text
        return taken

    assert seconds(letters) < 30 * max(seconds(letters[:10_000]), 0.005)  # quadratic: 100 times


EXTRA = [
    ("<|x|>", TokenType.CONTROL),
    ("<|x|>y", TokenType.CONTROL),
    ("<unk>", TokenType.UNKNOWN),
    ("<tool>", TokenType.USER_DEFINED),
    ("é", TokenType.USER_DEFINED),
    ("[PAD]", TokenType.UNUSED),
]


def test_control_tokens_only_where_asked(small_tokenizer):
    tokenizer = small_tokenizer(extra=EXTRA)
    x, xy, unk, tool, accent, pad = range(258, 264)
    assert tokenizer.encode("a<|x|>yz<unk>", special=True) == [ord("a"), xy, ord("z"), unk]
    assert tokenizer.encode("<|x|><|x|>", special=True) == [x, x]
    assert tokenizer.decode(tokenizer.encode("<|x|>")) == "<|x|>"
    assert not {x, xy, unk} & set(tokenizer.encode("<|x|>y<unk>"))
    for special in (False, True):
        assert tokenizer.encode("<tool>é[PAD]", special)[:2] == [tool, accent]
        assert pad not in tokenizer.encode("[PAD]", special)
    assert list(tokenizer.split_special("a<|x|><tool>b")) == ["a", x, tool, "b"]


def test_token_bytes_by_type(small_tokenizer):
    tokenizer = small_tokenizer(extra=EXTRA)
    x, accent, pad = 258, 262, 263
    assert tokenizer.token_bytes(256) == b"ab"
    assert tokenizer.token_bytes(accent) == "é".encode()  # not the byte 0xE9 of the alphabet
    assert tokenizer.token_bytes(x) == tokenizer.token_bytes(pad) == b""
    assert tokenizer.token_bytes(x, special=True) == b"<|x|>"
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_no_merge_arrives_at_a_control_token(small_metadata):
    metadata = small_metadata(merges=["< s", "<s >"], extra=[])
    metadata["tokenizer.ggml.token_type"][-1] = TokenType.CONTROL
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_text(257) == "<s>"
    assert 257 not in tokenizer.encode("<s>")
    for pre in ("llama-bpe", "glm4"):
        letters = small_metadata(merges=["a b"], pre=pre)
        letters["tokenizer.ggml.token_type"][-1] = TokenType.CONTROL
        assert 256 not in Tokenizer.from_metadata(letters).encode("ab")


def test_invalid_bytes_decode_to_replacement_characters(small_tokenizer):
    tokenizer = small_tokenizer()
    assert tokenizer.decode([0xE4, 0xB8, 0x61]) == "\ufffda"


def test_bad_requests(demo):
    with pytest.raises(RequestError, match="character 2"):
        demo.encode("ab\udc80")
    with pytest.raises(RequestError, match="characters"):
        demo.encode("a" * (MAX_TEXT_CHARS + 1))
    for token in (-1, 8192):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            demo.token_bytes(token)


def test_empty_text(demo):
    assert demo.encode("") == demo.encode("", special=True) == []
    assert demo.decode([]) == ""
