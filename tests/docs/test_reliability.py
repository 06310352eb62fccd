"""Every row of docs/reliability.md names tests, and they exist."""

import re
from pathlib import Path

import pytest

TESTS_DIR = Path(__file__).resolve().parents[1]
PAGE = TESTS_DIR.parent / "docs" / "reliability.md"
ROW = re.compile(r"^\| (\d+) \|(.*)\|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
KIND_COUNT = 17

ROWS = {int(number): cells for number, cells in ROW.findall(PAGE.read_text())}


def test_every_kind_has_its_row():
    assert sorted(ROWS) == list(range(1, KIND_COUNT + 1))


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_of_a_row_exist(number):
    kind, mechanism, tests = (cell.strip() for cell in ROWS[number].split("|"))
    assert kind
    assert mechanism
    named = TEST.findall(tests)
    assert len(named) == tests.count("`") / 2 > 0
    for file, name in named:
        text = (TESTS_DIR / file).read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
