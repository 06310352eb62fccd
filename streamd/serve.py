"""`streamd serve`: a daemon from its configuration to its end, reloads included."""

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import json
import logging
import os
import sys
from typing import Any

from shared.errors import StreamError
from shared.runtime_dir import DaemonRecord, Endpoints, claim
from shared.socket_group import group_id
from shared.wire import PROTOCOL_VERSION
from streamd.config import StreamdConfig, read_config
from streamd.daemon import Daemon
from streamd.monitoring.notify import Notifier
from streamd.tiers.descriptors import raise_limit

log = logging.getLogger(__name__)


def serve(arguments: argparse.Namespace) -> int:
    faulthandler.enable()  # a watchdog's SIGABRT: where the main loop hung
    starter = Starter(arguments.ready_fd)
    try:
        _serve_until_stopped(arguments, starter)
    except StreamError as error:
        if starter.tell({"error": [error.code, error.message, error.remedy]}):
            return 1
        raise
    return 0


def _serve_until_stopped(arguments: argparse.Namespace, starter: "Starter") -> None:
    config = read_config(arguments)
    # The working directory may be gone by the time the file is opened anew.
    config = dataclasses.replace(config, model=config.model.absolute(), mtp=config.absolute_mtp)
    logging.basicConfig(
        level=config.log_level.upper(), format="streamd: %(message)s", stream=sys.stderr
    )
    raise_limit()
    gid = group_id(config.group) if config.group else None
    endpoints = Endpoints.of(config.daemon_name, gid)
    record = DaemonRecord(
        config.daemon_name, os.getpid(), str(config.model), PROTOCOL_VERSION, config.mtp
    )
    notifier = Notifier()
    with claim(endpoints, record), _metrics(config):
        while True:
            daemon = Daemon(config, endpoints, notifier=notifier)
            daemon.stop_on_signals()
            gc.collect()  # the one before a reload: its memory must be free for this one's plan
            notifier.status(f"loading {config.model.name}")
            with daemon:
                if arguments.owner_fd is not None:
                    daemon.watch_owner(arguments.owner_fd)
                log.info("serving %s as %r", config.model, config.daemon_name)
                starter.tell({"name": config.daemon_name})
                notifier.ready(f"serving {config.model.name}")
                daemon.run()
                if daemon.reload_wanted:
                    notifier.reloading()
                else:
                    notifier.stopping()
            if daemon.orphaned or not daemon.reload_wanted:
                return


def _metrics(config: StreamdConfig) -> contextlib.AbstractContextManager[object]:
    if config.metrics is None:
        return contextlib.nullcontext()
    from streamd.monitoring.metrics import MetricsServer  # noqa: PLC0415 - most daemons do without

    return MetricsServer(config.metrics, config.daemon_name)


class Starter:
    """Whoever started us and waits at the other end of a pipe to hear that we serve, or why not."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def tell(self, word: dict[str, Any]) -> bool:
        """One line, once; False if nobody waits (any more)."""
        if self._fd is None:
            return False
        with contextlib.suppress(BrokenPipeError):  # it has gone; the owner's descriptor will tell
            os.write(self._fd, json.dumps(word).encode() + b"\n")
        os.close(self._fd)
        self._fd = None
        return True
