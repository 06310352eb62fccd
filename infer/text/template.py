"""A conversation to a prompt, by the chat template the model file carries.

Both come from strangers: the template runs in Jinja's sandbox with limits on time and memory, and
the messages cannot become control tokens (see `ContentShield`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, parser

from infer.text.builtin_templates import builtin_template
from infer.text.content_shield import ContentShield
from infer.text.template_limits import LimitedEnvironment, limited, rendered
from infer.text.tokenizer import Tokenizer
from shared.errors import MalformedModel, RequestError, UnsupportedModel

MAX_TEMPLATE_CHARS = 1 << 20
MAX_PROMPT_CHARS = 1 << 24
ROLES = ("system", "user", "assistant")

# How templates name the wish for more or less thinking: a level, or a switch.
_LEVEL_NAMES = ("reasoning_effort", "reasoning_mode")
_SWITCH_NAMES = ("enable_thinking", "thinking")


class ChatTemplate:
    """One template, parsed. Thread-safe: rendering keeps no state.

    reasoning_choices: what `reasoning` may be for this template beside None, of no_think, low and
    high; empty where the template knows no such thing.
    """

    def __init__(
        self, tokenizer: Tokenizer, source: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises UnsupportedModel for a template that Jinja cannot parse or that is too long."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UnsupportedModel(
                f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}",
                "use plain completion",
            )
        self.source = source
        self._tokenizer = tokenizer
        self._shield = ContentShield(tokenizer.control_texts)
        environment = _environment(now)
        try:
            with limited():
                variables = meta.find_undeclared_variables(environment.parse(source))
                self._template = environment.from_string(source)
        except Exception as error:  # deep nesting upsets Jinja and Python's compiler variously
            raise UnsupportedModel(
                f"the chat template is not valid Jinja: {error}", "use plain completion"
            ) from None
        self._levels = [name for name in _LEVEL_NAMES if name in variables]
        self._switches = [name for name in _SWITCH_NAMES if name in variables]
        # A template that does not know no_think by name may take it for its highest level.
        self._knows_no_think = bool(self._levels) and "no_think" in source
        self.reasoning_choices = self._choices()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> "ChatTemplate":
        """The file's own template, else the one known for its vocabulary.

        Raises UnsupportedModel where there is neither, or the file's cannot be used.
        """
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            source = builtin_template(tokenizer)
        if not isinstance(source, str):
            raise MalformedModel(
                "tokenizer.chat_template is not a string", "convert or download the model again"
            )
        return cls(tokenizer, source)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        reasoning: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text, for displays; for a model use `render_to_ids`.

        messages: each with `role`, one of ROLES, and `content`, perhaps `reasoning_content`.
        reasoning: one of `reasoning_choices`; None leaves it to the template.
        add_generation_prompt: end with the beginning of the assistant's next turn.
        Raises RequestError for messages the template refuses, UnsupportedModel if it fails.
        """
        _check_messages(messages)
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._text_of(self._tokenizer.bos_id),
            "eos_token": self._text_of(self._tokenizer.eos_id),
            "tools": None,
            "documents": None,
            **self._knobs(reasoning),
        }
        try:
            with limited():
                return _bounded(rendered(self._template, variables))
        except _Refusal as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", "change or /reset them"
            ) from None
        except RequestError:
            raise
        except Exception as error:  # foreign code: it may raise anything
            raise UnsupportedModel(
                f"the model's chat template failed: {error}", "use plain completion"
            ) from error

    def render_to_ids(
        self,
        messages: Sequence[Mapping[str, str]],
        reasoning: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt as token ids; arguments and errors as `render`.

        Control tokens come from the template's text alone. The text between two of them is
        encoded in one go, template's and message's together, so that without control tokens in
        the messages the result is `tokenizer.encode(render(...), special=True)`. BOS is put in
        front where the file asks for it and the template did not.
        """
        _check_messages(messages)
        hidden = [
            {key: text if key == "role" else self._shield.hide(text) for key, text in m.items()}
            for m in messages
        ]
        prompt = self.render(hidden, reasoning, add_generation_prompt)
        ids: list[int] = []
        for part in self._tokenizer.split_special(prompt):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode(self._shield.reveal(part))
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _choices(self) -> tuple[str, ...]:
        off = ("no_think",) if self._knows_no_think or self._switches else ()
        if self._levels:
            return (*off, "low", "high")
        return (*off, "high") if self._switches else ()

    def _knobs(self, reasoning: str | None) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        if reasoning is None:
            return {}
        if reasoning not in self.reasoning_choices:
            known = ", ".join(self.reasoning_choices) or "no choice of reasoning effort"
            raise RequestError(
                f"this model's chat template does not know reasoning effort {reasoning!r}",
                f"it knows {known}",
            )
        thinks = reasoning != "no_think"
        knobs: dict[str, Any] = dict.fromkeys(self._switches, thinks)
        if thinks or self._knows_no_think:
            knobs |= dict.fromkeys(self._levels, reasoning)
        return knobs

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.token_text(token)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    for message in messages:
        if message.get("role") not in ROLES or "content" not in message:
            raise RequestError(
                "a message has no content or an unknown role", f"roles are {', '.join(ROLES)}"
            )
        if not all(isinstance(value, str) for value in message.values()):
            raise RequestError("a message has a value that is not text", "give strings")


class _Refusal(jinja2.TemplateError):
    """Raised by a template itself, through raise_exception()."""


class _GenerationTag(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here it
    is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way of declaring them

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """What templates may use, as the transformers library offers it."""

    def raise_exception(message: str) -> str:
        raise _Refusal(message)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded(parts: Iterable[str]) -> str:
    prompt = []
    length = 0
    for part in parts:
        length += len(part)
        if length > MAX_PROMPT_CHARS:
            raise RequestError(
                f"the prompt is longer than {MAX_PROMPT_CHARS} characters", "shorten the messages"
            )
        prompt.append(part)
    return "".join(prompt)
