"""tools/bench_heartbeat.py runs and reports; what it reports is for docs/measurements.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_heartbeat.py"


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_it_beats_while_the_drive_is_read(options, streaming_model):
    words = [str(streaming_model), "--seconds", "0.6", "--cold-seconds", "0.2", "--json"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *words, *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["mb_s"] > 0
    assert values["steady_beats"] > 0
    assert 0 <= values["steady_late_ms_p50"] <= values["steady_late_ms_p99"]
