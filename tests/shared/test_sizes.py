import hypothesis
import hypothesis.strategies as st
import pytest

from shared.sizes import at_least, at_most, mb, parse_size, size_text, three_digits


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (5_308_416, "5.31 MB"),
        (99_960_000, "100 MB"),
        (999_499_999, "999 MB"),
        (999_600_000, "1.00 GB"),
        (2e12, "2.00 TB"),
        (5.76e17, "576,000 TB"),
    ],
)
def test_sizes_for_people(size_bytes, shown):
    assert size_text(size_bytes) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"), [(0, "0.0 MB"), (1 << 20, "1.0 MB"), (25 << 30, "26,844 MB")]
)
def test_megabytes(size_bytes, shown):
    assert mb(size_bytes) == shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("24G", 24 << 30),
        ("24g", 24 << 30),
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("1.5M", 3 << 19),
        ("1.5MB", 1_500_000),
        ("512k", 512 << 10),
        ("2T", 2 << 40),
    ],
)
def test_sizes_that_users_give(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "-1G",
        "24 GB",
        "24B",
        "24iB",
        "1KM",
        "0x10",
        "1e9",
        "nan",
        "ten",
        "٣G",
        "9" * 400,
    ],
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="give a size such as 24G"):
        parse_size(text)


@hypothesis.given(st.integers(0, 2**50), st.sampled_from(["", "K", "KiB", "M", "KB", "MB"]))
def test_whole_sizes_are_exact(number, unit):
    factor = {"": 1, "K": 2**10, "KiB": 2**10, "M": 2**20, "KB": 1000, "MB": 10**6}[unit]
    if number * factor < 2**62:
        assert parse_size(f"{number}{unit}") == number * factor


@hypothesis.given(st.integers(0, 2**50))
def test_the_bounds_that_a_remedy_names_hold(size_bytes):
    least, most = parse_size(at_least(size_bytes)), parse_size(at_most(size_bytes))
    assert most <= size_bytes <= least
    assert least - most in (0, 10**6)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (60281.6, "60,300"),
        (999.6, "1,000"),
        (12.345, "12.3"),
        (5.7675, "5.77"),
        (0.08294, "0.0829"),
    ],
)
def test_figures_have_three_digits(value, shown):
    assert three_digits(value) == shown
