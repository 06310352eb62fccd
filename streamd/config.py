"""The daemon's configuration: defaults, then the TOML file, then the command line; built once.

The file is the one that --config names, else what belongs to --name: NAME.toml in
$XDG_CONFIG_HOME/streamd (~/.config/streamd), else in /etc/streamd, if there is one.
"""

import argparse
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError, cause_of
from shared.options import build, given, option, parse_count, parse_switch
from shared.runtime_dir import is_daemon_name
from streamd.address import Address, parse_address
from streamd.readers.engine import DEPTH_MAX

STALL_DEADLINE_MAX_MS = 3_600_000
SYSTEM_CONFIG_DIR = Path("/etc/streamd")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class StreamdConfig(DaemonOptions):
    model: Path = option(Path(), "the GGUF file (any shard of a split one)", parse=Path)
    name: str = option("", "name of this daemon (default: from the model's file name)")
    log_level: str = option("info", "debug, info, warning or error", choices=LOG_LEVELS)
    io_depth: int = option(
        0,
        "reads in flight at the most (default: as many as the drive is found to need, up to 64)",
        parse=parse_count,
        metavar="N",
    )
    verify: bool = option(
        False, "compare each slab that is read again with its first reading", parse=bool
    )
    stall_deadline_ms: int = option(
        2000,
        "how long a client that does not move may hold up another one",
        parse=parse_count,
        metavar="MS",
    )
    trace: Path | None = option(
        None,
        "record which experts each layer's router chooses, for tools/replay.py; for benchmarks;"
        " an older FILE is kept as FILE.1, FILE.2, ...",
        parse=lambda text: Path(text).absolute(),
        metavar="FILE",
    )
    warm: bool = option(
        True,
        "fill an idle cache with what was hot in earlier runs (default: on)",
        parse=parse_switch,
    )
    governor: bool = option(
        False,
        "give memory back while the machine runs short; slots are then kept from being"
        " written by others with a read-only descriptor, not with a seal (default: off)",
        parse=parse_switch,
    )
    cpu_clients: bool = option(
        True,
        "with a GPU: keep all resident tensors in RAM too, for clients that compute on the CPU; off"
        " leaves their memory to the expert cache (default: on)",
        parse=parse_switch,
    )
    group: str = option(
        "",
        "serve members of this group too, not this user alone: socket directory and sockets are"
        " given to it",
        metavar="NAME",
    )
    metrics: Address | None = option(
        None, "serve counters to Prometheus there", parse=parse_address, metavar="HOST:PORT"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model == Path():
            raise ConfigError("no model is given", "say --model FILE.gguf")
        if self.io_depth > DEPTH_MAX:
            raise ConfigError(f"--io-depth is {self.io_depth}", f"give 1 to {DEPTH_MAX}")
        if not 1 <= self.stall_deadline_ms <= STALL_DEADLINE_MAX_MS:
            raise ConfigError(
                f"--stall-deadline-ms is {self.stall_deadline_ms}",
                f"give 1 to {STALL_DEADLINE_MAX_MS}",
            )

    @property
    def daemon_name(self) -> str:
        """As given, or as much of the model's file name as a name can have."""
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", self.model.stem).strip("-._")[:64]
        return self.name or plain or "model"


def read_config(
    arguments: argparse.Namespace, system_dir: Path = SYSTEM_CONFIG_DIR
) -> StreamdConfig:
    """From a parsed command line that may name a TOML file with --config or --name."""
    options = given(arguments, StreamdConfig)
    layers = [("command line", options)]
    path = arguments.config or config_of_name(str(options.get("name", "")), system_dir)
    if path is not None:
        layers.insert(0, (str(path), _read_toml(path)))
    return build(StreamdConfig, layers)


def config_from_file(path: Path) -> StreamdConfig:
    """What a file alone would serve."""
    return build(StreamdConfig, [(str(path), _read_toml(path))])


def user_config_dir() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base, "streamd")


def config_of_name(name: str, system_dir: Path = SYSTEM_CONFIG_DIR) -> Path | None:
    """The file of the daemon of that name: the user's own, else the machine's, else None.

    One that exists and cannot be read is refused later on, never passed over.
    """
    if not is_daemon_name(name):
        return None
    paths = [directory / f"{name}.toml" for directory in (user_config_dir(), system_dir)]
    return next((path for path in paths if path.exists()), None)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {cause_of(error)}", "check --config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", 'write options such as host-cache = "24G"'
        ) from error
