"""Completion scripts; bash itself completes with them."""

import shutil
import subprocess

import pytest

import infer.cli
import streamd.cli
from shared.completion import SHELLS, completion_script

PARSERS = {"streamd": (streamd.cli._parser, "serve"), "infer": (infer.cli._parser, "")}


def script_of(program, shell):
    parser, default = PARSERS[program]
    return completion_script(parser(), shell, default)


def completed(program, *words):
    """What bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in (program, *words))
    script = script_of(program, "bash")
    script += f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _{program}\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("streamd", "st"), ["stats", "stop"]),
        (("streamd", "stats", "--w"), ["--watch"]),
        (("streamd", "serve", "--host"), ["--host-cache"]),
        (("streamd", "--host"), ["--host-cache"]),
        (("streamd", "--name", "x", "--gpu-c"), ["--gpu-cache"]),
        (("streamd", "completion", "f"), ["fish"]),
        (("streamd", "stop", "--w"), []),
        (("infer", "ch"), ["chat"]),
        (("infer", "chat", "--top"), ["--top-k", "--top-p"]),
    ],
)
def test_bash_completes(words, offered):
    assert completed(*words) == offered


def test_where_a_file_is_expected_bash_completes_files():
    assert completed("streamd", "plan", "--model", "--n") == []


@pytest.mark.parametrize("program", PARSERS)
@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_what_the_shell_can_read(program, shell):
    script = script_of(program, shell)
    assert "==SUPPRESS==" not in script
    assert "owner-fd" not in script
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
