"""How a command of ours ends: a short message and a code; no traceback for the world's faults."""

import os
import sys
from collections.abc import Callable

from shared.errors import StreamError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def run_command(program: str, command: Callable[[], int | None]) -> int:
    """Run `command`; its exit code, or that of the error it raised, which is shown on stderr."""
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
        # Whoever read our output has gone; nothing may be flushed to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
