"""Units and configurations that `streamd install-service` writes; systemd itself judges them."""

import argparse
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from shared.errors import ConfigError, ModelError
from streamd.commands.install_service import (
    SHIPPED_PROGRAM,
    Places,
    config_text,
    install,
    render_unit,
    shipped_unit,
    unit_word,
)
from streamd.config import StreamdConfig, config_from_file

PROJECT_DIR = Path(__file__).resolve().parents[3]
UNITS = [(name, user) for name in ("streamd.service", "streamd@.service") for user in (True, False)]
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here"
)


def directives(text):
    """The lines that systemd reads."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Of a user whose configuration is empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def arguments(**changes):
    values = {"user": True, "name": "", "model": None, "run_as": None, "dry_run": False}
    return argparse.Namespace(**(values | changes))


@pytest.mark.parametrize("user", [True, False])
def test_the_template_differs_from_the_plain_unit_by_its_name_alone(user):
    plain, template = (shipped_unit(name, user) for name in ("streamd.service", "streamd@.service"))

    def named(text):
        lines = directives(text.replace("%i", "streamd"))
        return [line for line in lines if not line.startswith("Description=")]

    assert named(template) == named(plain)


@pytest.mark.parametrize(("name", "user"), UNITS)
def test_what_the_daemon_relies_on_is_in_every_unit(name, user):
    lines = directives(shipped_unit(name, user))
    assert {"Type=notify", "Restart=on-failure", "LimitMEMLOCK=infinity"} <= set(lines)
    assert sum(line.startswith("WatchdogSec=") for line in lines) == 1
    if not user:
        assert {"RuntimeDirectory=streamd", "StateDirectory=streamd", "User=root"} <= set(lines)
        # CUDA compiles at run time and needs /dev/nvidia*.
        assert not {"MemoryDenyWriteExecute=yes", "PrivateDevices=yes"} & set(lines)


@pytest.mark.parametrize(("user", "warned"), [(False, True), (True, False)])
def test_a_model_that_the_unit_will_not_see_is_told(demo_model, tmp_path, capsys, user, warned):
    if tmp_path.parts[1] != "tmp":
        pytest.skip("temporary files are elsewhere")
    model = tmp_path / "m.gguf"
    model.symlink_to(demo_model)
    assert install(arguments(model=model, user=user, dry_run=True)) == 0
    told = capsys.readouterr().err
    assert (f"the service will not find {model}: it has a /tmp of its own" in told) is warned


def test_this_installations_program_and_user_are_put_in():
    unit = render_unit(shipped_unit("streamd@.service", False), Path("/opt/a b/streamd"), "ann")
    assert 'ExecStart="/opt/a b/streamd" serve --name %i' in unit.splitlines()
    assert "User=ann" in unit.splitlines()
    assert SHIPPED_PROGRAM not in unit


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/usr/bin/streamd", "/usr/bin/streamd"),
        ("/a b/s", '"/a b/s"'),
        ("/100%/$HOME", "/100%%/$$HOME"),
        ('/a"b\\c', '"/a\\"b\\\\c"'),
    ],
)
def test_a_path_as_a_word_of_a_unit(path, word):
    assert unit_word(path) == word


def test_a_user_unit_is_written_with_its_configuration(home, demo_model, capsys):
    assert install(arguments(name="demo", model=demo_model)) == 0
    unit = (home / "systemd" / "user" / "streamd@.service").read_text()
    assert f"ExecStart={SHIPPED_PROGRAM} " not in unit
    assert "serve --name %i" in unit
    config = home / "streamd" / "demo.toml"
    assert config_from_file(config) == StreamdConfig(model=demo_model)
    told = capsys.readouterr().out
    assert f"wrote {config}" in told
    assert "systemctl --user enable --now streamd@demo" in told
    # Again: the configuration stays as its owner has changed it.
    config.write_text(config.read_text() + 'host-cache = "8M"\n')
    assert install(arguments(name="demo", model=demo_model)) == 0
    assert config_from_file(config).host_cache == 8 << 20


def test_a_dry_run_writes_nothing(home, demo_model, capsys):
    assert install(arguments(model=demo_model, dry_run=True)) == 0
    assert not home.exists()
    told = capsys.readouterr().out
    assert f"# {home / 'systemd' / 'user' / 'streamd.service'}" in told
    assert f'model = "{demo_model}"' in told


def test_what_would_not_start_is_refused(home, demo_model, tmp_path, gguf_bytes):
    with pytest.raises(ConfigError, match="cannot be a daemon's name"):
        install(arguments(name="a/b", model=demo_model))
    with pytest.raises(ConfigError, match=r"there is no .*streamd\.toml yet") as refusal:
        install(arguments())
    assert "--model" in refusal.value.remedy
    with pytest.raises(ModelError):
        install(arguments(model=tmp_path / "absent.gguf"))
    assert not home.exists()


def test_an_existing_configuration_is_checked_and_never_changed(tmp_path, demo_model):
    config = tmp_path / "one.toml"
    config.write_text(f'model = "{demo_model}"\n')
    assert config_text(config, None) is None
    with pytest.raises(ConfigError, match="exists and names") as refusal:
        config_text(config, tmp_path / "other.gguf")
    assert refusal.value.remedy
    config.write_text("modle = 'x'\n")
    with pytest.raises(ConfigError, match="unknown option 'modle'"):
        config_text(config, None)


def test_an_odd_path_survives_the_configuration(tmp_path, demo_model):
    odd = tmp_path / 'a "b" \\ c\t模型.gguf'
    odd.symlink_to(demo_model)
    written = tmp_path / "odd.toml"
    written.write_text(config_text(written, odd))
    assert config_from_file(written).model == odd


def test_where_it_may_not_write_it_says_what_to_do(home, demo_model):
    home.mkdir()
    (home / "streamd").write_text("a file in the way")
    with pytest.raises(ConfigError, match="cannot write") as refusal:
        install(arguments(model=demo_model))
    assert "--user" in refusal.value.remedy


def test_a_unit_of_ones_own_runs_as_nobody_else(home, demo_model):
    with pytest.raises(ConfigError, match="--run-as"):
        install(arguments(model=demo_model, run_as="somebody"))
    assert not home.exists()


def test_a_user_that_is_not_there_runs_nothing(demo_model, capsys):
    for name in ("nobodyhere", "4294967294"):
        with pytest.raises(ConfigError, match=f"no user '{name}'"):
            install(arguments(user=False, model=demo_model, run_as=name, dry_run=True))
    assert capsys.readouterr().out == ""


def test_a_service_of_the_machine_goes_where_machines_have_them():
    places = Places.of(user=False)
    assert str(places.unit_dir) == "/etc/systemd/system"
    assert str(places.config_dir) == "/etc/streamd"


@needs_systemd
@pytest.mark.parametrize(("name", "user"), UNITS)
def test_systemd_takes_the_units(name, user, tmp_path):
    unit = render_unit(shipped_unit(name, user), Path("/bin/true"), None)
    (tmp_path / name).write_text(unit)
    words = ["systemd-analyze", *(["--user"] if user else []), "verify"]
    done = subprocess.run(
        [*words, str(tmp_path / name.replace("@", "@demo"))],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
def test_a_unit_that_systemd_does_not_take_is_not_written(home, demo_model, monkeypatch):
    shipped = shipped_unit("streamd.service", True)
    broken = shipped.replace("Type=notify", "Type=notfy")
    monkeypatch.setattr("streamd.commands.install_service.shipped_unit", lambda *_: broken)
    with pytest.raises(ConfigError, match="systemd does not take the unit"):
        install(arguments(model=demo_model))
    assert not home.exists()


def test_a_systemd_that_does_not_answer_is_not_waited_for(home, demo_model, monkeypatch, capsys):
    hanging = home.parent / "systemd-analyze"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("streamd.commands.install_service.VERIFY_DEADLINE_S", 0.2)
    assert install(arguments(model=demo_model)) == 0
    assert (home / "systemd" / "user" / "streamd.service").exists()
    told = capsys.readouterr().err
    assert told == "streamd: systemd-analyze has not answered for 0.2 s, the unit is not checked\n"
