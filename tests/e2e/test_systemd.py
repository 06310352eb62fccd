"""The unit that `streamd install-service` writes, under a real systemd."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SESSION = Path(__file__).with_name("systemd_session.sh")
NO_SYSTEMD = 77
# Started, asked, reloaded, stopped in its tracks, started again by the watchdog, ended.
SCRIPT = """
set -eu
show() { systemctl --user show -p "$1" --value streamd@demo; }
until_is() {
    for _ in $(seq 200); do if [ "$(show "$1")" = "$2" ]; then return; fi; sleep 0.1; done
    echo "$1 is not $2 but $(show "$1")" >&2; exit 1
}
systemctl --user start streamd@demo
echo "started $(show ActiveState): $(show StatusText)"
systemctl --user reload streamd@demo
until_is StatusText "serving $MODEL"
echo "reloaded $(show NRestarts)"
kill -STOP "$(show MainPID)"
until_is NRestarts 1
until_is ActiveState active
echo "restarted: $(show StatusText)"
systemctl --user stop streamd@demo
echo "stopped $(show Result)"
"""


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemctl") is None, reason="needs root and systemd"
)
def test_a_life_under_systemd(place, demo_model, monkeypatch):
    config_home = place.directory / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config_home))
    words = ("--user", "--name", "demo", "--model", demo_model)
    done = place.run("streamd", "install-service", *words)
    assert done.returncode == 0, done.stderr
    drop_in = config_home / "systemd" / "user" / "streamd@demo.service.d" / "quick.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=3s\nRestartSec=100ms\n")
    monkeypatch.setenv("MODEL", demo_model.name)
    done = subprocess.run(
        [str(SESSION), "sh", "-c", SCRIPT],
        env={**os.environ, **place.environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if done.returncode == NO_SYSTEMD:
        pytest.skip("systemd cannot run here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"started active: serving {demo_model.name}",
        "reloaded 0",
        f"restarted: serving {demo_model.name}",
        "stopped success",
    ]
