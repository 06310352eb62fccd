"""What a router has chosen and the GPU lacks: fetched, or computed by the CPU."""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from infer.blocks.moe import MoeFfn
from infer.daemon.client import SlotClient
from infer.daemon.sections import Section
from infer.lane.compute_lane import NOTHING, ComputeLane
from infer.lane.policy import Arrivals, Split
from infer.recorded.decode_memory import Mailboxes

# The last number of an expert in a mailbox: where its row lies, if the CPU has computed it.
ROW = 3

Ranks = npt.NDArray[np.intp]


class MissingExperts:
    def __init__(self, client: SlotClient, mailboxes: Mailboxes, lane: ComputeLane | None) -> None:
        self._client = client
        self._lane = lane
        top_k = client.experts.top_k
        self._every_rank = np.arange(top_k)
        self._ids = mailboxes.mail.numpy()[:, 1:].view(np.int32)[:, :top_k]
        self._addresses, self._hits = mailboxes.addresses.numpy(), mailboxes.hits.numpy()

    def bring(
        self,
        index: int,
        moe: MoeFfn,
        compute_hits: Callable[[], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Until all that router `index` has chosen is there, in the section that it has begun.

        The mailbox has the addresses of what came late and of computed rows then. `compute_hits`
        is called with those in the mailbox that were there; `meanwhile` before anything is waited
        for.
        """
        try:
            self._bring(index, moe, compute_hits, meanwhile)
        finally:
            if self._lane is not None:
                self._lane.leave()

    def _bring(
        self,
        index: int,
        moe: MoeFfn,
        compute_hits: Callable[[], None],
        meanwhile: Callable[[], None],
    ) -> None:
        client, target, hits = self._client, self._addresses[index], self._hits[index]
        ids = self._ids[index].copy()
        missing, split = self._split(moe.layer, ids)  # what the CPU reads is asked for first
        computed = missing[split.computed]
        ranks = np.delete(self._every_rank, computed) if len(computed) else self._every_rank
        section = client.ask(moe.layer, ids[ranks])
        hits[:] = 0
        if len(section.present):
            hits[:ROW, ranks[section.present]] = client.addresses(section, section.present).T
            compute_hits()
        target[:] = 0
        if len(computed):
            self._compute(moe, computed, ids[computed], section, target, meanwhile)
        else:
            meanwhile()
        self._wait(section, ranks, target, self._arrivals(section, ranks, missing, split))

    def _split(self, layer: int, ids: npt.NDArray[np.int32]) -> tuple[Ranks, Split]:
        """Ranks that the GPU lacks, and what of them is whose; none where there is no lane."""
        lane, client = self._lane, self._client
        if lane is None or not lane.is_on:
            return self._every_rank[:0], NOTHING
        missing = client.absent(layer, ids).nonzero()[0]
        wanted = ids[missing]
        return missing, lane.split(layer, wanted, client.mapping.area.uses[layer, wanted])

    def _compute(
        self,
        moe: MoeFfn,
        ranks: Ranks,
        ids: npt.NDArray[np.int32],
        section: Section,
        target: npt.NDArray[np.int64],
        meanwhile: Callable[[], None],
    ) -> None:
        """Rows `ranks`, while the fetched experts of `section` are on their way."""
        client, lane = self._client, self._lane
        assert lane is not None
        started_s, waited_s = time.perf_counter(), client.waits.waited_s
        if lane.compute(moe.format, ranks, meanwhile):
            target[ROW, ranks] = lane.row_addresses[ranks]
        else:
            late = client.ask(moe.layer, ids)
            present = late.present
            target[:ROW, ranks[present]] = client.addresses(late, present).T
            self._wait(late, ranks, target)
        still_missing = section.experts[section.missing]
        if len(still_missing) and client.absent(moe.layer, still_missing).any():
            waited_s = client.waits.waited_s - waited_s
            client.waits.overlapped_s += time.perf_counter() - started_s - waited_s

    def _wait(
        self,
        section: Section,
        ranks: Ranks,
        target: npt.NDArray[np.int64],
        arrivals: Arrivals | None = None,
    ) -> None:
        client = self._client
        while len(section.missing):
            waited_s = client.waits.waited_s
            arrived = client.wait_some(section)
            seconds = time.perf_counter() - section.asked_s
            target[:ROW, ranks[arrived]] = client.addresses(section, arrived).T
            if arrivals is not None:
                at_once = client.waits.waited_s == waited_s
                arrivals.note(set(arrived.tolist()), seconds, at_once)

    def _arrivals(
        self, section: Section, ranks: Ranks, missing: Ranks, split: Split
    ) -> Arrivals | None:
        """Of the fetched, by place in the section."""
        if self._lane is None or not len(missing):
            return None
        from_host = set(missing[split.uploaded].tolist())
        places = set(section.missing.tolist())
        uploaded = {place for place in places if int(ranks[place]) in from_host}
        return Arrivals(self._lane.policy(section.layer), uploaded, places - uploaded)
