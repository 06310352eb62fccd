import random
import time

import numpy as np
import pytest

from infer.text.tokenizer import Tokenizer
from infer.text.vocabulary import TokenType, Vocabulary
from shared.errors import MalformedModel, UnsupportedModel

NORMAL, CONTROL, BYTE = TokenType.NORMAL, TokenType.CONTROL, TokenType.BYTE


def test_a_large_vocabulary_is_ready_at_once(small_metadata):
    generator = random.Random(2)
    merges = list({f"{generator.random()} {generator.random()}" for _ in range(300_000)})
    metadata = small_metadata(merges=["a b"])
    metadata["tokenizer.ggml.tokens"] += [merge[:12] for merge in merges[:150_000]]
    metadata["tokenizer.ggml.token_type"] = np.ones(256 + 1 + 150_000, np.int32)
    metadata["tokenizer.ggml.merges"] += merges
    start = time.process_time()
    Tokenizer.from_metadata(metadata)
    assert time.process_time() - start < 1.0  # 0.1 s measured


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
def test_end_of_turn_tokens_are_known_by_their_text(small_tokenizer, text):
    tokenizer = small_tokenizer(extra=[("<|other|>", CONTROL), (text, NORMAL)])
    assert tokenizer.stop_ids == {259}
    assert tokenizer.token_bytes(259) == b""
    assert 259 not in tokenizer.encode(text)
    assert tokenizer.encode(text, special=True) == [259]


def test_end_of_turn_tokens_of_the_metadata(small_tokenizer):
    extra = [(f"<{letter}>", CONTROL) for letter in "pqrs"]
    keys = {"bos_token_id": 258, "eos_token_id": 259, "eot_token_id": 260, "eom_token_id": 261}
    tokenizer = small_tokenizer(extra=extra, **keys, add_bos_token=True)
    assert tokenizer.stop_ids == {259, 260, 261}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (258, 259, True)


def test_ordinary_text_ends_a_turn_only_as_a_control_token(small_tokenizer):
    assert small_tokenizer(extra=[("</s>", NORMAL)]).stop_ids == set()
    assert small_tokenizer(extra=[("</s>", CONTROL)]).stop_ids == {258}


def test_of_two_tokens_with_one_text_the_lower_id_is_used(small_tokenizer):
    assert small_tokenizer(extra=[("ab", NORMAL)]).encode("ab") == [256]


def test_types_may_be_missing(small_metadata):
    metadata = small_metadata()
    del metadata["tokenizer.ggml.token_type"]
    assert Tokenizer.from_metadata(metadata).encode("abc") == [257]


@pytest.mark.parametrize("text", ["<｜hy_User:opensource｜>", "</think:opensource>", "<|user_1|>"])
def test_where_types_are_missing_a_frame_tells_the_role_tokens(small_metadata, text):
    metadata = small_metadata(extra=[(text, NORMAL), ("<b>", NORMAL)])
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer.from_metadata(metadata)
    assert 258 not in tokenizer.encode(text)
    assert tokenizer.encode(text, special=True) == [258]
    assert tokenizer.decode([258, 259]) == "<b>"


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
def test_refusals_name_the_cause(small_metadata, change, error, named):
    metadata = small_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(error, match=named):
        Vocabulary.from_metadata({k: v for k, v in metadata.items() if v is not None})


@pytest.mark.parametrize("kind", [CONTROL, TokenType.USER_DEFINED])
def test_the_text_of_tool_calls_is_shown_whatever_its_type(small_tokenizer, kind):
    marks = (
        "<tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</tool_call>",
    )
    tokenizer = small_tokenizer(extra=[(text, kind) for text in marks])
    call = "<tool_call>f<arg_key>ab</arg_key><arg_value>1</arg_value></tool_call>"
    ids = tokenizer.encode(call)
    assert [tokenizer.token_id(text) for text in marks] == [i for i in ids if i >= 258]
    assert tokenizer.decode(ids) == call
