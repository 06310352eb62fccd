"""How a command of ours ends: a short message and a code; no traceback for the world's faults."""

import errno
import os
import sys
from collections.abc import Callable

from shared.errors import StreamError, cause_of

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# Of writes alone, to what has no name any more once it is open: standard output, a file of a line
# each time.
_OUTPUT_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def run_command(program: str, command: Callable[[], int | None]) -> int:
    """Run `command`; its exit code, or that of the error it raised, which is shown on stderr."""
    _open_standard_streams()
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except StreamError as error:
        print(f"{program}: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _drop_output()
        print(f"{program}: {_fault(error)}", file=sys.stderr)
        return EXIT_FAILED


def _fault(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {cause_of(error)}"
    if error.errno in _OUTPUT_FAULTS:
        return f"the output cannot be written: {cause_of(error)}"
    return cause_of(error)


def _drop_output() -> None:
    """Nobody takes our output any more; nothing may be flushed to it at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Descriptors 0 to 2 that were closed: else what is opened next would get their numbers."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - for as long as we live
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
