"""A model ready to run: attached to the daemon that serves it, or to one started for it."""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from infer.config import ModelConfig
from infer.daemon.daemon_process import EmbeddedDaemon
from infer.daemon.recovery import Recovery
from infer.loading_notice import loading_notice
from infer.text.tokenizer import Tokenizer
from shared.daemon_options import OWN_MTP, DaemonOptions
from shared.errors import ConfigError, DaemonNotRunning
from shared.mtp import open_served
from shared.runtime_dir import DaemonRecord, find_daemon, same_model

if TYPE_CHECKING:
    from infer.families.parts import Instrument

# Options that a client of a running daemon has a say in too.
SHARED_CHOICES = ("--device", "--mtp", "--ctx", "--chunk")
# Those that are its own where it keeps GPU slots for itself, beside a daemon without any.
OWN_SLOT_CHOICES = ("--gpu-cache", "--vram", "--gpu-resident", "--gpu-reserve")


class Session:
    """Use as a context manager; `index`, `engine` and `tokenizer` are there inside, and
    `daemon_name`: "" for one of our own.

    A daemon of our own is started before torch and numba are imported, which takes them a second:
    it loads the model meanwhile. `instrument` may watch the parts that the model is built from.
    """

    def __init__(self, config: ModelConfig, instrument: "Instrument | None" = None) -> None:
        self._config = config
        self._instrument = instrument
        self._stack = ExitStack()

    def __enter__(self) -> "Session":
        started_s = time.perf_counter()
        with ExitStack() as stack:
            model, mtp, name = self._find_daemon()
            self.daemon_name = name
            self.index = open_served(model, mtp)  # first: what is no model costs no daemon
            with loading_notice(model.name):
                embedded = None if name else self._start_daemon(model, stack)
                from infer.engine import Engine  # noqa: PLC0415 - while the daemon loads

                if embedded is not None:
                    embedded.wait_ready()
                    name = embedded.name
                recovery = self._recovery(name, model, embedded)
                self.engine = Engine(self.index, name, self._config, self._instrument, recovery)
                if embedded is None:
                    self._tell_ignored(name)
            stack.callback(self.engine.close)
            self._stack = stack.pop_all()
        self.startup_s = time.perf_counter() - started_s
        return self

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built at its first use: a file without one can still compute given token ids."""
        return Tokenizer.from_metadata(self.index.metadata)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _find_daemon(self) -> tuple[Path, str, str]:
        """The model, its MTP block, and the daemon that serves both: "" for one of our own."""
        config = self._config
        try:
            record = find_daemon(config.name, config.model)
        except DaemonNotRunning:
            if config.model is None or config.name is not None:
                raise
            return config.model, config.wanted_mtp, ""
        if config.model is not None and not same_model(record.model, config.model):
            raise ConfigError(
                f"the daemon {record.name!r} serves {record.model}, not {config.model}",
                "leave out --name or --model",
            )
        _check_mtp(record, config.wanted_mtp)
        return Path(record.model), record.mtp, record.name

    def _tell_ignored(self, name: str) -> None:
        """Options that change nothing, since the daemon `name` runs already."""
        heard = SHARED_CHOICES
        if self.engine.has_own_slots:
            heard += OWN_SLOT_CHOICES
        words = self._daemon_options().arguments()
        ignored = [word for word in words if word.startswith("--") and word not in heard]
        if ignored:
            verb = "changes" if len(ignored) == 1 else "change"
            print(
                f"infer: {name!r} runs already: {' '.join(ignored)} {verb} nothing",
                file=sys.stderr,
            )

    def _daemon_options(self) -> DaemonOptions:
        config = self._config
        options = {f.name: getattr(config, f.name) for f in fields(DaemonOptions)}
        return DaemonOptions(**options | {"mtp": config.wanted_mtp})

    def _recovery(self, name: str, model: Path, embedded: EmbeddedDaemon | None) -> Recovery | None:
        if not self._config.reconnect_s:
            return None
        restart = embedded.start_again if embedded else None
        return Recovery(name, model, self._config.reconnect_s, restart)

    def _start_daemon(self, model: Path, stack: ExitStack) -> EmbeddedDaemon:
        embedded = EmbeddedDaemon(model, self._daemon_options(), f"embedded-{os.getpid()}")
        stack.callback(embedded.close)
        return embedded


def _check_mtp(record: DaemonRecord, wanted: str) -> None:
    """ConfigError unless the daemon serves the MTP block that is wanted, if one is."""
    if wanted in ("", record.mtp) or (wanted == OWN_MTP and record.mtp):
        return
    word = "--mtp" if wanted == OWN_MTP else f"--mtp {wanted}"
    raise ConfigError(
        f"the daemon {record.name!r} does not serve the MTP block that is asked for",
        f"restart it with {word}, or leave --mtp and --draft out",
    )
