"""What tools take for a number, and for a list of them."""

import argparse
import math

import pytest
from number_lists import parse_count, parse_counts, parse_shares


def test_what_is_given_is_what_is_had():
    assert parse_count("12") == 12
    assert parse_counts("200,600,7") == [200, 600, 7]
    assert parse_shares("0,0.3,inf") == [0.0, 0.3, math.inf]


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "²", "a", "1,2"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize("text", ["", "1,,2", "1,0", "2,x"])
def test_a_list_with_something_else_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        parse_counts(text)


@pytest.mark.parametrize("text", ["", "-0.1", "0.2,nan", "0.2;0.3"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="of at least 0"):
        parse_shares(text)
