"""Prompts for files without a template, written out by hand."""

import pytest

from infer.text.template import ChatTemplate
from infer.text.vocabulary import TokenType
from shared.errors import UnsupportedModel

CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": " A\n"},
    {"role": "user", "content": "V"},
]


@pytest.fixture
def control_tokenizer(small_tokenizer):
    """Builds a tokenizer with these control tokens from 258 on, the first of them BOS."""
    return lambda texts, **keys: small_tokenizer(
        extra=[(text, TokenType.CONTROL) for text in texts], bos_token_id=258, **keys
    )


@pytest.mark.parametrize("suffix", [":opensource", ""])
def test_hy3(control_tokenizer, suffix):
    bos, eos = f"<｜hy_begin_of_sentence{suffix}｜>", f"<｜hy_eos{suffix}｜>"
    you, me = f"<｜hy_User{suffix}｜>", f"<｜hy_Assistant{suffix}｜>"
    mode, think, done = f"<｜reasoning_mode{suffix}｜>", f"<think{suffix}>", f"</think{suffix}>"
    tokenizer = control_tokenizer([bos, eos, you, me, mode, think, done], eos_token_id=259)
    template = ChatTemplate.from_metadata({}, tokenizer)
    head = f"{bos}S{mode}reasoning_effort:"
    talk = f"{you}U{me}{think}{done} A\n{eos}{you}V"
    assert template.render(CONVERSATION) == f"{head}no_think{talk}{me}{think}{done}"
    assert template.render(CONVERSATION, "low") == f"{head}low{talk}{me}{think}"
    assert template.render(CONVERSATION, "high", False) == f"{head}high{talk}"
    ids = template.render_to_ids(CONVERSATION)
    assert ids == tokenizer.encode(template.render(CONVERSATION), special=True)
    assert ids[0] == tokenizer.bos_id


def test_glm(control_tokenizer):
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = control_tokenizer(["[gMASK]", "<sop>", *roles, "<think>", "</think>"])
    template = ChatTemplate.from_metadata({}, tokenizer)
    talk = "[gMASK]<sop><|system|>S<|user|>U<|assistant|></think>A<|user|>V"
    assert template.render(CONVERSATION) == f"{talk}<|assistant|><think>"
    assert template.render(CONVERSATION, "no_think") == f"{talk}<|assistant|></think>"
    assert template.render(CONVERSATION, add_generation_prompt=False) == talk


def test_an_unknown_vocabulary_is_refused(control_tokenizer):
    with pytest.raises(UnsupportedModel, match="no chat template") as caught:
        ChatTemplate.from_metadata({}, control_tokenizer(["[gMASK]", "<sop>"]))
    assert "plain completion" in caught.value.remedy
