"""One tree of exceptions, each of which survives the wire as what it was."""

import pytest

from shared import errors
from shared.errors import BY_CODE, DaemonBusy, StreamError, from_wire


def every_class():
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [cls for cls in found if issubclass(cls, Exception)]


def test_every_class_is_of_the_tree_and_has_a_code_of_its_own():
    classes = every_class()
    assert all(issubclass(cls, StreamError) for cls in classes)
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert {code: BY_CODE[code] for code in codes} == {cls.code: cls for cls in classes}


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.code)
def test_an_error_is_the_same_behind_the_wire(cls):
    error = cls("what went wrong", "what to do")
    received = from_wire(error.code, error.message, error.remedy)
    assert type(received) is cls
    assert str(received) == "what went wrong (what to do)"


def test_without_a_remedy():
    assert str(DaemonBusy("full")) == "full"
    assert DaemonBusy("full").remedy == ""


def test_a_code_from_a_newer_peer_is_still_an_error():
    error = from_wire("brand-new", "message", "remedy")
    assert type(error) is StreamError
    assert (error.message, error.remedy) == ("message", "remedy")
