import json
import random
import time
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.bpe import BYTE_ALPHABET, BytePairEncoder
from infer.tokenizer import MAX_TEXT_CHARS, Tokenizer
from shared.errors import MalformedModel, RequestError, UnsupportedModel
from shared.gguf_index import GgufIndex

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def small_metadata(merges=("a b", "ab c"), extra=(), pre="gpt-2", **keys):
    """256 byte tokens, one token a merge, then `extra`: pairs of text and type."""
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


def small_tokenizer(**arguments):
    return Tokenizer.from_metadata(small_metadata(**arguments))


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
    tokenizer = small_tokenizer(merges=merges)
    assert [tokenizer.token_text(i) for i in tokenizer.encode(text)] == merge_one_at_a_time(
        merges, text
    )


def test_of_a_pair_listed_twice_the_first_rank_counts():
    tokenizer = small_tokenizer(merges=["a b", "b c", "a b"])
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == ["ab", "c"]


def test_a_merge_that_is_no_token_falls_back_to_bytes():
    metadata = small_metadata(merges=["a b"])
    metadata["tokenizer.ggml.merges"] = ["a b", "ab c"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == ["a", "b", "c"]


def test_a_piece_in_the_vocabulary_is_one_token_where_merges_are_ignored():
    extra = [("bcb", NORMAL)]
    assert small_tokenizer(extra=extra, pre="glm4").encode("bcb") == [256 + 2]
    assert len(small_tokenizer(extra=extra, pre="qwen2").encode("bcb")) == 3


def test_long_pieces_take_no_quadratic_time(demo):
    letters = "".join(random.Random(1).choices("etaoinshrdlu", k=100_000))

    def seconds(text):
        start = time.process_time()
        ids = demo.encode(text)
        taken = time.process_time() - start
        assert demo.decode(ids) == text
        return taken

    assert seconds(letters) < 30 * max(seconds(letters[:10_000]), 0.005)  # quadratic: 100 times


def test_the_cache_of_pieces_is_bounded():
    encoder = BytePairEncoder(["a b"], {c: i for i, c in enumerate(BYTE_ALPHABET)}, False)
    for number in range(70_000):
        encoder.encode(str(number))
    encoder.encode("x" * 65)
    info = encoder._encode_cached.cache_info()
    assert info.currsize == info.maxsize == 65_536


def test_a_large_vocabulary_is_ready_at_once():
    generator = random.Random(2)
    merges = list({f"{generator.random()} {generator.random()}" for _ in range(300_000)})
    metadata = small_metadata(merges=["a b"])
    metadata["tokenizer.ggml.tokens"] += [merge[:12] for merge in merges[:150_000]]
    metadata["tokenizer.ggml.token_type"] = np.ones(256 + 1 + 150_000, np.int32)
    metadata["tokenizer.ggml.merges"] += merges
    start = time.process_time()
    Tokenizer.from_metadata(metadata)
    assert time.process_time() - start < 1.0  # 0.1 s measured


EXTRA = [
    ("<|x|>", CONTROL),
    ("<|x|>y", CONTROL),
    ("<unk>", UNKNOWN),
    ("<tool>", USER_DEFINED),
    ("é", USER_DEFINED),
    ("[PAD]", UNUSED),
]


def test_control_tokens_only_where_asked():
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


def test_token_bytes_by_type():
    tokenizer = small_tokenizer(extra=EXTRA)
    x, accent, pad = 258, 262, 263
    assert tokenizer.token_bytes(256) == b"ab"
    assert tokenizer.token_bytes(accent) == "é".encode()  # not the byte 0xE9 of the alphabet
    assert tokenizer.token_bytes(x) == tokenizer.token_bytes(pad) == b""
    assert tokenizer.token_bytes(x, special=True) == b"<|x|>"
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]


def test_no_merge_arrives_at_a_control_token():
    metadata = small_metadata(merges=["< s", "<s >"], extra=[])
    metadata["tokenizer.ggml.token_type"][-1] = CONTROL
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.token_text(257) == "<s>"
    assert 257 not in tokenizer.encode("<s>")
    for pre in ("llama-bpe", "glm4"):
        letters = small_metadata(merges=["a b"], pre=pre)
        letters["tokenizer.ggml.token_type"][-1] = CONTROL
        assert 256 not in Tokenizer.from_metadata(letters).encode("ab")


def test_invalid_bytes_decode_to_replacement_characters():
    tokenizer = small_tokenizer()
    assert tokenizer.decode([0xE4, 0xB8, 0x61]) == "\ufffda"


@pytest.mark.parametrize(
    "text",
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<|endoftext|>",
        "<|user|>",
        "<|observation|>",
        "<｜hy_eos:opensource｜>",
        "<｜hy_EOT｜>",
        "<｜end▁of▁sentence｜>",
    ],
)
def test_end_of_turn_tokens_are_known_by_their_text(text):
    tokenizer = small_tokenizer(extra=[("<|other|>", CONTROL), (text, NORMAL)])
    assert tokenizer.stop_ids == {259}
    assert tokenizer.token_bytes(259) == b""
    assert 259 not in tokenizer.encode(text)
    assert tokenizer.encode(text, special=True) == [259]


def test_end_of_turn_tokens_of_the_metadata():
    extra = [(f"<{letter}>", CONTROL) for letter in "pqrs"]
    keys = {"bos_token_id": 258, "eos_token_id": 259, "eot_token_id": 260, "eom_token_id": 261}
    tokenizer = small_tokenizer(extra=extra, **keys, add_bos_token=True)
    assert tokenizer.stop_ids == {259, 260, 261}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (258, 259, True)


def test_ordinary_text_ends_a_turn_only_as_a_control_token():
    assert small_tokenizer(extra=[("</s>", NORMAL)]).stop_ids == set()
    assert small_tokenizer(extra=[("</s>", CONTROL)]).stop_ids == {258}


def test_of_two_tokens_with_one_text_the_lower_id_is_used():
    assert small_tokenizer(extra=[("ab", NORMAL)]).encode("ab") == [256]


def test_types_may_be_missing():
    metadata = small_metadata()
    del metadata["tokenizer.ggml.token_type"]
    assert Tokenizer.from_metadata(metadata).encode("abc") == [257]


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"model": None}, MalformedModel, "tokenizer.ggml.model"),
        ({"model": "llama"}, UnsupportedModel, "SentencePiece"),
        ({"model": "bert"}, UnsupportedModel, "bert"),
        ({"pre": None}, UnsupportedModel, "tokenizer.ggml.pre"),
        ({"pre": "tekken"}, UnsupportedModel, "tekken"),
        ({"tokens": None}, MalformedModel, "tokenizer.ggml.tokens"),
        ({"tokens": []}, MalformedModel, "tokenizer.ggml.tokens"),
        ({"tokens": ["a", 1]}, MalformedModel, "tokenizer.ggml.tokens"),
        ({"merges": None}, MalformedModel, "tokenizer.ggml.merges"),
        ({"merges": "a b"}, MalformedModel, "tokenizer.ggml.merges"),
        ({"token_type": np.ones(3, np.int32)}, MalformedModel, "258"),
        ({"token_type": np.ones(258)}, MalformedModel, "258"),
        ({"token_type": np.full(258, 9)}, MalformedModel, "token_type"),
        ({"token_type": np.full(258, BYTE)}, UnsupportedModel, "byte tokens"),
        ({"eos_token_id": 258}, MalformedModel, "eos_token_id is 258"),
        ({"bos_token_id": "x"}, MalformedModel, "bos_token_id"),
    ],
)
def test_refusals_name_the_cause(change, error, named):
    metadata = small_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(error, match=named):
        Tokenizer.from_metadata({k: v for k, v in metadata.items() if v is not None})


def test_a_vocabulary_without_a_needed_byte_is_refused():
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"][0x7A] = "<was z>"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("abc") == [257]
    with pytest.raises(MalformedModel, match="0x7a"):
        tokenizer.encode("z")


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
