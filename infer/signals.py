"""SIGTERM and SIGHUP end a command as an error would: what is open is closed on the way out."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class _Ended(SystemExit):
    """By one of our signals."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """While the block runs; in the main thread. A signal that is ignored (nohup) stays so."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in caught:
        signal.signal(number, _end)
    try:
        yield
    except _Ended as ended:
        leave_at_once(ended.code)
    finally:
        for number in caught:
            signal.signal(number, before[number])


def leave_at_once(code: int) -> NoReturn:
    """End the process, without the second that torch takes to be unloaded."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    for other in _NUMBERS:  # once is enough: the way out is not cut short
        signal.signal(other, signal.SIG_IGN)
    raise _Ended(128 + number)
