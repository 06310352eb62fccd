"""Decoding on a GPU: the fixed work of a token as CUDA graphs, each from one router to the next.

    GPU   | embedding, attention, router 0 | shared expert 0 |    | experts 0, attention, router 1 |
    host                                   | look up ids, write addresses |

The host waits for nothing but the router's ids. They reach it, and the addresses of the experts
reach the GPU, through pinned memory; so does what a compute lane works on, and comes to. When
the ids of the next router are there, the GPU is done with the slots read before: it works in order.
So that is where a section of the slots ends.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from infer.blocks.attention import StepPlace
from infer.blocks.moe import MoeFfn
from infer.caches.cache import Cache
from infer.daemon.client import SlotClient
from infer.daemon.sections import MAX_REVOCATIONS
from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.cuda.rows import Mailbox, Sum
from infer.lane.compute_lane import ComputeLane
from infer.model import Layer, Model
from infer.profiling import part_names
from infer.recorded.decode_memory import Mailboxes, StepBuffers
from infer.recorded.missing_experts import ROW, MissingExperts
from infer.recorded.router_answers import RouterAnswers
from infer.recorded.stretches import stretches
from shared.errors import ClientRevoked, GpuError

IDS_DEADLINE_S = 60.0
# Attention that reads all of a span is recorded again for the double when the text has outgrown it.
LEAST_SPAN = 1024


@dataclass
class StepTimes:
    """Where the host's time went, seconds, over all tokens."""

    graphs_s: float = 0.0  # launching
    gpu_s: float = 0.0  # waiting for the router's ids and looking them up; waiting for logits
    misses_s: float = 0.0  # asking and waiting for experts that were not there
    token_count: int = 0


@dataclass
class _Stage:
    """A graph that ends with the router of `moe`, or with logits; and what only hits need."""

    run: torch.cuda.CUDAGraph
    moe: MoeFfn | None
    layer: int = -1  # of the model
    hits: torch.cuda.CUDAGraph | None = None


class DecodeGraphs:
    """One token at a time, behind what `kv` holds. The bits are those of `Model.forward`.

    Graphs are recorded at the first token, and where attention depends on how much there is to read
    each time that doubles. Everything is reserved by then; a step allocates nothing.
    """

    def __init__(
        self,
        model: Model,
        kernels: CudaKernels,
        client: SlotClient,
        kv: Cache,
        exact: bool,
        lane: ComputeLane | None = None,
    ) -> None:
        self._model, self._kernels, self._client, self._lane = model, kernels, client, lane
        self._kv, self._exact = kv, exact
        self._moes = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeFfn)]
        top_k = client.experts.top_k
        self._buffers = StepBuffers.build(
            model.shape.width,
            client.experts.n_experts,
            top_k,
            model.shape.vocab_size,
            kernels.device,
        )
        self._pinned = Mailboxes(len(self._moes), top_k, model.shape.vocab_size)
        layers = [moe.layer for moe in self._moes]
        self._answers = RouterAnswers(client, self._pinned, layers)
        self._missing = MissingExperts(client, self._pinned, lane)
        self._ids = self._pinned.mail.numpy()[:, 1:].view(np.int32)[:, :top_k]
        self._control = self._pinned.control.numpy()
        self._stages: list[_Stage] = []
        self._reads_span = any(layer.attention.reads_span for layer in model.layers)
        self._span = 0  # positions that the graphs are recorded for
        self._step = 0
        self._missed = True  # an expert, in the last token
        self.times = StepTimes()

    @property
    def spent_s(self) -> dict[str, float]:
        """What the host spent on steps until now, by part."""
        return {part_names.LAUNCHES: self.times.graphs_s, part_names.GPU: self.times.gpu_s}

    def decode(self, token: int) -> npt.NDArray[np.float32]:
        """The logits [vocab] after one more token, which must fit the cache; `kv` is advanced.

        Raises what kept an expert from coming; `kv` is as before then.
        """
        position = self._kv.length
        for _ in range(MAX_REVOCATIONS):
            started_s = time.perf_counter()
            try:
                self._run(token, position)
                if self._lane is not None:
                    self._lane.token_done(time.perf_counter() - started_s)
                self._kv.length = position + 1
                self.times.token_count += 1
                return self._pinned.logits.numpy().copy()
            except ClientRevoked:
                pass  # what stopped us for too long may have cost us the slots: once more
            finally:
                self._end_section()
            self._client.attach_again()
        raise self._client.given_up()

    def _end_section(self) -> None:
        """Slots may be reused from here on: whatever happened, the GPU must be done with them."""
        try:
            self._stream().synchronize()
        finally:
            self._client.leave()

    def _run(self, token: int, position: int) -> None:
        times, clock = self.times, time.perf_counter
        if not self._stages or position >= self._span:
            self._control[:] = token, position, 0
            self._record_all(position)
        self._step += 1
        self._control[:] = token, position, self._step
        self._answers.begin_step(self._step)
        foresight, missed = self._model.foresight, False
        # Where nothing was missing in the last token, guesses cost and bring nothing.
        looks = foresight is not None and (self._missed or foresight.sees_hits)
        for index, stage in enumerate(self._stages):
            started_s = clock()
            self._launch(stage)
            launched_s = clock()
            times.graphs_s += launched_s - started_s
            if stage.moe is None:
                self._pinned.logits.copy_(self._buffers.logits[0], non_blocking=True)
                self._stream().synchronize()
                times.gpu_s += clock() - launched_s
                self._client.check_revoked()
                self._missed = missed
                return
            missing_count = self._answer(index)
            times.gpu_s += clock() - launched_s
            missed |= missing_count > 0
            if missing_count:
                started_s = clock()
                assert stage.moe is not None
                assert stage.hits is not None
                look = partial(self._look, index, stage)
                self._missing.bring(index, stage.moe, stage.hits.replay, look)
                times.misses_s += clock() - started_s
            elif looks:
                self._look(index, stage)

    def _launch(self, stage: _Stage) -> None:
        turns = self._model.turns
        turns.enter(stage.layer)
        stage.run.replay()
        turns.leave(stage.layer)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._kernels.device)

    def _answer(self, index: int) -> int:
        """Addresses for the next graph; -> how many experts are missing."""
        deadline_s = time.monotonic() + IDS_DEADLINE_S
        idle = False
        while (missing_count := self._answers.answer(index)) is None:
            if idle or time.monotonic() > deadline_s:
                raise GpuError(
                    "the GPU has not answered the host in a step",
                    "see dmesg and nvidia-smi for what it does",
                )
            idle = self._stream().query()  # raises if the GPU has failed
        return missing_count

    def _look(self, index: int, stage: _Stage) -> None:
        if self._model.foresight is not None:
            buffers, ids = self._buffers, self._ids[index, np.newaxis]
            self._model.foresight.look(stage.layer, buffers.x, buffers.scores, ids)

    # Recording

    def _record_all(self, position: int) -> None:
        """For steps up to a position, and more where a longer span costs nothing."""
        context = self._kv.context
        span = max(LEAST_SPAN, 1 << position.bit_length()) if self._reads_span else context
        self._span, self._stages = min(span, context), []  # none, should recording be broken off
        torch.cuda.empty_cache()  # the allocator lets go of nothing while a graph is recorded
        pool = torch.cuda.graph_pool_handle()
        moes = iter(enumerate(self._moes))
        before: int | None = None
        stages: list[_Stage] = []
        for layers in stretches(self._model.layers):
            ends = isinstance(layers[-1][1].ffn, MoeFfn) if layers else False
            index, moe = next(moes) if ends else (None, None)
            number = layers[-1][0] if ends else -1
            self._model.turns.enter(number)
            run = self._record(lambda b=before, e=index, s=layers: self._stage(b, s, e), pool)
            self._model.turns.leave(number)
            hits = self._record(lambda e=index: self._experts(e, hits=True), pool) if ends else None
            stages.append(_Stage(run, moe, number, hits))
            before = index
        self._stages = stages

    def _record(self, work: Callable[[], None], pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Run once, which compiles what is not yet compiled, then record. Addresses are all 0."""
        work()
        torch.cuda.synchronize(self._kernels.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self._kernels.device)):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def _stage(
        self, before: int | None, layers: Sequence[tuple[int, Layer]], ends: int | None
    ) -> None:
        """Experts of router `before`, layers, router `ends`; or the first things, or the last."""
        kernels, buffers, model, exact = self._kernels, self._buffers, self._model, self._exact
        x, normed, eps = buffers.x, buffers.normed, model.shape.eps
        place = StepPlace(buffers.position, self._span)
        if before is None:
            kernels.take(self._pinned.control, buffers.control)
            kernels.embed(model.embedding, buffers.token, out=x)
            pending = Sum()
        else:
            self._experts(before, hits=False)
            shared = buffers.shared if self._moes[before].shared else None
            pending = Sum(buffers.rows, buffers.weights, shared)
        for number, layer in layers:
            kernels.add_norm(x, pending, layer.attention_norm, eps, normed, not exact)
            attended = layer.attention.step(normed, number, self._kv, place, exact)
            kernels.add_norm(x, Sum(plain=attended), layer.ffn_norm, eps, normed, not exact)
            if not isinstance(layer.ffn, MoeFfn):
                fed = kernels.swiglu(normed, *layer.ffn.matrices, exact=exact, quantised=True)
                pending = Sum(plain=fed)
        if ends is not None:
            self._route(ends)
            return
        kernels.add_norm(x, pending, model.output_norm, eps, normed, not exact)
        kernels.linear(normed, model.output, exact, [buffers.logits], quantised=True)

    def _route(self, index: int) -> None:
        """The router's ids to the host, then what does not wait for the answer."""
        kernels, buffers, moe = self._kernels, self._buffers, self._moes[index]
        kernels.linear(buffers.normed, moe.router, True, [buffers.scores])
        if self._lane is not None:
            kernels.give(buffers.normed, self._lane.x)
        mailbox = Mailbox(self._pinned.mail[index], buffers.step)
        chosen = (buffers.ids, buffers.weights)
        routing = moe.routing
        kernels.route_sigmoid(
            buffers.scores, moe.bias, routing.top_k, routing.scale, chosen, mailbox
        )
        if moe.shared is not None:
            matrices = moe.shared.matrices
            kernels.swiglu(
                buffers.normed, *matrices, exact=self._exact, quantised=True, out=buffers.shared
            )

    def _experts(self, index: int, hits: bool) -> None:
        buffers, pinned = self._buffers, self._pinned
        self._kernels.take((pinned.hits if hits else pinned.addresses)[index], buffers.addresses)
        if self._lane is not None and not hits:
            self._kernels.take_rows(buffers.addresses[ROW], buffers.rows)
        self._kernels.experts_at(
            buffers.normed,
            self._moes[index].format,
            buffers.addresses[:ROW],
            buffers.rows,
            self._exact,
            quantised=True,
        )
