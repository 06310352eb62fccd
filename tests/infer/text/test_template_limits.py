"""Templates that would take for ever, or all memory: refused in time, and with little of either."""

import time
import tracemalloc

import pytest

import infer.text.template_limits
from infer.text.template import ChatTemplate
from infer.text.template_limits import MAX_RENDER_S, LimitedEnvironment, limited
from shared.errors import UnsupportedModel

MESSAGES = [{"role": "user", "content": "hello"}]
# Of Python's memory at its peak: what one allowance may make is below it.
MOST_BYTES = 512 << 20
DOUBLING = (
    "{% set ns = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set ns.x = DOUBLED %}{% endfor %}{{ ns.x|length }}"
)
ENDLESS = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a filter over and over": (
        "{% for a in range(99999) %}{% set x = range(99999)|sort|list %}{% endfor %}"
    ),
}
LARGE = {
    "a product": "{{ 'x' * 10 ** 11 }}",
    "a product of lists": "{{ ([1] * 10 ** 11)|length }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a power's power": "{% set ns = namespace(x=9) %}{% for i in range(40) %}"
    "{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "a product of numbers": "{% set ns = namespace(x=9) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "joined with itself": DOUBLING.replace("DOUBLED", "ns.x ~ ns.x"),
    "added to itself": DOUBLING.replace("DOUBLED", "ns.x + ns.x"),
    "lists added": DOUBLING.replace("'ab'", "[1]").replace("DOUBLED", "ns.x + ns.x"),
    "replaced by itself": DOUBLING.replace("DOUBLED", "ns.x.replace('b', ns.x)"),
    "the filter replace": DOUBLING.replace("DOUBLED", "ns.x|replace('b', ns.x)"),
    "joined by itself": DOUBLING.replace("DOUBLED", "ns.x.join([ns.x, ns.x, ns.x])"),
    "the filter join": DOUBLING.replace("DOUBLED", "[ns.x, ns.x]|join(ns.x)"),
    "a width": "{{ 'x'.ljust(10 ** 11) }}",
    "the filter center": "{{ 'x'|center(10 ** 11) }}",
    "the filter batch": "{{ [1]|batch(10 ** 11, 'x')|list }}",
    "an indent": "{{ 'x\ny'|indent(10 ** 11) }}",
    "a width in a format": "{{ '%99999999999d' % 1 }}",
    "a width beside a format": "{{ '%*d' % (99999999999, 1) }}",
    "the filter format": "{{ '%99999999999d'|format(1) }}",
    "a width in braces": "{{ '{:>99999999999}'.format(1) }}",
    "kept in a list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + ['ab' * 9999 ~ i] %}{% endfor %}",
}


@pytest.fixture
def refused(small_tokenizer):
    def render(source: str) -> str:
        with pytest.raises(UnsupportedModel) as raised:
            ChatTemplate(small_tokenizer(), source).render(MESSAGES)
        return str(raised.value)

    return render


@pytest.mark.parametrize("name", ENDLESS)
def test_what_takes_for_ever_ends(name, refused, monkeypatch):
    monkeypatch.setattr(infer.text.template_limits, "MAX_RENDER_S", 0.3)
    started_s = time.monotonic()
    message = refused(ENDLESS[name])
    assert "takes longer than 0.3 s" in message or "too much text" in message
    assert time.monotonic() - started_s < MAX_RENDER_S


@pytest.mark.parametrize("name", LARGE)
def test_what_would_be_large_is_not_made(name, refused):
    tracemalloc.start()
    started_s = time.monotonic()
    try:
        message = refused(LARGE[name])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "chat template failed: it " in message or "is not valid Jinja: it " in message
    assert peak_bytes < MOST_BYTES
    assert time.monotonic() - started_s < 2 * MAX_RENDER_S


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ '-' * 3 + '>' }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ '%03d' % 7 }}", "---> 3 1024 007"),
        ("{{ 'a,b'.replace(',', ', ') }} {{ ['a', 'b']|join('-') }}", "a, b a-b"),
        ("{{ 'x'.ljust(3) }}|{{ 'x'|center(5) }}|{{ '{:>3}'.format(7) }}", "x  |  x  |  7"),
        (
            "{% for x in [3, 4] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
            "1/2False 2/2True ",
        ),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.revindex }}{{ x }} {% endfor %}", "21 13 "),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "a1"),
        ("{% for c in 'ab' %}{{ loop.previtem or '^' }}{{ c }}{% endfor %}", "^aab"),
        ("{{ [1, 2, 3]|map('string')|join('+') }} {{ [2, 1]|sort|first }}", "1+2+3 1"),
    ],
)
def test_what_templates_do_is_as_without_limits(source, text):
    with limited():
        assert LimitedEnvironment().from_string(source).render() == text
