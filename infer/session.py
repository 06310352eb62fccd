"""A model ready to run: attached to the daemon that serves it, or to one started for it."""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import TracebackType

from infer.config import ModelConfig
from infer.daemon_process import EmbeddedDaemon
from infer.tokenizer import Tokenizer
from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError, DaemonNotRunning
from shared.gguf_index import GgufIndex
from shared.runtime_dir import find_daemon, same_model


class Session:
    """Use as a context manager; `index`, `engine` and `tokenizer` are there inside.

    A daemon of our own is started before torch and numba are imported, which takes them a second:
    it loads the model meanwhile.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._stack = ExitStack()

    def __enter__(self) -> "Session":
        started_s = time.perf_counter()
        with ExitStack() as stack:
            model, name = self._find_daemon()
            self.index = GgufIndex.open(model)  # first: what is no model costs no daemon
            embedded = None if name else self._start_daemon(model, stack)
            from infer.engine import Engine  # noqa: PLC0415 - while the daemon loads

            if embedded is not None:
                embedded.wait_ready()
                name = embedded.name
            self.engine = Engine(self.index, name, self._config)
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

    def _find_daemon(self) -> tuple[Path, str]:
        """The model and the daemon that serves it, "" if it takes one of our own."""
        config = self._config
        try:
            record = find_daemon(config.name, config.model)
        except DaemonNotRunning:
            if config.model is None or config.name is not None:
                raise
            return config.model, ""
        if config.model is not None and not same_model(record.model, config.model):
            raise ConfigError(
                f"the daemon {record.name!r} serves {record.model}, not {config.model}",
                "leave out --name or --model",
            )
        words = self._daemon_options().arguments()
        # --device is the client's choice too.
        ignored = [word for word in words if word.startswith("--") and word != "--device"]
        if ignored:
            print(
                f"infer: {record.name!r} runs already: {' '.join(ignored)} change nothing",
                file=sys.stderr,
            )
        return Path(record.model), record.name

    def _daemon_options(self) -> DaemonOptions:
        config = self._config
        return DaemonOptions(**{f.name: getattr(config, f.name) for f in fields(DaemonOptions)})

    def _start_daemon(self, model: Path, stack: ExitStack) -> EmbeddedDaemon:
        embedded = EmbeddedDaemon(model, self._daemon_options(), f"embedded-{os.getpid()}")
        stack.callback(embedded.close)
        return embedded
