"""A short form of tools/campaign.py: some rounds of faults, after each of which all is well."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from campaign_faults import FAULTS

CAMPAIGN = Path(__file__).resolve().parents[2] / "tools" / "campaign.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (1, ["talk_garbage", "kill_a_client", "fail_reads", "kill_the_daemon"]),
        (2, ["lie_in_shared_memory", "flood_with_hints", "come_in_a_crowd", "stop_a_client"]),
    ],
)
def test_a_short_campaign(seed, faults):
    words = ("--seed", seed, "--rounds", 2, "--faults", ",".join(faults))
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *rounds, summary = map(json.loads, done.stdout.splitlines())
    assert len(rounds) == summary["rounds"] == 2
    assert all(one["slabs"] > 0 for one in rounds)


def test_each_fault_says_what_it_is():
    assert len(FAULTS) >= 15
    assert all(name.isidentifier() for name in FAULTS)
