"""The engine: one model, one sequence. Prompt in, logits out, a token at a time or in chunks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from infer.ahead.predict import Predictor
from infer.ahead.prefetch import Prefetch
from infer.blocks.moe import MoeFfn, Tap
from infer.chunks import (
    MIN_CHUNK,
    activation_bytes,
    choose_chunk,
    chunk_within,
    free_memory_bytes,
    logits_chunk,
)
from infer.config import AUTO_PREFETCH, NO_PREFETCH, ModelConfig
from infer.daemon.attachment import attach
from infer.daemon.lifeline import Lifeline
from infer.daemon.recovery import Recovery
from infer.families import Parts, family_of
from infer.families.parts import Instrument
from infer.gpu_memory import limit_memory, within_memory
from infer.kernels.choose import choose_kernels
from infer.kernels.scratch import KernelBounds
from infer.lane.hints import LaneHints
from infer.lane.open_lane import open_lane
from infer.model import ModelShape
from infer.resident.resident_weights import open_streamed, open_weights
from infer.uploads.client import UploadingClient
from shared.client_memory import DEFAULT_CONTEXT
from shared.errors import ConfigError, GpuError, RequestError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.sizes import mb

if TYPE_CHECKING:
    from infer.lane.compute_lane import ComputeLane
    from infer.recorded.decode_graphs import DecodeGraphs
    from infer.recorded.decode_program import DecodeProgram

T = TypeVar("T")


class Engine:
    """Attached to the daemon `name`, which serves the file of `index`.

    With a `recovery` it outlives that daemon: what is bound to the daemon's memory (`model`,
    `kernels`, `mtp`, `prefetch`, `lane`, `graphs`) is let go of when it has gone and built anew on
    the next one's, while `kv` stays, and the tokens under way are computed again.
    """

    def __init__(
        self,
        index: GgufIndex,
        name: str,
        config: ModelConfig,
        instrument: Instrument | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        self._index, self._name, self._config, self._instrument = index, name, config, instrument
        self.recovery = recovery
        self._family = family_of(index)
        self.shape = self._family.read_shape(index)
        self.exact = config.exact
        self.watcher: Tap | None = None  # sees the layers of whole prompts as they are computed
        context = _context(config.ctx, self.shape.context_length)
        self._experts = ExpertIndex.from_gguf(index)
        self.client = attach(name, index, self._experts, config)
        self.lane: ComputeLane | None = None
        self._lifeline = Lifeline(self.client, recovery, self._bind_again, self._unbind)
        try:
            self.device = torch.device(self.client.mapping.device)
            self.chunk = self._choose_chunk(config.chunk, context, self._experts.top_k)
            self.logits_chunk = config.chunk or logits_chunk(self.chunk, self.shape.vocab_size)
            self.kv = self.shape.cache.allocate(context, self.exact, self.device)
            self._bind()
        except BaseException:
            self.close()
            raise

    @property
    def has_own_slots(self) -> bool:
        """Whether slots in GPU memory are this process's, not the daemon's."""
        return isinstance(self.client, UploadingClient)

    def close(self) -> None:
        self._close_lane()
        self.client.close()

    def _bind(self) -> None:
        """Build what knows where the daemon's memory lies."""
        index, experts, config, context = self._index, self._experts, self._config, self.kv.context
        bounds = kernel_bounds(index, experts, self.shape, self.chunk, context)
        self.kernels = choose_kernels(bounds, config.threads or None, self.device)
        streamed = open_streamed(index, self.client.mapping, self.device)
        weights = open_weights(index, self.client.mapping, self.device, streamed)
        parts = Parts(
            index, experts, weights, self.kernels, self.client, context, config.mtp_indexer
        )
        parts = self._instrument(parts) if self._instrument else parts
        self.model = self._family.build(parts)
        self.model.turns = streamed or self.model.turns
        one = replace(kernel_bounds(index, experts, self.shape, 1, 1), latent=None)
        self.lane = open_lane(
            self._name, self.client, index, experts, self.model, one, config, self.device
        )
        self.prefetch = self._prefetch()
        self.model.prompt_foresight.guesses = config.prefetch != NO_PREFETCH
        self.graphs = self._decode_graphs()
        self.mtp = self._family.build_mtp(parts) if config.wanted_mtp else None
        limit_memory(self.device, self.chunk * activation_bytes(self.shape, experts.top_k))

    def _bind_again(self) -> None:
        if (device := torch.device(self.client.mapping.device)) != self.device:
            raise GpuError(
                f"the daemon has come back on {device}, not {self.device}",
                "start this again; a chat's past is kept unless --kv-sessions is off",
            )
        self._bind()

    def _unbind(self) -> None:
        """Drop what `_bind` has built; from any thread."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # makes its context this thread's too
        for name in ("model", "kernels", "prefetch", "graphs", "mtp"):
            self.__dict__.pop(name, None)
        self._close_lane()

    def _close_lane(self) -> None:
        """The daemon's host slots are let go of with it."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.close()

    def redo_if_lost(self, compute: Callable[[], T]) -> T:
        """See Lifeline and infer.gpu_memory; it is for whatever asks the daemon or computes with
        `model` or `mtp`."""
        return self._lifeline.redo_if_lost(partial(self._within_memory, compute))

    def _within_memory(self, compute: Callable[[], T]) -> T:
        strict = self.client.mapping.attached.client_limited
        return within_memory(self.device, strict, compute)

    def idle(self) -> AbstractContextManager[None]:
        """While nothing is computed."""
        return self._lifeline.idle()

    def _prefetch(self) -> Prefetch | None:
        """Reading ahead, which the model tells what it comes to."""
        experts, config = self._experts, self._config
        if config.prefetch == NO_PREFETCH:
            return None
        layers = self.model.layers
        numbers = [number for number, layer in enumerate(layers) if isinstance(layer.ffn, MoeFfn)]
        depth = None if config.prefetch == AUTO_PREFETCH else int(config.prefetch)
        sink = LaneHints(self.client, self.lane) if self.lane is not None else self.client
        prefetch = Prefetch(numbers, experts.n_experts, experts.top_k, sink, depth)
        self.model.foresight = Predictor(self.kernels, self.shape.eps, layers, prefetch)
        return prefetch

    def _choose_chunk(self, wanted: int | None, context: int, top_k: int) -> int:
        """ConfigError where the daemon's limit on a client's GPU memory does not hold it."""
        attached = self.client.mapping.attached
        cache_bytes = context * self.shape.cache.token_values * (4 if self.exact else 2)
        token_bytes = activation_bytes(self.shape, top_k)
        most = chunk_within(token_bytes, attached.client_bytes, cache_bytes, context)
        if attached.client_limited and most < min(wanted or MIN_CHUNK, context):
            raise ConfigError(
                f"a context of {context} tokens in chunks of {wanted or MIN_CHUNK} does not fit the"
                f" {mb(attached.client_bytes)} of GPU memory that --vram leaves a client",
                f"start the daemon with --ctx {context}, or give a smaller --ctx or --chunk",
            )
        if wanted or most >= MIN_CHUNK:
            return wanted or most
        free_bytes = max(0, free_memory_bytes(self.device) - cache_bytes)
        return choose_chunk(token_bytes, free_bytes, context)

    def _decode_graphs(self) -> "DecodeGraphs | DecodeProgram | None":
        """For a family whose attention can be recorded, and kernels that can."""
        if self.device.type == "cuda":
            if not self.model.recordable:
                return None
            from infer.recorded.decode_graphs import DecodeGraphs  # noqa: PLC0415 - of no use without a GPU

            return DecodeGraphs(
                self.model, self.kernels, self.client, self.kv, self.exact, self.lane
            )
        if self.exact or not hasattr(self.kernels, "recorded"):
            return None
        from infer.recorded.decode_program import DecodeProgram, can_record  # noqa: PLC0415 - needs ggml

        if not can_record(self.model, self.kv):
            return None
        return DecodeProgram(self.model, self.kernels, self.client, self.kv)

    def extend(self, ids: Sequence[int], tap: Tap | None = None) -> npt.NDArray[np.float32]:
        """Compute `ids` behind what the KV cache holds; the last one's logits [vocab].

        RequestError for ids that do not exist or do not fit the context; nothing has changed then.
        A tap sees layers of a chunk twice if their daemon is lost, the last hidden state once.
        """
        return self._run(ids, last_only=True, tap=tap)[-1][-1]

    def logits(self, ids: Sequence[int], tap: Tap | None = None) -> npt.NDArray[np.float32]:
        """As `extend`, with the logits of all of them: float32 [n, vocab]."""
        return np.concatenate(self._run(ids, last_only=False, tap=tap))

    def _run(
        self, ids: Sequence[int], last_only: bool, tap: Tap | None = None
    ) -> list[npt.NDArray[np.float32]]:
        self.check(ids)
        rows = []
        with torch.inference_mode(), self._expecting(len(ids)):
            size = self.chunk if last_only else self.logits_chunk
            for first in range(0, len(ids), size):
                part = ids[first : first + size]
                rows.append(self.redo_if_lost(partial(self._compute, part, last_only, tap)))
                self.client.count_tokens(len(part))
        return rows

    @contextmanager
    def _expecting(self, token_count: int) -> Iterator[None]:
        """What is read is for so many tokens, until it ends, however it does."""
        self.client.expect(token_count)
        try:
            yield
        finally:
            self.client.expect(1)

    def _compute(
        self, ids: Sequence[int], last_only: bool, tap: Tap | None
    ) -> npt.NDArray[np.float32]:
        if self.graphs is not None and len(ids) == 1 and tap is None:
            return self.graphs.decode(ids[0])[np.newaxis]
        chunk = torch.tensor(ids, dtype=torch.int64, device=self.device)
        watcher = self.watcher if len(ids) > 1 else None
        logits = self.model.forward(chunk, self.kv, self.exact, last_only, tap, watcher)
        return logits.cpu().numpy()

    def check(self, ids: Sequence[int]) -> None:
        """RequestError for ids that do not exist or do not fit the context."""
        if not ids:
            raise RequestError("there is no token to compute", "give at least one")
        for token in ids:
            if not 0 <= token < self.shape.vocab_size:
                raise RequestError(
                    f"token {token} is not in the vocabulary",
                    f"tokens are 0 to {self.shape.vocab_size - 1}",
                )
        self.kv.make_room(len(ids))


def kernel_bounds(
    index: GgufIndex, experts: ExpertIndex, shape: ModelShape, chunk: int, context: int
) -> KernelBounds:
    """The largest call the model makes: a whole chunk through its widest matrix."""
    expert_width = max(
        index.tensors[f"blk.{c.layers[0]}.ffn_gate_exps.weight"].shape[1] for c in experts.classes
    )
    tokens = min(chunk, context)
    return KernelBounds(
        tokens=tokens,
        columns=max(tensor.shape[0] for tensor in resident_tensors(index)),
        expert_columns=expert_width,
        pairs=tokens * experts.top_k,
        experts=experts.n_experts,
        heads=shape.heads,
        head_dim=shape.head_dim,
        context=context,
        latent=shape.latent,
    )


def _context(wanted: int, longest: int) -> int:
    if wanted > longest:
        raise ConfigError(
            f"--ctx {wanted} is more than the model's context of {longest}",
            f"give {longest} or less",
        )
    return wanted or min(longest, DEFAULT_CONTEXT)
