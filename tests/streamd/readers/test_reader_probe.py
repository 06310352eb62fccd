"""The choice of an engine, with trials that end in every way a process can end."""

import subprocess
import sys
import textwrap

import pytest

from shared.errors import ConfigError
from streamd.readers.pread_engine import PreadEngine
from streamd.readers.probe import ENGINES, choose_engine, run_trial, try_here

DEPTH = 4


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def no_ring(name: str, depth: int) -> str:
    return "no ring"


@pytest.mark.parametrize("signal_name", ["SIGILL", "SIGSEGV", "SIGKILL"])
def test_a_trial_killed_by_a_signal_is_named(signal_name):
    reason = run_trial(
        python(f"""
            import os, resource, signal
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), signal.{signal_name})
        """)
    )
    assert signal_name in reason
    assert ("another CPU" in reason) == (signal_name == "SIGILL")


def test_a_trial_that_fails_says_why():
    assert run_trial(python("import sys; sys.exit('no such thing')")) == "no such thing"
    assert run_trial(python("raise ImportError('gone')")) == "ImportError: gone"
    assert run_trial(python("import sys; sys.exit(7)")) == "exit code 7"


def test_a_trial_that_hangs_is_ended():
    assert "0.2 s" in run_trial(python("import time; time.sleep(60)"), timeout_s=0.2)


def test_a_trial_that_cannot_start_says_why(tmp_path):
    assert "No such file" in run_trial([str(tmp_path / "python")])


def test_a_trial_that_works_has_nothing_to_say():
    assert run_trial(python("import streamd.readers.probe")) == ""


def test_auto_takes_the_first_that_works():
    tried = []

    def trial(name: str, depth: int) -> str:
        tried.append((name, depth))
        return "its trial was killed by SIGILL"

    engine, report = choose_engine("auto", DEPTH, trial)
    engine.close()
    assert engine.name == "pread"
    assert tried == [("liburing", DEPTH), ("uring-api", DEPTH)]
    assert report == [
        "I/O engine liburing not usable: its trial was killed by SIGILL",
        "I/O engine uring-api not usable: its trial was killed by SIGILL",
        "I/O engine pread chosen",
    ]


def test_this_machine_gets_an_engine_by_name_or_the_reason(each_engine):
    name, reason = each_engine
    if reason:
        with pytest.raises(ConfigError, match=f"{name} not usable") as caught:
            choose_engine(name, DEPTH)
        assert "--io" in caught.value.remedy
        return
    engine, report = choose_engine(name, DEPTH)
    engine.close()
    assert (engine.name, engine.depth) == (name, DEPTH)
    assert report == [f"I/O engine {name} chosen"]


def test_one_asked_for_by_name_is_never_replaced():
    with pytest.raises(ConfigError, match="liburing not usable: no ring"):
        choose_engine("liburing", DEPTH, no_ring)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'mmap'") as caught:
        choose_engine("mmap", DEPTH)
    for name in ("auto", *ENGINES):
        assert name in caught.value.remedy


def test_the_trial_reads_with_every_engine_that_can_work(engine_name):
    assert try_here(engine_name, DEPTH) == ""


def test_a_trial_notices_wrong_bytes(monkeypatch):
    class Liar(PreadEngine):
        def submit(self, token: int, fd: int, buffer: memoryview, offset: int) -> None:
            super().submit(token, fd, memoryview(bytearray(buffer.nbytes)), offset)

    engine = Liar(DEPTH)
    monkeypatch.setattr("streamd.readers.probe.make_engine", lambda name, depth: engine)
    assert "wrong bytes" in try_here("pread", DEPTH)


# A seccomp filter as containers have it: io_uring_setup (425 everywhere) answers EPERM.
FORBID_IO_URING = """
    import ctypes, errno, struct
    ALLOW, ERRNO = 0x7FFF0000, 0x00050000
    LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
    steps = [(LOAD_WORD, 0, 0, 0), (JUMP_EQUAL, 0, 1, 425),
             (RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
    header = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    prctl = ctypes.CDLL(None).prctl
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header):
        raise SystemExit("cannot set the filter")

    from streamd.readers.probe import choose_engine
    engine, report = choose_engine("auto", 4)
    print(engine.name, *report, sep="\\n")
"""


def test_a_container_without_io_uring_gets_pread_and_the_reasons():
    done = subprocess.run(
        python(FORBID_IO_URING), capture_output=True, text=True, timeout=30, check=False
    )
    if "cannot set the filter" in done.stderr:
        pytest.skip("seccomp filters cannot be set here")
    assert done.returncode == 0, done.stderr
    name, *report = done.stdout.splitlines()
    assert name == "pread"
    assert len(report) == 3
    for name, line in zip(ENGINES, report, strict=True):
        assert name in line
