"""Chooses the engine, after trying it out in a process of its own.

The trial needs one because it may not survive: the wheel of `liburing` on PyPI is built for
AVX-512 and dies with SIGILL elsewhere. Kernels and containers refuse io_uring in several ways, too.

    python -m streamd.readers.probe NAME DEPTH      exit code 0: the engine works here
"""

import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shared.errors import ConfigError
from streamd.readers.engine import Engine

AUTO = "auto"
FALLBACK = "pread"
ENGINES = {  # name: module, class; `auto` takes the first that works
    "liburing": ("streamd.readers.liburing_engine", "LiburingEngine"),
    "uring-api": ("streamd.readers.uring_api_engine", "UringApiEngine"),
    FALLBACK: ("streamd.readers.pread_engine", "PreadEngine"),
}
PREFERENCES = (AUTO, *ENGINES)

TRIAL_TIMEOUT_S = 5.0
TRIAL_READ_TIMEOUT_MS = 2000
TRIAL_BYTES = 64 << 10
PR_SET_DUMPABLE = 4


def try_in_child(name: str, depth: int) -> str:
    """Why the engine cannot be used here, or an empty string."""
    return run_trial([sys.executable, "-m", "streamd.readers.probe", name, str(depth)])


def choose_engine(
    preference: str, depth: int, trial: Callable[[str, int], str] = try_in_child
) -> tuple[Engine, list[str]]:
    """The engine for `preference` and, line by line, how it was chosen.

    Raises ConfigError for an unknown name, and for an engine asked for by name that does not work.
    """
    if preference not in PREFERENCES:
        raise ConfigError(
            f"unknown I/O engine {preference!r}", f"choose one of {', '.join(PREFERENCES)}"
        )
    report: list[str] = []
    for name in ENGINES if preference == AUTO else (preference,):
        # The fallback is made of nothing that could be missing.
        reason = "" if name == FALLBACK else trial(name, depth)
        if not reason:
            try:
                engine = make_engine(name, depth)
            except (ImportError, OSError) as error:
                reason = _refusal(error)
            else:
                return engine, [*report, f"I/O engine {name} chosen"]
        report.append(f"I/O engine {name} not usable: {reason}")
    raise ConfigError(
        report[-1], f"--io {AUTO} takes the first engine that works, --io {FALLBACK} always works"
    )


def make_engine(name: str, depth: int) -> Engine:
    """Raises ImportError or OSError where it cannot be had, or kills the process: try it first."""
    module, class_name = ENGINES[name]
    engine: Engine = getattr(importlib.import_module(module), class_name)(depth)
    return engine


def run_trial(command: list[str], timeout_s: float = TRIAL_TIMEOUT_S) -> str:
    """Runs a trial's process and puts its end into words; an empty string if all is well."""
    project = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (project, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its trial did not end within {timeout_s:g} s"
    except OSError as error:
        return f"its trial could not be started: {error.strerror}"
    if done.returncode < 0:
        number = -done.returncode
        names = {known.value: known.name for known in signal.Signals}
        hint = ": the package is built for another CPU" if number == signal.SIGILL else ""
        return f"its trial was killed by {names.get(number, f'signal {number}')}{hint}"
    if done.returncode > 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return ""


def try_here(name: str, depth: int) -> str:
    """Reads a little with the engine in this process: what is wrong, or an empty string."""
    try:
        engine = make_engine(name, depth)
    except (ImportError, OSError) as error:
        return _refusal(error)
    written = bytes(range(256)) * (TRIAL_BYTES // 256)
    read = bytearray(TRIAL_BYTES)
    with os.fdopen(os.memfd_create("streamd-io-trial"), "w+b", buffering=0) as file:
        file.write(written)
        engine.submit(0, file.fileno(), memoryview(read), 0)
        engine.flush()
        bell = select.poll()
        bell.register(engine.fileno(), select.POLLIN)
        if not bell.poll(TRIAL_READ_TIMEOUT_MS):
            return f"a read did not end within {TRIAL_READ_TIMEOUT_MS} ms"
        ended = engine.reap()
    engine.close()
    if ended != [(0, TRIAL_BYTES)]:
        return f"a read of {TRIAL_BYTES} bytes ended as {ended}"
    return "" if read == written else "a read brought wrong bytes"


def _refusal(error: ImportError | OSError) -> str:
    if isinstance(error, ImportError):
        return f"the package cannot be imported: {error}"
    return f"the system refuses it: {error.strerror} (errno {error.errno})"


def main() -> None:
    name, depth = sys.argv[1], int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # should it die, it leaves no core dump behind
    sys.exit(try_here(name, depth) or 0)


if __name__ == "__main__":
    main()
