"""The daemon's configuration: where each value comes from, and what is refused."""

import argparse
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.options import add_options
from streamd.config import STALL_DEADLINE_MAX_MS, StreamdConfig, read_config


def config_of(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, StreamdConfig)
    parser.add_argument("--config", type=Path)
    return read_config(parser.parse_args(words))


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "streamd.toml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults():
    config = config_of("--model", "m.gguf")
    assert config == StreamdConfig(model=Path("m.gguf"))
    assert (config.host_cache, config.log_level, config.stall_deadline_ms) == (None, "info", 2000)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(toml):
    file = toml('model = "a.gguf"\nhost-cache = "2G"\nlog_level = "debug"\nio-depth = 7\n')
    config = config_of("--config", file, "--host-cache", "512M", "--model", "b.gguf")
    assert config.model == Path("b.gguf")
    assert config.host_cache == 512 << 20
    assert config.log_level == "debug"
    assert config.io_depth == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hots-cache = 1", "unknown option 'hots-cache'"),
        ("[daemon]\nmodel = 'x'", "unknown option 'daemon'"),
        ("host-cache = 'much'", "--host-cache cannot be 'much'"),
        ("host-cache = -5", "--host-cache cannot be -5"),
        ("io-depth = 2.5", "--io-depth cannot be 2.5"),
        ("io-depth = true", "--io-depth cannot be True"),
        ("log-level = 'loud'", "--log-level cannot be 'loud'"),
        ("host-cache = ", "is not TOML"),
        ("model = 'x'\nmodel = 'y'", "is not TOML"),
    ],
)
def test_what_a_file_may_not_say(toml, text, says):
    with pytest.raises(ConfigError) as refusal:
        config_of("--model", "m.gguf", "--config", toml(text))
    assert says in refusal.value.message
    assert "streamd.toml" in refusal.value.message
    assert refusal.value.remedy


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"name = '\xff'")
    for path in (tmp_path / "absent.toml", tmp_path, tmp_path / "latin.toml"):
        with pytest.raises(ConfigError, match="cannot read") as refusal:
            config_of("--config", str(path))
        assert "--config" in refusal.value.remedy


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--model", ""],
        ["--model", "m", "--io-depth", "1025"],
        ["--model", "m", "--io-depth", "many"],
        ["--model", "m", "--stall-deadline-ms", "0"],
        ["--model", "m", "--stall-deadline-ms", str(STALL_DEADLINE_MAX_MS + 1)],
        ["--model", "m", "--log-level", "LOUD"],
        ["--model", "m", "--io", "mmap"],
    ],
)
def test_what_a_command_line_may_not_say(words):
    with pytest.raises(ConfigError) as refusal:
        config_of(*words)
    assert refusal.value.remedy


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Hy3-IQ2_XXS.gguf", "Hy3-IQ2_XXS"),
        ("/models/a model (1).gguf", "a-model--1"),
        ("/models/.hidden.gguf", "hidden"),
        ("/models/模型.gguf", "model"),
        (f"/models/{'x' * 100}.gguf", "x" * 64),
    ],
)
def test_the_name_comes_from_the_file(model, name):
    assert StreamdConfig(model=Path(model)).daemon_name == name
    assert StreamdConfig(model=Path(model), name="mine").daemon_name == "mine"
