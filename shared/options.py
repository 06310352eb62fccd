"""Options declared once: a frozen dataclass is the command line, the TOML keys and the config.

Each field is made by `option()`. Layers of values (file, command line) are laid over the defaults
by `build()`, which refuses unknown keys and values that do not parse.

A switch is `--name` or `--no-name`. With parse=parse_switch it is `--name on` and `--name off` too,
which only commands can have whose arguments all have names.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from shared.errors import ConfigError
from shared.sizes import parse_size

_Config = TypeVar("_Config")
_SWITCH = {"on": True, "off": False}


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
        if field.metadata["parse"] is parse_switch:
            _add_switch(parser, name, field)
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


def _add_switch(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    name: str,
    field: "dataclasses.Field[Any]",
) -> None:
    """`--name`, `--no-name` and, spelled out, `--name on|off`."""
    parser.add_argument(
        name,
        nargs="?",
        const="on",
        default=argparse.SUPPRESS,
        metavar="on|off",
        help=field.metadata["help"],
    )
    parser.add_argument(
        name.replace("--", "--no-", 1),
        dest=field.name,
        action="store_const",
        const="off",
        default=argparse.SUPPRESS,
        help=f"the same as {name} off",
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
                known = ", ".join(sorted(name.replace("_", "-") for name in fields))
                raise ConfigError(f"{source}: unknown option {key!r}", f"known are: {known}")
            values[name] = _parse(source, name, value, fields[name].metadata)
    return config_class(**values)


def _parse(source: str, name: str, value: Any, metadata: Mapping[str, Any]) -> Any:
    parse, choices = metadata["parse"], metadata["choices"]
    shown = "--" + name.replace("_", "-")
    if parse in (bool, parse_switch):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value in _SWITCH:
            return _SWITCH[value]
        raise ConfigError(f"{source}: {shown} cannot be {value!r}", "give on or off")
    try:
        parsed = parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{source}: {shown} cannot be {value!r}", str(error)) from error
    if choices and parsed not in choices:
        raise ConfigError(
            f"{source}: {shown} cannot be {value!r}", f"choose one of: {', '.join(choices)}"
        )
    return parsed


def parse_auto_size(text: str) -> int | None:
    """A size, or None for 'auto'."""
    return None if text == "auto" else parse_size(text)


def parse_switch(text: str) -> bool:
    """For switches that the command line takes spelled out too; TOML takes that of every switch."""
    if text not in _SWITCH:
        raise ValueError("give on or off")
    return _SWITCH[text]


def parse_count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("give a whole number, 0 or more")
    return int(text)
