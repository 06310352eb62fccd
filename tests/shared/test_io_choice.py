"""`--io`, as it is typed and as it is handed on to a daemon."""

import pytest

from shared.io_choice import ENGINES, IoChoice, parse_io


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_by_name(name):
    assert parse_io(name) == IoChoice(name)
    assert str(parse_io(name)) == name


@pytest.mark.parametrize(
    ("text", "engine", "bytes_per_s"),
    [
        ("paced:7GB/s", "auto", 7e9),
        ("paced:3.5GB/s", "auto", 3.5e9),
        ("paced:500MB/s", "auto", 500e6),
        ("paced:1MB/s:pread", "pread", 1e6),
        ("paced:12.25GB/s:uring-api", "uring-api", 12.25e9),
    ],
)
def test_a_drive_that_is_stood_in_for(text, engine, bytes_per_s):
    choice = parse_io(text)
    assert choice == IoChoice(engine, bytes_per_s)
    assert parse_io(str(choice)) == choice


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mmap",
        "AUTO",
        "paced",
        "paced:",
        "paced:7",
        "paced:7KB/s",
        "paced:GB/s",
        "paced:.GB/s",
        "paced:1.2.3GB/s",
        "paced:-7GB/s",
        "paced:0GB/s",
        "paced:0.5MB/s",
        "paced:1001GB/s",
        "paced:7GB/s:",
        "paced:7GB/s:mmap",
        "paced:7GB/s:paced:7GB/s",
    ],
)
def test_anything_else_is_refused_with_what_may_be_given(text):
    with pytest.raises(ValueError, match=r"pread|7GB/s"):
        parse_io(text)
