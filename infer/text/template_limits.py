"""Jinja's sandbox with limits on time and memory: chat templates come from strangers.

The sandbox keeps a template from reaching out; a loop in a loop, or a string doubled forty times,
it would let run. So every loop, call, filter and operator that may make something large spends of
one allowance, which `limited` grants.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, sandbox
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join

MAX_RENDER_S = 5.0
# Characters and items, in everything that a template makes along the way; a prompt is far shorter.
MAX_MADE = 1 << 26
# Widths, counts and indents that are given as arguments, or in a format.
MAX_NUMBER = 1 << 20
MAX_INT_BITS = 4096
_LARGE_WIDTH = re.compile(r"\d{7,}|%[^a-zA-Z%]*\*")
_WATCHED = "watched_by_limits"

Calls = Callable[..., Any]


class Allowance:
    """Of one rendering."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + MAX_RENDER_S
        self._left = MAX_MADE

    def spend(self, made: int) -> None:
        """SecurityError when time is up, or with what is made now too much has been."""
        self._left -= made
        if self._left < 0:
            raise sandbox.SecurityError("it makes too much text")
        if time.monotonic() > self._end_s:
            raise sandbox.SecurityError(f"it takes longer than {MAX_RENDER_S:g} s")


_allowance: ContextVar[Allowance] = ContextVar("allowance")


@contextmanager
def limited() -> Iterator[None]:
    """Templates are compiled and rendered in here only."""
    token = _allowance.set(Allowance())
    try:
        yield
    finally:
        _allowance.reset(token)


def spend(made: int) -> None:
    _allowance.get().spend(made)


class _Code(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b`, which Jinja joins without asking its environment."""
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Code

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _limited(name, call) for name, call in self.filters.items()}
        self.filters[_WATCHED] = _watched

    def add_filter(self, name: str, call: Calls) -> None:
        self.filters[name] = _limited(name, call)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Each loop looks at the clock."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _WATCHED, [], [], None, None, lineno=loop.lineno)
        return template.set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spend(_size_of_result(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, call: Calls, *args: Any, **named: Any) -> Any:  # type: ignore[override]
        _check_arguments(args, named)
        owner = getattr(call, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(call.__name__, owner, args)
        return _measured(super().call(context, call, *args, **named))

    def wrap_str_format(self, value: Any) -> Calls | None:
        """`str.format`, of which the sandbox makes a function of its own."""
        wrapped: Calls | None = super().wrap_str_format(value)
        if wrapped is not None and _LARGE_WIDTH.search(value.__self__):
            raise sandbox.SecurityError("it pads to a large width")
        return wrapped

    def join_texts(self, parts: Iterable[Any]) -> str:
        text = str_join(parts)
        spend(len(text))
        return text


def _watched(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        spend(1)
        yield item


def _limited(name: str, call: Calls) -> Calls:
    """A filter that looks at its arguments first. Its first of them may be Jinja's own."""

    @wraps(call)
    def limited_call(*args: Any, **named: Any) -> Any:
        _check_arguments(args, named)
        texts = [at for at, value in enumerate(args) if isinstance(value, str)]
        if texts and name in ("replace", "format"):
            _check_text_method(name, args[texts[0]], args[texts[0] + 1 :])
        if name == "join":
            separator = next((args[at] for at in texts if at), named.get("d", ""))
            value = next((v for v in args if isinstance(v, (list, tuple))), ())
            _check_text_method("join", str(separator), (value,))
        return _measured(call(*args, **named))

    return limited_call


def _measured(result: Any) -> Any:
    spend(len(result) if isinstance(result, (str, list, tuple, Mapping)) else 1)
    return result


def _check_arguments(args: Iterable[Any], named: Mapping[str, Any]) -> None:
    for value in (*args, *named.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise sandbox.SecurityError(f"it gives the number {value:.3g} to something")


def _check_text_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Methods (and filters) whose result may be far longer than what they are given."""
    match name, args:
        case "replace", (str(old), str(new), *_):
            spend(text.count(old) * len(new))
        case "join", (list() | tuple() as parts,):
            spend(sum(len(text) + len(part) for part in parts if isinstance(part, str)))
        case "format", _ if _LARGE_WIDTH.search(text):
            raise sandbox.SecurityError("it pads to a large width")
        case "expandtabs", _:
            spend(len(text) * max((a for a in args if isinstance(a, int)), default=8))


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Characters or items; SecurityError for numbers that nobody needs."""
    if operator == "%":
        if isinstance(left, str) and _LARGE_WIDTH.search(left):
            raise sandbox.SecurityError("it pads to a large width")
        return 1
    if operator == "+":
        return _size(left) + _size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
        if bits + right.bit_length() > MAX_INT_BITS:
            raise sandbox.SecurityError("it computes a number of too many digits")
        return 1
    sized, times = (left, right) if isinstance(left, Sized) else (right, left)
    return _size(sized) * times if isinstance(times, int) and times > 0 else 1


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def rendered(template: Template, variables: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a template's text, each of them spent."""
    for part in template.generate(variables):
        spend(len(part))
        yield part
