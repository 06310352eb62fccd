"""Where the time of a prompt and of tokens goes, by part of the model.

Nothing is measured until a profile is asked for: then methods of the engine's own objects are
replaced by timed ones, and put back afterwards. So it costs nothing while it is off. Recorded steps
(`DecodeProgram`, and `DecodeGraphs` on a GPU, where it is the host's time) count themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infer.blocks.moe import MoeFfn
from infer.engine import Engine
from infer.generation.decoding import Decoding
from infer.profiling.part_names import (
    AHEAD,
    ATTENTION,
    BETWEEN,
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LANE,
    NORMS,
    ROUTER,
    SAMPLING,
    SECTIONS,
    SHARED,
    WAITS,
)
from infer.profiling.parts_clock import PartsClock, nothing_queued

# Kernels that belong to one part; that of `linear` and `swiglu` follows from what they multiply by.
_KERNEL_PARTS = {
    "experts": EXPERTS,
    "weighted_sum": EXPERTS,
    "embed": EMBEDDING,
    "rms_norm": NORMS,
    "route_sigmoid": ROUTER,
    "rope": ATTENTION,
    "rope_pairs": ATTENTION,
    "attention": ATTENTION,
    "latent_attention": ATTENTION,
    "per_head": ATTENTION,
    "select": ATTENTION,
}

Parts = dict[str, float]  # seconds
# An object, the name of its method, and whose time the method's is.
Watched = tuple[Any, str, str | Callable[..., str]]


class StepProfile:
    """Of one engine: runs what it is given and says where the time went."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        moes = [layer.ffn for layer in engine.model.layers if isinstance(layer.ffn, MoeFfn)]
        self._routers = {id(moe.router) for moe in moes}
        self._shared = {moe.shared.matrices[0].address for moe in moes if moe.shared is not None}

    def prefill(self, work: Callable[[], None]) -> Parts:
        """On a GPU each kernel is waited for: together they take longer then than in one go."""
        on_gpu = self._engine.device.type == "cuda"
        clock = _clock(torch.cuda.synchronize if on_gpu else nothing_queued)
        return self._run(clock, work, [*self._waiting(), *self._computing()])

    def decode(self, work: Callable[[], None], decoding: Decoding) -> Parts:
        """work: `draw` and `take` of `decoding`, in turn."""
        engine, watched = self._engine, [*self._waiting(), (decoding, "draw", SAMPLING)]
        graphs = engine.graphs
        if graphs is None:
            return self._run(_clock(), work, [*watched, *self._computing()])
        client = engine.client
        watched += [(client, name, SECTIONS) for name in ("begin", "ask", "addresses")]
        watched += [(engine.kernels, "experts", EXPERTS)]  # those that came late
        if engine.lane is not None:
            lane = engine.lane
            watched += [(lane, "split", SECTIONS), (lane, "compute", LANE)]
            watched.append((lane.host, "wait_some", WAITS))
        before_s = graphs.spent_s
        parts = self._run(_clock(), work, watched)
        inside = {part: s - before_s.get(part, 0.0) for part, s in graphs.spent_s.items()}
        for part, spent_s in inside.items():
            parts[part] = parts.get(part, 0.0) + spent_s
        parts[BETWEEN] -= sum(inside.values())
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def _run(self, clock: PartsClock, work: Callable[[], None], watched: list[Watched]) -> Parts:
        client = self._engine.client
        methods = [
            (owner, name, clock.timed(part, getattr(owner, name))) for owner, name, part in watched
        ]
        methods.append((client, "read", _timed_read(clock, client.read)))
        with _replaced(methods):
            clock.restart()
            work()
            return clock.read()

    def _waiting(self) -> Iterator[Watched]:
        yield self._engine.client, "wait_some", WAITS
        if self._engine.model.foresight is not None:
            yield self._engine.model.foresight, "look", AHEAD

    def _computing(self) -> Iterator[Watched]:
        kernels = self._engine.kernels
        for name, part in _KERNEL_PARTS.items():
            yield kernels, name, part
        yield kernels, "linear", self._part_of_linear
        yield kernels, "swiglu", self._part_of_block

    def _part_of_linear(self, _x: Any, group: Any, *_: Any, **__: Any) -> str:
        if group is self._engine.model.output:
            return HEAD
        return ROUTER if id(group) in self._routers else ATTENTION

    def _part_of_block(self, _x: Any, gate: Any, *_: Any, **__: Any) -> str:
        return SHARED if gate.address in self._shared else DENSE


def _clock(settle: Callable[[], None] = nothing_queued) -> PartsClock:
    return PartsClock(BETWEEN, frozenset({AHEAD, SAMPLING}), settle)


@contextmanager
def _replaced(methods: list[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Each object has another method of this name; its class's again afterwards."""
    for owner, name, method in methods:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, _ in methods:
            delattr(owner, name)


def _timed_read(clock: PartsClock, read: Callable[..., None]) -> Callable[..., None]:
    """`SlotClient.read`; what is computed in a section is not the section's own time."""

    def run(layer: int, experts: Any, use_counts: Any, *work: Callable[..., Any]) -> None:
        read(layer, experts, use_counts, *(clock.timed(BETWEEN, function) for function in work))

    return clock.timed(SECTIONS, run)
