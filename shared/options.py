"""Options declared once: a frozen dataclass is the command line, the TOML keys and the config.

Each field is made by `option()`. Layers of values (file, command line) are laid over the defaults
by `build()`, which refuses unknown keys and values that do not parse.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from shared.errors import ConfigError

_Config = TypeVar("_Config")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def option(
    default: Any,
    help_text: str,
    *,
    parse: Callable[[str], Any] = str,
    metavar: str | None = None,
    choices: Iterable[str] | None = None,
    alone: str | None = None,
) -> Any:
    """A dataclass field that is an option. `parse` raises ValueError for what it cannot take.

    alone: the value on a command line that names the option and gives it none.
    """
    metadata = {
        "help": help_text,
        "parse": parse,
        "metavar": metavar,
        "choices": tuple(choices) if choices else None,
        "alone": alone,
    }
    return dataclasses.field(default=default, metadata=metadata, kw_only=True)


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    config_class: type,
    elsewhere: type | None = None,
) -> None:
    """Each option of `config_class` as `--its-name`; those not given stay out of the namespace.

    elsewhere: a base class whose options are added in another place.
    """
    left_out = {field.name for field in dataclasses.fields(elsewhere)} if elsewhere else set()
    for field in dataclasses.fields(config_class):
        if field.name in left_out:
            continue
        name = "--" + field.name.replace("_", "-")
        help_text = field.metadata["help"]
        if field.metadata["parse"] is bool:
            parser.add_argument(
                name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
            continue
        alone = field.metadata["alone"]
        parser.add_argument(
            name,
            nargs=None if alone is None else "?",
            const=alone,
            default=argparse.SUPPRESS,
            metavar=field.metadata["metavar"] or field.name.upper(),
            help=help_text,
        )


def given(arguments: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """The options of `config_class` that the command line gave."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def build(config_class: type[_Config], layers: Iterable[tuple[str, Mapping[str, Any]]]) -> _Config:
    """The config from layers of (where it came from, values); later layers win."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for source, layer in layers:
        for key, value in layer.items():
            name = key.replace("-", "_")
            if name not in fields:
                known = ", ".join(sorted(fields))
                raise ConfigError(f"{source}: unknown option {key!r}", f"known are: {known}")
            values[name] = _parse(source, name, value, fields[name].metadata)
    return config_class(**values)


def _parse(source: str, name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    parse, choices = metadata["parse"], metadata["choices"]
    shown = "--" + name.replace("_", "-")
    if parse is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{source}: {shown} is {value!r}", "give true or false")
    try:
        parsed = parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{source}: {shown} cannot be {value!r}", str(error)) from error
    if choices and parsed not in choices:
        raise ConfigError(
            f"{source}: {shown} cannot be {value!r}", f"choose one of: {', '.join(choices)}"
        )
    return parsed


def parse_size(text: str) -> int:
    """Bytes from '24G', '512M', '4096': powers of 1024."""
    factor = _UNITS.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        size = float(digits) * factor
    except ValueError:
        size = -1.0
    if not 0 <= size < 2**62:
        raise ValueError("give a size such as 24G, 512M or a number of bytes")
    return int(size)


def parse_auto_size(text: str) -> int | None:
    """A size, or None for 'auto'."""
    return None if text == "auto" else parse_size(text)


def parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("give a whole number, 0 or more")
    return int(text)
