"""Chat templates for files that carry none, known by the role tokens in the vocabulary.

Hy3 after Tencent's published template, GLM after that of GLM-5; both without their tool calls.
"""

from collections.abc import Sequence

from infer.text.tokenizer import Tokenizer
from shared.errors import UnsupportedModel

# `SUFFIX` is what a vocabulary puts behind its names.
_HY3 = """\
{{- bos_token -}}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor -%}
{%- set effort = reasoning_effort | default('no_think') -%}
{{- '<｜reasoning_modeSUFFIX｜>reasoning_effort:' + effort -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<｜hy_UserSUFFIX｜>' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<｜hy_AssistantSUFFIX｜><thinkSUFFIX></thinkSUFFIX>' + m.content + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<｜hy_AssistantSUFFIX｜><thinkSUFFIX>' -}}
  {%- if effort == 'no_think' %}{{ '</thinkSUFFIX>' }}{% endif -%}
{%- endif -%}"""
_HY3_TOKENS = (
    "<｜hy_User{}｜>",
    "<｜hy_Assistant{}｜>",
    "<｜reasoning_mode{}｜>",
    "<think{}>",
    "</think{}>",
)
_HY3_SUFFIXES = (":opensource", "")

_GLM = """\
[gMASK]<sop>
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}{{- '<|assistant|></think>' + m.content.strip() -}}
  {%- else -%}{{- '<|' + m.role + '|>' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' + ('<think>' if enable_thinking | default(true) else '</think>') -}}
{%- endif -%}"""
_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>")


def builtin_template(tokenizer: Tokenizer) -> str:
    """The template of the family whose tokens are all there; raises UnsupportedModel."""

    def has(texts: Sequence[str]) -> bool:
        return all(tokenizer.token_id(text) is not None for text in texts)

    for suffix in _HY3_SUFFIXES:
        if has([text.format(suffix) for text in _HY3_TOKENS]):
            return _HY3.replace("SUFFIX", suffix)
    if has(_GLM_TOKENS):
        return _GLM
    raise UnsupportedModel(
        "the file has no chat template (tokenizer.chat_template) and its vocabulary is that of no "
        "family whose template is known",
        "use plain completion, or a file converted with its template",
    )
