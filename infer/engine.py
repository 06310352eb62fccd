"""The engine: one model, one sequence. Prompt in, logits out, a token at a time or in chunks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from infer.attachment import attach
from infer.blocks.moe import Tap
from infer.config import DEFAULT_CONTEXT, ModelConfig
from infer.families import Parts, family_of
from infer.kernels.choose import choose_kernels
from infer.kernels.scratch import KernelBounds
from infer.kv_cache import KvCache
from infer.model import ModelShape
from infer.weights import Weights
from shared.errors import ConfigError, RequestError
from shared.experts import ExpertIndex, resident_tensors
from shared.gguf_index import GgufIndex
from shared.resident import gpu_resident_layout, resident_layout


class Engine:
    """Attached to the daemon `name`, which serves the file of `index`."""

    def __init__(self, index: GgufIndex, name: str, config: ModelConfig) -> None:
        family = family_of(index)
        self.shape = family.read_shape(index)
        self.exact = config.exact
        self._chunk = config.chunk
        context = _context(config.ctx, self.shape.context_length)
        experts = ExpertIndex.from_gguf(index)
        self.client = attach(name, index, experts, config.device)
        try:
            mapping = self.client.mapping
            self.device = torch.device(mapping.device)
            bounds = kernel_bounds(index, experts, self.shape, config.chunk, context)
            kernels = choose_kernels(bounds, config.threads or None, self.device)
            weights = self._weights(index)
            parts = Parts(index, experts, weights, kernels, self.client, context)
            self.model = family.build(parts)
            self.kv = KvCache(
                self.shape.n_layers,
                context,
                self.shape.kv_heads,
                self.shape.head_dim,
                self.exact,
                self.device,
            )
        except BaseException:
            self.client.close()
            raise

    def close(self) -> None:
        self.client.close()

    def _weights(self, index: GgufIndex) -> Weights:
        """The resident tensors where the daemon has put them."""
        mapping = self.client.mapping
        tensors = resident_tensors(index)
        if self.device.type == "cuda":
            layout = gpu_resident_layout(tensors)
        else:
            layout = resident_layout(tensors, mapping.attached.align)
        return Weights(index.paths[0], layout, mapping.resident_address, mapping, self.device)

    def extend(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute `ids` behind what the KV cache holds; the last one's logits [vocab].

        RequestError for ids that do not exist or do not fit the context; nothing has changed then.
        """
        return self._run(ids, last_only=True)[-1][-1]

    def logits(self, ids: Sequence[int], tap: Tap | None = None) -> npt.NDArray[np.float32]:
        """As `extend`, with the logits of all of them: float32 [n, vocab]."""
        return np.concatenate(self._run(ids, last_only=False, tap=tap))

    def _run(
        self, ids: Sequence[int], last_only: bool, tap: Tap | None = None
    ) -> list[npt.NDArray[np.float32]]:
        self._check(ids)
        rows = []
        with torch.inference_mode():
            for first in range(0, len(ids), self._chunk):
                part = ids[first : first + self._chunk]
                chunk = torch.tensor(part, dtype=torch.int64, device=self.device)
                logits = self.model.forward(chunk, self.kv, self.exact, last_only, tap)
                self.client.mapping.area.count_tokens(len(chunk))
                rows.append(logits.cpu().numpy())
        return rows

    def _check(self, ids: Sequence[int]) -> None:
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
    )


def _context(wanted: int, longest: int) -> int:
    if wanted > longest:
        raise ConfigError(
            f"--ctx {wanted} is more than the model's context of {longest}",
            f"give {longest} or less",
        )
    return wanted or min(longest, DEFAULT_CONTEXT)
