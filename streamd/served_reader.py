"""The reader of a served model: by which engine, and with how much in flight at first."""

import logging
from contextlib import ExitStack

from shared.errors import ConfigError
from shared.experts import ExpertIndex
from streamd.commands.io_best import largest_part_bytes, load_best, reads_of
from streamd.config import StreamdConfig
from streamd.readers.depth import (
    MAX_LIMIT_BYTES,
    MIN_LIMIT_BYTES,
    START_LIMIT_BYTES,
    DepthController,
)
from streamd.readers.direct import OpenFile
from streamd.readers.engine import DEPTH_MAX
from streamd.readers.paced_engine import PacedEngine
from streamd.readers.probe import AUTO, choose_engine
from streamd.readers.reader import PIECE_BYTES, Reader

log = logging.getLogger(__name__)

# Reads in flight at the most: 1.6 MB each, it is what a drive far away may need.
DEFAULT_DEPTH = 64


def make_reader(
    files: list[OpenFile],
    experts: ExpertIndex,
    align_bytes: int,
    config: StreamdConfig,
    stack: ExitStack,
) -> Reader:
    """With the engine that bench-io found best for such reads of the drive, at its depth at first.

    Both can be said otherwise: --io, and --io-depth, which is never exceeded. `stack` closes it.
    Raises ConfigError for an engine that is asked for and does not work.
    """
    best = load_best(reads_of(files[0].path, experts), DEPTH_MAX)
    name, depth = config.io.engine, config.io_depth or DEFAULT_DEPTH
    start_bytes = START_LIMIT_BYTES
    if best is not None:
        name = best.engine if name == AUTO else name
        depth = config.io_depth or max(depth, best.depth)
        start_bytes = start_limit_bytes(best.depth, experts)
        log.info("bench-io found %s at depth %d best for this drive", best.engine, best.depth)
    try:
        engine, report = choose_engine(name, depth)
    except ConfigError:
        if config.io.engine != AUTO:
            raise
        engine, report = choose_engine(AUTO, depth)  # what was best once does not work any more
    for line in report:
        log.info("%s", line)
    if config.io.paced_bytes_per_s is not None:
        engine = PacedEngine(engine, config.io.paced_bytes_per_s)
        log.warning("I/O is %s: for benchmarks", engine.name)
    controller = DepthController(start_bytes)
    reader = Reader(engine, files, depth, align_bytes=align_bytes, controller=controller)
    stack.callback(reader.close)
    return reader


def start_limit_bytes(depth: int, experts: ExpertIndex) -> int:
    """So much that `depth` reads of the model's largest parts are in flight."""
    wanted_bytes = depth * min(largest_part_bytes(experts), PIECE_BYTES)
    return min(max(wanted_bytes, MIN_LIMIT_BYTES), MAX_LIMIT_BYTES)
