"""The daemon's configuration: where each value comes from, and what is refused."""

import argparse
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.options import add_options
from streamd.config import STALL_DEADLINE_MAX_MS, StreamdConfig, read_config


def config_of(*words, **places):
    parser = argparse.ArgumentParser()
    add_options(parser, StreamdConfig)
    parser.add_argument("--config", type=Path)
    return read_config(parser.parse_args(words), **places)


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
        assert "Errno" not in refusal.value.message


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The user's and the machine's directories of configurations."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    user_dir, system_dir = tmp_path / "home" / "streamd", tmp_path / "etc"
    user_dir.mkdir(parents=True)
    system_dir.mkdir()
    return user_dir, system_dir


def test_a_name_has_a_file_of_the_user_or_else_of_the_machine(places):
    user_dir, system_dir = places
    assert config_of("--model", "m", "--name", "one", system_dir=system_dir).host_cache is None
    (system_dir / "one.toml").write_text('model = "system.gguf"\nhost-cache = "1G"\n')
    config = config_of("--name", "one", system_dir=system_dir)
    assert (config.model, config.host_cache) == (Path("system.gguf"), 1 << 30)
    assert config.daemon_name == "one"
    (user_dir / "one.toml").write_text('model = "mine.gguf"\n')
    config = config_of("--name", "one", "--io", "pread", system_dir=system_dir)
    assert (config.model, config.host_cache, config.io.engine) == (Path("mine.gguf"), None, "pread")
    # A daemon without a name, or with another one, has none of it.
    assert config_of("--model", "m.gguf", system_dir=system_dir).model == Path("m.gguf")
    with pytest.raises(ConfigError, match="no model is given"):
        config_of("--name", "two", system_dir=system_dir)


def test_a_file_that_is_named_is_the_only_one(places, toml):
    user_dir, system_dir = places
    (user_dir / "one.toml").write_text('host-cache = "1G"\n')
    config = config_of("--name", "one", "--config", toml("model = 'x.gguf'"), system_dir=system_dir)
    assert (config.model, config.host_cache) == (Path("x.gguf"), None)


def test_a_file_of_a_name_is_never_passed_over(places):
    user_dir, system_dir = places
    (system_dir / "one.toml").write_text('model = "system.gguf"\n')
    (user_dir / "one.toml").write_text("modle = 'x'\n")
    with pytest.raises(ConfigError, match="unknown option 'modle'"):
        config_of("--name", "one", system_dir=system_dir)
    (user_dir / "one.toml").unlink()
    (user_dir / "one.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        config_of("--name", "one", system_dir=system_dir)


@pytest.mark.parametrize("name", ["../one", "a/b", ".."])
def test_a_name_is_no_path(places, name):
    user_dir, system_dir = places
    (user_dir.parent / "one.toml").write_text("nonsense")
    with pytest.raises(ConfigError, match="no model is given"):
        config_of("--name", name, system_dir=system_dir)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9464", "127.0.0.1", 9464),
        ("[::1]:0", "::1", 0),
        ("localhost:80", "localhost", 80),
    ],
)
def test_an_address(text, host, port):
    address = config_of("--model", "m", "--metrics", text).metrics
    assert address == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "words",
    [
        [],
        *(["--model", "m", "--metrics", bad] for bad in ("9464", ":9464", "::1:9464", "a:-1")),
        *(["--model", "m", "--metrics", bad] for bad in ("a:65536", "a:", "[a]:1", "")),
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


def test_warm_start_is_on_or_off():
    assert config_of("--model", "m.gguf").warm
    assert not config_of("--model", "m.gguf", "--warm", "off").warm
    with pytest.raises(ConfigError, match="--warm cannot be 'maybe'"):
        config_of("--model", "m.gguf", "--warm", "maybe")


def test_a_trace_stays_where_it_was_asked_for(tmp_path, monkeypatch):
    """The working directory may be another one when the file is opened."""
    monkeypatch.chdir(tmp_path)
    assert config_of("--model", "m.gguf", "--trace", "a.trace").trace == tmp_path / "a.trace"
