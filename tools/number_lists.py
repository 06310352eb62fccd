"""Numbers on a tool's command line, for argparse: one that is refused is named, and what is wanted.

Lists are written with commas: 200,600,2000.
"""

import argparse


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def parse_counts(text: str) -> list[int]:
    return [parse_count(word) for word in text.split(",")]


def parse_shares(text: str) -> list[float]:
    """None of them negative; `inf` is one."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(number >= 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of at least 0")
    return numbers
