"""`--version` of both programs, installed or not."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import infer.cli
import shared.version
import streamd.cli

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a program prints when it is asked."""

    def run(program):
        monkeypatch.setattr("sys.argv", [program, "--version"])
        with pytest.raises(SystemExit, match="0"):
            {"infer": infer.cli, "streamd": streamd.cli}[program].main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("program", ["infer", "streamd"])
def test_the_version_is_that_of_the_package(program, printed, monkeypatch):
    stated = tomllib.loads(PROJECT.read_text())["project"]["version"]
    assert printed(program) == f"{program} {stated}\n"

    def not_installed(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared.version, "version", not_installed)
    assert printed(program) == f"{program} unknown\n"
