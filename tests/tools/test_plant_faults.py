"""Faults are planted in a copy of the project; the tests named for them must fail there."""

import re
from pathlib import Path

import pytest
from plant_faults import FAULTS, PASSED, copied_project, is_caught, run_test

PROJECT_DIR = Path(__file__).resolve().parents[2]
# Those that hurt others most; tools/plant_faults.py tries them all.
TRIED = (
    "off by one in widening",
    "no grace period",
    "no ageing",
    "wrong size class",
    "double count of misses",
)


@pytest.fixture(scope="module")
def project():
    with copied_project() as project:
        yield project


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_can_be_planted_and_names_a_test(name):
    fault = FAULTS[name]
    assert (PROJECT_DIR / fault.path).read_text().count(fault.sound) == 1
    file, _, test = fault.test.partition("::")
    text = (PROJECT_DIR / "tests" / file).read_text()
    assert re.search(rf"^def {test or 'test_'}", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_the_fault_is_caught(name, project):
    assert is_caught(project, FAULTS[name])


@pytest.mark.slow
def test_without_a_fault_the_test_passes(project):
    assert run_test(project, FAULTS["no grace period"].test) == PASSED
