"""The units that `streamd install-service` writes, under a real systemd."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NO_SYSTEMD = 77
DEADLINE_S = 180
SERVICE = "streamd@demo"
QUICK = "[Service]\nWatchdogSec=3s\nRestartSec=100ms\n"
HELPERS = """
set -eu
show() { systemctl $WHOSE show -p "$1" --value streamd@demo; }
until_is() {
    for _ in $(seq 300); do if [ "$(show "$1")" = "$2" ]; then return; fi; sleep 0.1; done
    echo "$1 is not $2 but $(show "$1")" >&2
    if [ -e "${LOG:-}" ]; then cat "$LOG" >&2; fi
    exit 1
}
"""
# Started, asked, reloaded, stopped in its tracks, started again by the watchdog, ended.
OWN_LIFE = """
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
# The machine's: installed, enabled, asked as a user does, killed, hung, ended; and with what it
# learnt it starts again.
MACHINES_LIFE = r"""
unset STREAMD_RUNTIME_DIR XDG_STATE_HOME XDG_CONFIG_HOME
streamd install-service --name demo --model "$MODEL_PATH" >&2
mkdir /etc/systemd/system/streamd@demo.service.d
printf "$QUICK$LOG_TO" >/etc/systemd/system/streamd@demo.service.d/quick.conf
systemctl daemon-reload
systemctl enable --now streamd@demo
systemctl status --no-pager streamd@demo | grep -o -E 'active \(running\)|"serving [^"]*"'
infer chat --name demo -p Hello --temp 0 --max-tokens 4 >/dev/null
kill -KILL "$(show MainPID)"
until_is NRestarts 1
until_is ActiveState active
kill -STOP "$(show MainPID)"
until_is NRestarts 2
until_is ActiveState active
infer chat --name demo -p Hello --temp 0 --max-tokens 4 >/dev/null
systemctl stop streamd@demo
echo "stopped $(show Result): $(basename /var/lib/streamd/hot-*.npz | cut -d - -f 1,2)"
systemctl start streamd@demo
if tail -n 3 "$LOG" | grep -q "experts are known hot"; then echo warm; fi
systemctl stop streamd@demo
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("systemctl") is None, reason="needs root and systemd"
    ),
]


def _told(session, script, environment):
    """What the script says beside that systemd; skips where there can be none."""
    done = subprocess.run(
        [str(HERE / session), "sh", "-c", HELPERS + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode == NO_SYSTEMD:
        pytest.skip(done.stderr.strip() or "systemd cannot run here")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_life_under_a_users_systemd(place, demo_model, monkeypatch):
    config_home = place.directory / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config_home))
    words = ("--user", "--name", "demo", "--model", demo_model)
    done = place.run("streamd", "install-service", *words)
    assert done.returncode == 0, done.stderr
    drop_in = config_home / "systemd" / "user" / f"{SERVICE}.service.d" / "quick.conf"
    drop_in.parent.mkdir()
    drop_in.write_text(QUICK)
    environment = {**place.environment, "MODEL": demo_model.name, "WHOSE": "--user"}
    assert _told("systemd_session.sh", OWN_LIFE, environment) == [
        f"started active: serving {demo_model.name}",
        "reloaded 0",
        f"restarted: serving {demo_model.name}",
        "stopped success",
    ]


def _own_tmp(model):
    """What `systemctl edit` has to say where the project or the model lies in /tmp."""
    places = (Path(sysconfig.get_path("scripts")), model)
    hidden = any(at.is_relative_to(tmp) for at in places for tmp in ("/tmp", "/var/tmp"))
    return "PrivateTmp=no\n" if hidden else ""


def test_a_life_as_the_machines_service(demo_model):
    log = "/run/streamd-demo.log"
    environment = {
        "MODEL_PATH": str(demo_model),
        "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "QUICK": QUICK + _own_tmp(demo_model),
        "LOG": log,
        "LOG_TO": f"StandardError=append:{log}\n",
        "WHOSE": "--system",
    }
    said = _told("systemd_boot.sh", MACHINES_LIFE, environment)
    assert said == [
        "active (running)",
        f'"serving {demo_model.name}"',
        f"stopped success: hot-{demo_model.stem.split('-')[0]}",
        "warm",
    ]
