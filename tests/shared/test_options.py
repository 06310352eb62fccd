"""Options declared once: as a command line, as keys of a file, as a config."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.daemon_options import OWN_MTP, DaemonOptions
from shared.errors import ConfigError
from shared.options import (
    add_options,
    build,
    given,
    option,
    parse_auto_size,
    parse_count,
    parse_switch,
)
from shared.sizes import parse_size


@dataclass(frozen=True)
class Config:
    cache_size: int = option(4, "how large", parse=parse_size, metavar="SIZE")
    colour: str = option("red", "which", choices=("red", "blue"))
    loud: bool = option(False, "whether", parse=bool)
    label: str = option("", "what")
    light: bool = option(True, "whether", parse=parse_switch)


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    return given(parser.parse_args(words), Config)


def test_only_what_is_given_is_there():
    assert parsed() == {}
    assert parsed("--cache-size", "2K", "--loud") == {"cache_size": "2K", "loud": True}
    assert parsed("--no-loud") == {"loud": False}


@pytest.mark.parametrize(
    ("words", "light"),
    [
        ((), True),
        (("--light",), True),
        (("--no-light",), False),
        (("--light", "on"), True),
        (("--light", "off"), False),
        (("--no-light", "--light"), True),
    ],
)
def test_a_switch_may_be_spelled_out(words, light):
    assert build(Config, [("command line", parsed(*words))]).light is light


@pytest.mark.parametrize(("value", "truth"), [(True, True), ("on", True), ("off", False)])
def test_every_switch_of_a_file_takes_both_spellings(value, truth):
    config = build(Config, [("file", {"light": value, "loud": value})])
    assert (config.light, config.loud) == (truth, truth)


def test_later_layers_win():
    layers = [
        ("file", {"cache-size": 7, "colour": "blue"}),
        ("command line", parsed("--cache-size", "2K")),
    ]
    assert build(Config, layers) == Config(cache_size=2048, colour="blue")
    assert build(Config, []) == Config()


@pytest.mark.parametrize("key", ["cache-size", "cache_size"])
def test_keys_of_a_file_have_dashes_or_underscores(key):
    assert build(Config, [("file", {key: "1M"})]).cache_size == 1 << 20


def test_an_unknown_key_is_refused_and_the_known_ones_named():
    with pytest.raises(ConfigError, match="my file: unknown option 'cahce-size'") as refusal:
        build(Config, [("my file", {"cahce-size": 1})])
    assert refusal.value.remedy == "known are: cache-size, colour, label, light, loud"


@pytest.mark.parametrize(
    ("values", "says", "remedy"),
    [
        ({"cache_size": "big"}, "--cache-size cannot be 'big'", "give a size such as 24G"),
        ({"cache_size": [1]}, "--cache-size cannot be [1]", "give a size"),
        ({"cache_size": True}, "--cache-size cannot be True", "give a size"),
        ({"colour": "green"}, "--colour cannot be 'green'", "choose one of: red, blue"),
        ({"loud": "yes"}, "--loud cannot be 'yes'", "give on or off"),
        ({"loud": 1}, "--loud cannot be 1", "give on or off"),
        ({"loud": ["on"]}, "--loud cannot be ['on']", "give on or off"),
        ({"light": "dim"}, "--light cannot be 'dim'", "give on or off"),
    ],
)
def test_a_value_that_does_not_parse_is_refused(values, says, remedy):
    with pytest.raises(ConfigError) as refusal:
        build(Config, [("my file", values)])
    assert refusal.value.message == f"my file: {says}"
    assert remedy in refusal.value.remedy


def test_auto_is_a_size_left_open():
    assert parse_auto_size("auto") is None
    assert parse_auto_size("1K") == 1024
    with pytest.raises(ValueError, match="give a size"):
        parse_auto_size("automatic")


def test_counts():
    assert parse_count("0") == 0
    assert parse_count("1024") == 1024


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", " 1", "²", "many"])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match="give a whole number, 0 or more"):
        parse_count(text)


# Those that are handed on to a daemon


def from_words(words):
    parser = argparse.ArgumentParser()
    add_options(parser, DaemonOptions)
    arguments = parser.parse_args(words)
    return build(DaemonOptions, [("command line", given(arguments, DaemonOptions))])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--host-cache", "123456"],
        ["--host-cache", "24G", "--io", "pread"],
        ["--gpu-cache", "0", "--device", "cpu"],
        ["--io", "paced:7GB/s:pread"],
        ["--mtp"],
        ["--mtp", "block.gguf", "--device", "cpu"],
    ],
)
def test_options_reach_the_daemon_as_they_were_given(words):
    options = from_words(words)
    assert from_words(options.arguments()) == options
    assert (options.arguments() == []) == (words == [])


def test_an_option_alone_has_a_value_of_its_own():
    assert from_words([]).mtp == ""
    assert from_words(["--mtp", "--device", "cpu"]).mtp == OWN_MTP
    assert from_words(["--mtp", "a.gguf"]).absolute_mtp == str(Path("a.gguf").absolute())


def test_an_engine_that_there_is_not():
    with pytest.raises(ConfigError, match="--io cannot be 'mmap'") as refusal:
        from_words(["--io", "mmap"])
    assert "liburing" in refusal.value.remedy
