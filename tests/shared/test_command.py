"""How a command ends: its code, a short message, no traceback for the world's faults."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.command import EXIT_BROKEN_PIPE, EXIT_FAILED, EXIT_INTERRUPTED, run_command
from shared.errors import ConfigError

PROJECT_DIR = Path(__file__).resolve().parents[2]


def raising(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_the_code_is_the_commands(returned, code):
    assert run_command("streamd", lambda: returned) == code


def test_an_error_is_told_on_stderr(capsys):
    command = raising(ConfigError("no model is given", "say --model FILE.gguf"))
    assert run_command("streamd", command) == EXIT_FAILED
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "streamd: no model is given\n  say --model FILE.gguf\n"


def test_an_error_without_a_remedy_is_one_line(capsys):
    assert run_command("infer", raising(ConfigError("no model is given"))) == EXIT_FAILED
    assert capsys.readouterr().err == "infer: no model is given\n"


def test_ctrl_c_is_no_traceback(capsys):
    assert run_command("infer", raising(KeyboardInterrupt())) == EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError("a bug"), AssertionError("a bug")])
def test_our_own_bugs_are_not_hidden(error):
    with pytest.raises(type(error)):
        run_command("infer", raising(error))


@pytest.mark.parametrize("output", ["print('x' * 100_000, flush=True)", "print('x')"])
def test_a_reader_that_has_gone_is_no_traceback(output):
    """Whether it shows at once or only when the output is flushed at the end."""
    program = (
        "import sys; from shared.command import run_command\n"
        f"def command():\n    sys.stdin.read(); {output}\n"
        "sys.exit(run_command('infer', command))\n"
    )
    buffering = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=PROJECT_DIR, env=buffering,
    ) as process:  # fmt: skip
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == EXIT_BROKEN_PIPE


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the output cannot be written: No space",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a.gguf"), "/a.gguf: No such file"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_an_error_of_the_system_says_of_what_without_its_number(error, told, monkeypatch, capsys):
    monkeypatch.setattr("shared.command._drop_output", lambda: None)
    assert run_command("infer", raising(error)) == EXIT_FAILED
    assert capsys.readouterr().err.startswith(f"infer: {told}")
