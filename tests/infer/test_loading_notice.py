"""The word about loading: on a terminal, and only where it takes a while."""

import io
import threading

import pytest

from infer.loading_notice import loading_notice

DEADLINE_S = 20


class Screen(io.StringIO):
    """A stream that is, or is no, terminal; `written` is set by what is written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        super().write(text)
        self.written.set()


def test_what_takes_a_while_is_told():
    screen = Screen(True)
    with loading_notice("m.gguf", screen, quiet_s=0):
        assert screen.written.wait(DEADLINE_S)
    assert screen.getvalue() == "loading m.gguf ...\n"


def test_what_is_quick_or_fails_at_once_is_not():
    screen = Screen(True)
    with loading_notice("m.gguf", screen, quiet_s=DEADLINE_S):
        pass
    with pytest.raises(KeyError), loading_notice("m.gguf", screen, quiet_s=DEADLINE_S):
        raise KeyError
    assert screen.getvalue() == ""


def test_where_nobody_looks_nothing_is_written():
    screen = Screen(False)
    threads_before = threading.active_count()
    with loading_notice("m.gguf", screen, quiet_s=0):
        assert threading.active_count() == threads_before
    assert screen.getvalue() == ""
