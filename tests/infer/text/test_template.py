import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.text.template import MAX_TEMPLATE_CHARS, ChatTemplate
from infer.text.tokenizer import Tokenizer
from infer.text.vocabulary import TokenType
from shared.errors import MalformedModel, RequestError, UnsupportedModel
from shared.gguf_index import GgufIndex

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|im_end|>"
CONTROLS = ["[gMASK]", "<sop>", "<|system|>", USER, ASSISTANT, END]
TURNS = """\
{% for m in messages %}
{{- '<|' + m.role + '|>' + m.content | trim + '<|im_end|>' }}
{%- endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer):
    extra = [(text, TokenType.CONTROL) for text in CONTROLS]
    extra += [(text, TokenType.USER_DEFINED) for text in ("<think>", "</think>")]
    return small_tokenizer(merges=["a b"], extra=extra, bos_token_id=257, eos_token_id=262)


@pytest.fixture(scope="module")
def demo(demo_model):
    return GgufIndex.open(demo_model).metadata


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_prompts_equal_the_independent_engine(shared_dir, name):
    path = shared_dir / "models" / f"{name}-hy3-iq2mix.gguf"
    metadata = GgufIndex.open(path).metadata
    template = ChatTemplate.from_metadata(metadata, Tokenizer.from_metadata(metadata))
    assert template.reasoning_choices == ()
    for case in json.loads(path.with_suffix(".expect.json").read_text())["greedy"]:
        assert template.render_to_ids([user(case["prompt"])]) == case["prompt_ids"]


def test_later_turns_begin_with_the_earlier_ones(demo):
    template = ChatTemplate.from_metadata(demo, Tokenizer.from_metadata(demo))
    first = template.render_to_ids([{"role": "system", "content": "Be brief."}, user("Hi")])
    more = [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Ho."), user("So?")]
    second = template.render_to_ids(more)
    assert second[: len(first)] == first
    assert template.render(more[:3], add_generation_prompt=False).endswith("｜>")


contents = st.lists(
    st.sampled_from(
        [END, USER, ASSISTANT, "<sop>", "<", "|", "<|", "im_", "end|>", "ab", " ", "é"]
    ),
    max_size=8,
).map("".join)


@given(messages=st.lists(contents, min_size=1, max_size=4))
@settings(deadline=None)
def test_contents_never_become_control_tokens(tokenizer, messages):
    template = ChatTemplate(tokenizer, TURNS)
    ids = template.render_to_ids([user(text) for text in messages])
    turn = [tokenizer.token_id(USER), tokenizer.token_id(END)]
    assert [i for i in ids if i >= 257] == turn * len(messages)
    assert tokenizer.decode(ids, special=True) == template.render([user(t) for t in messages])


@given(messages=st.lists(st.text(st.sampled_from("ab <|\n[é中"), max_size=12), max_size=4))
@settings(deadline=None)
def test_without_control_tokens_it_is_the_whole_prompt_encoded(tokenizer, messages):
    template = ChatTemplate(tokenizer, TURNS)
    conversation = [user(text) for text in messages]
    prompt = template.render(conversation)
    assert template.render_to_ids(conversation) == tokenizer.encode(prompt, special=True)


def test_merges_cross_from_the_template_into_the_content(tokenizer):
    template = ChatTemplate(tokenizer, "<|user|>a{{ messages[0].content }}")
    assert template.render_to_ids([user("b")])[1:] == [256]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}{{ messages[1].content }}",
        "{{ messages[0].content }}end|>",
        "{{ messages | map(attribute='content') | join }}",
    ],
)
@pytest.mark.parametrize("cut", range(1, len(END)))
def test_a_control_token_split_over_contents_stays_text(tokenizer, source, cut):
    ids = ChatTemplate(tokenizer, source).render_to_ids([user("x" + END[:cut]), user(END[cut:])])
    assert tokenizer.token_id(END) not in ids
    assert tokenizer.decode(ids).startswith("x" + END[:cut])


@pytest.mark.parametrize("cut", range(1, len(END)))
def test_trimming_completes_no_control_token(tokenizer, cut):
    template = ChatTemplate(tokenizer, "{{ messages[0].content | trim }}{{ messages[1].content }}")
    ids = template.render_to_ids([user(f" {END[:cut]} \n"), user(END[cut:])])
    assert tokenizer.decode(ids) == END
    assert tokenizer.token_id(END) not in ids


def test_templates_may_cut_and_compare_contents(tokenizer):
    source = (
        "{{ messages[0].content.split('</think>')[-1].strip() }}"
        "{% if messages[0].content.endswith('/no ') %}!{% endif %}"
    )
    ids = ChatTemplate(tokenizer, source).render_to_ids([user(f"x</think> {END} a /no ")])
    assert tokenizer.decode(ids) == f"{END} a /no!"


def test_user_defined_tokens_in_contents_are_recognised(tokenizer):
    ids = ChatTemplate(tokenizer, TURNS).render_to_ids([user("<think>")])
    assert tokenizer.token_id("<think>") in ids


def test_bos_is_added_only_where_asked_and_missing(small_tokenizer):
    def prompt(add, source):
        extra = [("<s>", TokenType.CONTROL)]
        tokenizer = small_tokenizer(extra=extra, bos_token_id=258, add_bos_token=add)
        return ChatTemplate(tokenizer, source).render_to_ids([user("a")])

    assert prompt(True, "{{ messages[0].content }}") == [258, 97]
    assert prompt(True, "{{ bos_token + messages[0].content }}") == [258, 97]
    assert prompt(False, "{{ messages[0].content }}") == [97]


def render(tokenizer, source, messages=(), **arguments):
    now = lambda: datetime(2025, 3, 9)  # noqa: E731
    return ChatTemplate(tokenizer, source, now).render(messages, **arguments)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "[gMASK]<|im_end|>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}b", "a1b"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}", None),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "09 Mar 2025"),
        ("{{ tools is none }}{{ documents is none }}{{ nothing }}", "TrueTrue"),
    ],
)
def test_what_templates_may_use(tokenizer, source, text):
    expected = r'{"a": 1, "b": "\u00e9"}' if text is None else text
    assert render(tokenizer, source) == expected


def test_reasoning_content_reaches_the_template(tokenizer):
    message = assistant("b") | {"reasoning_content": f"a {END}"}
    template = ChatTemplate(tokenizer, "{{ messages[0].reasoning_content + messages[0].content }}")
    assert tokenizer.decode(template.render_to_ids([message])) == f"a {END}b"


LEVELS = (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}{% endif %}"
)
LEVEL_WITH_DEFAULT = (
    "{% set e = reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' %}"
)


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("x", {}),
        (
            LEVELS + "{{ reasoning_effort }}",
            {None: "no_think", "no_think": "no_think", "low": "low", "high": "high"},
        ),
        (LEVEL_WITH_DEFAULT + "{{ e }}", {None: "max", "low": "low", "high": "high"}),
        (
            "{{ reasoning_mode | default('no_think') }}",
            {None: "no_think", "no_think": "no_think", "low": "low", "high": "high"},
        ),
        (
            "{% macro f() %}{{ enable_thinking | default('unset') }}{% endmacro %}{{ f() }}",
            {None: "unset", "no_think": "False", "high": "True"},
        ),
        (
            "{{ reasoning_effort | default('unset') }} {{ enable_thinking }}",
            {None: "unset ", "no_think": "unset False", "low": "low True", "high": "high True"},
        ),
    ],
)
def test_reasoning_uses_what_the_template_knows(tokenizer, source, rendered):
    template = ChatTemplate(tokenizer, source)
    assert template.reasoning_choices == tuple(key for key in rendered if key)
    for reasoning, text in rendered.items():
        assert template.render([], reasoning) == text
    for reasoning in {"no_think", "low", "high", "medium"} - set(rendered):
        with pytest.raises(RequestError, match=f"does not know reasoning effort '{reasoning}'"):
            template.render([], reasoning)


def test_the_template_of_the_file_comes_first(tokenizer):
    metadata = {"tokenizer.chat_template": "mine"}
    assert ChatTemplate.from_metadata(metadata, tokenizer).render([]) == "mine"
    with pytest.raises(MalformedModel, match="not a string"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": ["a"]}, tokenizer)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{% for x in %}", "not valid Jinja"),
        ("{% unknown %}", "not valid Jinja"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "not valid Jinja"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "more than"),
    ],
)
def test_templates_that_cannot_be_parsed(tokenizer, source, cause):
    with pytest.raises(UnsupportedModel, match=cause):
        ChatTemplate(tokenizer, source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ range(10000000) }}",
        "{% include 'file' %}",
    ],
)
def test_templates_that_fail_or_reach_out(tokenizer, source):
    with pytest.raises(UnsupportedModel, match="chat template failed"):
        render(tokenizer, source)


def test_a_template_may_refuse_the_messages(tokenizer):
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render(tokenizer, "{{ raise_exception('roles must alternate') }}")


def test_endless_output_is_cut_off(tokenizer):
    source = (
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 99 }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(RequestError, match="longer than"):
        render(tokenizer, source)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"content": "x"},
        {"role": "root", "content": "x"},
        {"role": "user", "content": None},
        {"role": "user", "content": "x", "extra": 1},
    ],
)
def test_bad_messages_are_refused(tokenizer, message):
    template = ChatTemplate(tokenizer, TURNS)
    for method in (template.render, template.render_to_ids):
        with pytest.raises(RequestError, match="a message has"):
            method([message])
