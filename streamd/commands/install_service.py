"""`streamd install-service`: a systemd unit with this machine's paths, and its configuration.

                    the machine's                     the user's own (--user)
    unit            /etc/systemd/system               ~/.config/systemd/user
    configuration   /etc/streamd/NAME.toml            ~/.config/streamd/NAME.toml

The daemon `streamd` has streamd.service, others are instances of streamd@.service. Units are ours
to write anew (changes belong into a drop-in: systemctl edit), a configuration is never changed.
"""

import argparse
import getpass
import json
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.gguf_index import GgufIndex
from shared.runtime_dir import is_daemon_name
from streamd.config import SYSTEM_CONFIG_DIR, config_from_file, user_config_dir

DEFAULT_NAME = "streamd"
SHIPPED_PROGRAM = "/usr/local/bin/streamd"
SHIPPED_USER = "User=root"
SYSTEM_UNIT_DIR = Path("/etc/systemd/system")
VERIFY_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Places:
    """Where units and configurations go."""

    unit_dir: Path
    config_dir: Path

    @classmethod
    def of(cls, user: bool) -> "Places":
        if not user:
            return cls(SYSTEM_UNIT_DIR, SYSTEM_CONFIG_DIR)
        config_dir = user_config_dir()
        return cls(config_dir.parent / "systemd" / "user", config_dir)


def install(arguments: argparse.Namespace) -> int:
    """Write what is asked for, or show it; ConfigError and ModelError for what would not start."""
    name = arguments.name or DEFAULT_NAME
    if not is_daemon_name(name):
        raise ConfigError(
            f"{name!r} cannot be a daemon's name",
            "use up to 64 letters, digits, dots, dashes and underscores",
        )
    if arguments.user and arguments.run_as:
        raise ConfigError(
            "a unit of your own systemd runs as you, not as --run-as says",
            "leave --user or --run-as out",
        )
    if arguments.run_as and not _is_user(arguments.run_as):
        raise ConfigError(
            f"there is no user {arguments.run_as!r} here", "give --run-as one that there is"
        )
    places = Places.of(arguments.user)
    config_path = places.config_dir / f"{name}.toml"
    config = config_text(config_path, arguments.model)
    unit_name = "streamd.service" if name == DEFAULT_NAME else "streamd@.service"
    owner = None if arguments.user else arguments.run_as or _invoking_user()
    unit = render_unit(shipped_unit(unit_name, arguments.user), program_path(), owner)
    service = unit_name.removesuffix(".service").replace("@", f"@{name}")
    _check(unit, unit_name, service, arguments.user)
    if not arguments.user:
        for path in filter(None, (arguments.model, program_path())):
            _warn_of_private_tmp(path.absolute())
    files = {places.unit_dir / unit_name: unit}
    if config is not None:
        files[config_path] = config
    for path, text in files.items():
        if arguments.dry_run:
            print(f"# {path}\n{text}")
        else:
            _write(path, text)
            print(f"wrote {path}")
    _say_what_next(service, name, " --user" if arguments.user else "")
    return 0


def _warn_of_private_tmp(path: Path) -> None:
    if path.parts[1:2] == ("tmp",) or path.parts[1:3] == ("var", "tmp"):
        print(
            f"streamd: the service will not find {path}: it has a /tmp of its own\n"
            "  put it elsewhere, or let `systemctl edit` say PrivateTmp=no",
            file=sys.stderr,
        )


def _say_what_next(service: str, name: str, whose: str) -> None:
    print(
        f"next: systemctl{whose} daemon-reload && systemctl{whose} enable --now {service}\n"
        f"log:  journalctl{whose} -u {service}\n"
        f"then: streamd stats --name {name}; infer chat --name {name}"
    )


def config_text(path: Path, model: Path | None) -> str | None:
    """What to write to a configuration that is not there yet; None for one that is, and serves.

    Either way the model is opened: a service that cannot start helps nobody.
    """
    if path.exists():
        config = config_from_file(path)
        if model is not None and model.absolute() != config.model:
            raise ConfigError(f"{path} exists and names {config.model}", "edit it, or remove it")
        GgufIndex.open(config.model)
        return None
    if model is None:
        raise ConfigError(f"there is no {path} yet", "say which model: --model FILE.gguf")
    GgufIndex.open(model)
    # What json writes for a text is a TOML basic string too.
    return (
        '# Options of `streamd serve` (--help lists them), such as: host-cache = "24G"\n'
        f"model = {json.dumps(str(model.absolute()), ensure_ascii=False)}\n"
    )


def shipped_unit(unit_name: str, user: bool) -> str:
    """The unit as it lies in systemd/ of the source, or was installed from there."""
    source = Path(__file__).resolve().parents[2]
    installed = Path(sysconfig.get_path("data"), "share", "streamd")
    for base in (source, installed):
        path = base / "systemd" / ("user" if user else "") / unit_name
        if path.exists():
            return path.read_text()
    raise ConfigError(f"{unit_name} is not where it was installed", "install streamd-infer again")


def render_unit(shipped: str, program: Path, owner: str | None) -> str:
    """A shipped unit with the path of this installation and the user that the daemon runs as."""
    assert SHIPPED_PROGRAM in shipped
    unit = shipped.replace(SHIPPED_PROGRAM, unit_word(str(program)))
    if owner is not None:
        assert SHIPPED_USER in shipped
        unit = unit.replace(SHIPPED_USER, f"User={owner}")
    return unit


def unit_word(text: str) -> str:
    """A path as a word of ExecStart: specifiers and variables are not expanded in it."""
    text = text.replace("%", "%%").replace("$", "$$")
    if any(character in text for character in " \t\"'\\"):
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text


def program_path() -> Path:
    """The `streamd` that is running now, as a program that systemd can start."""
    beside = Path(sys.executable).with_name("streamd")
    found = str(beside) if beside.exists() else shutil.which("streamd")
    if found is None:
        raise ConfigError("there is no program streamd", "install streamd-infer with pip")
    return Path(found).absolute()


def _is_user(name: str) -> bool:
    """By name or, as systemd takes it too, by number."""
    try:
        pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        return False
    return True


def _invoking_user() -> str:
    """Who is behind sudo: clients must be of the daemon's user."""
    return os.environ.get("SUDO_USER") or getpass.getuser()


def _check(unit: str, unit_name: str, service: str, user: bool) -> None:
    """ConfigError with systemd's own complaint; a word on stderr where it cannot be asked."""
    program = shutil.which("systemd-analyze")
    if program is None:
        print("streamd: there is no systemd-analyze here to check the unit", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, unit_name).write_text(unit)
        words = [program, *(["--user"] if user else []), "verify", f"{directory}/{service}.service"]
        try:
            done = subprocess.run(
                words,
                env={"XDG_RUNTIME_DIR": directory, **os.environ},  # --user demands one
                capture_output=True,
                text=True,
                check=False,
                timeout=VERIFY_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            print(
                f"streamd: systemd-analyze has not answered for {VERIFY_DEADLINE_S:g} s,"
                " the unit is not checked",
                file=sys.stderr,
            )
            return
    # It looks at other units too, and complains about them without a bad exit code.
    complaints = [line for line in done.stderr.splitlines() if "streamd" in line]
    if done.returncode or complaints:
        said = "; ".join(complaints) or done.stderr.strip()
        raise ConfigError(f"systemd does not take the unit: {said}", "see --dry-run")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "use sudo, or --user for a unit of your own"
        ) from error
