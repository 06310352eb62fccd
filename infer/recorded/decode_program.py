"""Decoding on a CPU: the fixed work of a token as recorded jobs, each stage from router to router.

    stage   | embedding, attention, router 0 | shared expert 0, experts 0 | sum, attention, ...
    Python                                   | look up ids, set addresses

Of a small model's token most would be Python between the kernels otherwise: it has 150 to 200 jobs.
Experts that are missing are computed as they come, by the kernels themselves. All of it has the
same bits as `Model.forward`, whose kernels are recorded. What a GPU does: decode_graphs.py.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.blocks.attention import GqaAttention
from infer.blocks.moe import MoeFfn
from infer.caches.kv_cache import KvCache
from infer.daemon.client import SlotClient
from infer.daemon.sections import MAX_REVOCATIONS, Section
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.interface import ExpertBatch
from infer.kernels.program import Program, Recorder
from infer.model import Model
from infer.profiling import part_names
from shared.errors import ClientRevoked


@dataclass
class _Stage:
    """Jobs `first` up to `routed` end with a router's choice; then come the shared expert and, from
    `experts` up to `end`, the others. gate_up, down: where the jobs have their addresses."""

    moe: MoeFfn
    layer: int
    first: int
    routed: int
    experts: int
    end: int
    normed: Tensor
    logits: Tensor
    ids: npt.NDArray[np.int32]
    rows: Tensor
    gate_up: npt.NDArray[np.int64]
    down: npt.NDArray[np.int64]


def can_record(model: Model, kv: object) -> bool:
    """Whether a step of this model is made of jobs that can be recorded."""
    attentions = (layer.attention for layer in model.layers)
    return (
        isinstance(kv, KvCache)
        and kv.keys.dtype is torch.float16
        and all(isinstance(attention, GqaAttention) for attention in attentions)
    )


class DecodeProgram:
    """One token at a time, behind what `kv` holds, in the default arithmetic.

    Recorded at the first token; a step allocates nothing but its logits.
    """

    def __init__(self, model: Model, kernels: GgmlKernels, client: SlotClient, kv: KvCache) -> None:
        self._model, self._kernels, self._client, self._kv = model, kernels, client, kv
        self._token = torch.zeros(1, dtype=torch.int64)
        self._stages: list[_Stage] = []
        self._program: Program | None = None
        self._missed = True  # an expert, in the last token

    @property
    def spent_s(self) -> dict[str, float]:
        """What the jobs took until now, by part."""
        return self._program.spent_s if self._program else {}

    def decode(self, token: int) -> npt.NDArray[np.float32]:
        """The logits [vocab] after one more token, which must fit the cache; `kv` is advanced.

        Raises what kept an expert from coming; `kv` is as before then.
        """
        program = self._program or self._record()
        position = self._kv.length
        for _ in range(MAX_REVOCATIONS):
            try:
                self._run(program, token, position)
                self._kv.length = position + 1
                return self._logits.numpy()[0].copy()
            except ClientRevoked:
                self._client.attach_again()
            finally:
                self._client.leave()
        raise self._client.given_up()

    def _run(self, program: Program, token: int, position: int) -> None:
        self._token[0] = token
        program.move_to(position)
        foresight, missed = self._model.foresight, False
        # Where nothing was missing in the last token, guesses cost and bring nothing.
        looks = foresight is not None and (self._missed or foresight.sees_hits)
        for stage in self._stages:
            program.run(stage.first, stage.routed)
            section = self._client.begin(stage.layer, stage.ids, 1)
            if foresight is not None and (looks or len(section.missing)):
                foresight.look(stage.layer, self._x, stage.logits, stage.ids[np.newaxis])
            if len(section.missing):
                missed = True
                program.run(stage.routed, stage.experts)
                self._compute_as_they_come(stage, section)
            else:
                gate, up, down = self._client.addresses(section, section.present).T
                stage.gate_up[: len(gate)], stage.gate_up[len(gate) :] = gate, up
                stage.down[:] = down
                program.run(stage.routed, stage.end)
            self._client.check_revoked()
        program.run(self._last_first, self._last_end)
        self._missed = missed

    def _compute_as_they_come(self, stage: _Stage, section: Section) -> None:
        if len(section.present):
            self._compute(stage, section, section.present)
        while len(section.missing):
            self._compute(stage, section, self._client.wait_some(section))

    def _compute(self, stage: _Stage, section: Section, places: npt.NDArray[np.intp]) -> None:
        addresses = np.ascontiguousarray(self._client.addresses(section, places).T)
        batch = _batch(stage.moe, places.astype(np.int32), addresses)
        self._kernels.experts(stage.normed, batch, stage.rows)

    # Recording

    def _record(self) -> Program:
        """As `Model.forward` and the blocks compute it; sums are made in place."""
        kernels, model, eps = self._kernels, self._model, self._model.shape.eps
        with torch.inference_mode(), kernels.recorded() as recorder:
            self._stages.clear()
            cache = _RecordedCache(self._kv, recorder)
            first = 0
            recorder.part = part_names.EMBEDDING
            self._x = x = kernels.embed(model.embedding, self._token)
            for number, layer in enumerate(model.layers):
                recorder.part = part_names.NORMS
                normed = kernels.rms_norm(x, layer.attention_norm, eps)
                recorder.part = part_names.ATTENTION
                attended = layer.attention.forward(normed, number, cache, 0, False)
                recorder.part = part_names.NORMS
                kernels.add(x, attended)
                normed = kernels.rms_norm(x, layer.ffn_norm, eps)
                if isinstance(layer.ffn, MoeFfn):
                    fed = self._record_experts(recorder, number, layer.ffn, normed, first)
                    first = self._stages[-1].end
                else:
                    recorder.part = part_names.DENSE
                    fed = layer.ffn.forward(normed, False)
                recorder.part = part_names.NORMS
                kernels.add(x, fed)
            normed = kernels.rms_norm(x, model.output_norm, eps)
            recorder.part = part_names.HEAD
            (self._logits,) = kernels.linear(normed, model.output)
        self._last_first, self._last_end = first, recorder.count
        self._program = recorder.program()
        return self._program

    def _record_experts(
        self, recorder: Recorder, number: int, moe: MoeFfn, normed: Tensor, first: int
    ) -> Tensor:
        """A stage's end; the sum that is returned begins the next one."""
        kernels, routing = self._kernels, moe.routing
        recorder.part = part_names.ROUTER
        (logits,) = kernels.linear(normed, moe.router, exact=True)
        ids, weights = kernels.route_sigmoid(logits, moe.bias, routing.top_k, routing.scale)
        routed = recorder.count
        recorder.part = part_names.SHARED
        shared = moe.shared.forward(normed, False) if moe.shared else None
        experts = recorder.count
        recorder.part = part_names.EXPERTS
        rows = torch.empty((1, routing.top_k, normed.shape[1]))
        addresses = np.zeros((3, routing.top_k), np.int64)
        kernels.experts(
            normed, _batch(moe, np.arange(routing.top_k, dtype=np.int32), addresses), rows
        )
        end = recorder.count
        products = recorder.weights_of(-2), recorder.weights_of(-1)
        assert [len(weights) for weights in products] == [2 * routing.top_k, routing.top_k]
        places = (first, routed, experts, end)
        self._stages.append(
            _Stage(moe, number, *places, normed, logits, ids.numpy()[0], rows, *products)
        )
        return kernels.weighted_sum(rows, weights, shared)


class _RecordedCache:
    """What attention sees of the cache while it is recorded."""

    def __init__(self, kv: KvCache, recorder: Recorder) -> None:
        self.keys, self.values = kv.keys, kv.values
        self._recorder = recorder

    def store(self, layer: int, _start: int, keys: Tensor, values: Tensor) -> None:
        self._recorder.store(keys, self.keys[layer])
        self._recorder.store(values, self.values[layer])


def _batch(
    moe: MoeFfn, ranks: npt.NDArray[np.int32], addresses: npt.NDArray[np.int64]
) -> ExpertBatch:
    """One token with the experts of some ranks; addresses [3, ranks]."""
    return ExpertBatch(moe.format, ranks, np.arange(len(ranks) + 1, dtype=np.int32), *addresses)
