"""Experts of one token that the CPU computes for a GPU, straight from the daemon's host slots.

For that the client of a GPU is a client of the host tier too. What the CPU reads it reads in a
section there, which waits for reads into host slots and nothing else. If the daemon has given up on
that client meanwhile, the rows are no good: what they were for is fetched, as without the lane.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.ahead.prefetch_trial import Trial
from infer.daemon.client import SlotClient
from infer.daemon.sections import Section
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.lane.policy import Integers, LanePolicy, Split
from shared.errors import ClientRevoked, DaemonBusy, PlanError

log = logging.getLogger(__name__)

NOTHING = Split(*(np.empty(0, np.intp) for _ in range(3)))


class ExpertKernels(Protocol):
    """Of infer.kernels.ggml_cpu.GgmlKernels."""

    def rouse(self) -> None: ...

    def experts(
        self, x: Tensor, batch: ExpertBatch, out: Tensor, exact: bool = False
    ) -> Tensor: ...


@dataclass
class LaneCounters:
    """computed: experts, `computed_bytes` of slabs, in compute_s of the CPU's work; fetched: those
    that were missing too while the lane was on; discarded: computed in vain."""

    computed: int = 0
    computed_bytes: int = 0
    compute_s: float = 0.0
    fetched: int = 0
    discarded: int = 0


class ComputeLane:
    """host: attached to the host tier, and closed with this. trial: None where it is always on.

    x float32 [1, width]: the input, which the GPU writes; rows float32 [1, top_k, width]: results.
    Both are pinned where there is a GPU. row_addresses int64 [top_k]: where each row lies.
    """

    def __init__(
        self,
        host: SlotClient,
        kernels: ExpertKernels,
        width: int,
        trial: Trial | None,
        pinned: bool,
    ) -> None:
        self.host = host
        self._kernels = kernels
        self._trial = trial
        self._is_lost = False
        experts = host.experts
        self.x = torch.zeros((1, width))
        self.rows = torch.zeros((1, experts.top_k, width))
        if pinned:
            self.x, self.rows = self.x.pin_memory(), self.rows.pin_memory()
        starts = np.arange(experts.top_k, dtype=np.int64) * 4 * width
        self.row_addresses: npt.NDArray[np.int64] = self.rows.data_ptr() + starts
        self._slab_bytes = [c.slab_bytes for c in experts.classes]
        self._policies = [LanePolicy(size_bytes) for size_bytes in self._slab_bytes]
        self._class_of_layer = experts.layer_class.tolist()
        self._group_start = np.arange(experts.top_k + 1, dtype=np.int32)
        self._section: Section | None = None
        self.counters = LaneCounters()

    @property
    def is_on(self) -> bool:
        """Whether the next token's experts may be computed here."""
        return not self._is_lost and (self._trial is None or self._trial.on)

    def token_done(self, token_s: float) -> None:
        """A token has been decoded, on or off as `is_on` said."""
        if self._trial is not None:
            self._trial.token_done(token_s)

    def policy(self, layer: int) -> LanePolicy:
        return self._policies[self._class_of_layer[layer]]

    # One layer of a token: split, compute, leave

    def split(self, layer: int, experts: Integers, uses: Integers) -> Split:
        """Who brings each of the experts that the GPU lacks; uses: how hot each is.

        What is to be computed is asked for, and stays where it is until `leave`.
        """
        self._kernels.rouse()
        host, policy = self.host, self.policy(layer)
        host.enter()
        in_host = ~host.absent(layer, experts)
        split = policy.split(in_host, uses)
        self.counters.fetched += len(experts) - len(split.computed)
        if len(split.computed):
            self._section = host.want(layer, experts[split.computed], 1)
        else:
            policy.not_computed()
            host.leave()
        return split

    def compute(self, shape: ExpertFormat, ranks: Integers, meanwhile: Callable[[], None]) -> bool:
        """Rows `ranks` become what the experts to be computed, in the split's order, make of x;
        False if they are no good. `meanwhile()` comes before anything is waited for.

        Raises what kept an expert from coming, as SlotClient.read does."""
        host, section, counters = self.host, self._section, self.counters
        assert section is not None
        try:
            if len(section.present):
                self.policy(section.layer).started(time.perf_counter() - section.asked_s)
                self._multiply(shape, section, section.present, ranks)
            meanwhile()
            self._multiply_as_they_come(shape, section, ranks)
            host.check_revoked()
        except ClientRevoked:
            counters.discarded += len(ranks)
            self._attach_again()
            return False
        finally:
            self.leave()
        counters.computed += len(ranks)
        counters.computed_bytes += (
            len(ranks) * self._slab_bytes[self._class_of_layer[section.layer]]
        )
        return True

    def _multiply_as_they_come(
        self, shape: ExpertFormat, section: Section, ranks: Integers
    ) -> None:
        host, waits = self.host, self.host.waits
        read_count = len(section.missing)
        at_once = True
        while len(section.missing):
            waited_s = waits.waited_s
            arrived = host.wait_some(section)
            at_once = waits.waited_s == waited_s
            seconds = time.perf_counter() - section.asked_s
            self._multiply(shape, section, arrived, ranks)
        if read_count:
            disk = self.policy(section.layer).disk
            (disk.note_at_most if at_once else disk.note)(read_count, seconds)

    def _multiply(
        self,
        shape: ExpertFormat,
        section: Section,
        places: npt.NDArray[np.intp],
        ranks: Integers,
    ) -> None:
        gate, up, down = np.ascontiguousarray(self.host.addresses(section, places).T)
        starts = self._group_start[: len(places) + 1]
        batch = ExpertBatch(shape, ranks[places].astype(np.int32), starts, gate, up, down)
        started_s = time.perf_counter()
        self._kernels.experts(self.x, batch, self.rows)
        spent_s = time.perf_counter() - started_s
        self.counters.compute_s += spent_s
        self.policy(section.layer).compute.note(len(places), spent_s)

    def leave(self) -> None:
        """The CPU reads nothing any more; without a section it does nothing."""
        self._section = None
        self.host.leave()

    def _attach_again(self) -> None:
        """Raises DaemonLost; where there is no more room for this client, go on without it."""
        try:
            self.host.attach_again()
        except (DaemonBusy, PlanError) as error:
            log.warning("the CPU computes no experts any more: %s", error)
            self._is_lost = True

    # Looking

    def values(self, before: LaneCounters | None = None) -> dict[str, Any]:
        """For statistics: the counters' growth, and what the policy has come to."""
        earlier = asdict(before or LaneCounters())
        grown = {name: value - earlier[name] for name, value in asdict(self.counters).items()}
        policies = [policy.values_ms() for policy in self._policies]
        return {**grown, "is_on": self.is_on, "policies": policies}

    def describe(self, before: LaneCounters | None = None) -> str:
        """A line for people."""
        values = self.values(before)
        computed, compute_s = values["computed"], values["compute_s"]
        state = "on" if self.is_on else "off"
        text = f"{state}; {computed} experts computed by the CPU, {values['fetched']} fetched"
        if not computed:
            return text
        gb_s = values["computed_bytes"] / compute_s / 1e9
        return f"{text}; {1e3 * compute_s / computed:.3f} ms each, {gb_s:.1f} GB/s"

    def close(self) -> None:
        self.host.close()
