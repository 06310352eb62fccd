"""The daemon's configuration: defaults, then the TOML file, then the command line; built once."""

import argparse
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError
from shared.options import build, given, option, parse_count

DEPTH_MAX = 1024
STALL_DEADLINE_MAX_MS = 3_600_000
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class StreamdConfig(DaemonOptions):
    model: Path = option(Path(), "the GGUF file (any shard of a split one)", parse=Path)
    name: str = option("", "name of this daemon (default: from the model's file name)")
    log_level: str = option("info", "debug, info, warning or error", choices=LOG_LEVELS)
    io_depth: int = option(
        0,
        "reads in flight at the most (default: what bench-io found for the drive, else 32)",
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


def read_config(arguments: argparse.Namespace) -> StreamdConfig:
    """From a parsed command line that may name a TOML file with --config."""
    layers = [("command line", given(arguments, StreamdConfig))]
    if arguments.config is not None:
        layers.insert(0, (str(arguments.config), _read_toml(arguments.config)))
    return build(StreamdConfig, layers)


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check --config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", 'write options such as host-cache = "24G"'
        ) from error
