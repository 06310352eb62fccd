"""A vocabulary small enough to write expectations by hand, and models without a daemon."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from infer.engine import kernel_bounds
from infer.families import Parts, family_of
from infer.resident.weights import Weights
from infer.text.bpe import BYTE_ALPHABET
from infer.text.tokenizer import Tokenizer
from infer.text.vocabulary import TokenType
from shared.experts import ExpertIndex, resident_tensors
from shared.mtp import open_served
from shared.resident import resident_layout


def _metadata(merges=("a b", "ab c"), extra=(), pre="gpt-2", **keys) -> dict[str, Any]:
    """Token i is byte i; then come one token a merge, and `extra`: pairs of text and type."""
    merges = list(merges)
    tokens = [*BYTE_ALPHABET, *dict.fromkeys(m.replace(" ", "") for m in merges)]
    types = [TokenType.NORMAL] * len(tokens)
    tokens += [text for text, _ in extra]
    types += [kind for _, kind in extra]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="session")
def small_metadata() -> Callable[..., dict[str, Any]]:
    """Builds the metadata of 256 bytes, `ab` = 256, `abc` = 257, and what a test adds."""
    return _metadata


@pytest.fixture(scope="session")
def small_tokenizer() -> Callable[..., Tokenizer]:
    """Builds the tokenizer of such metadata."""
    return lambda **arguments: Tokenizer.from_metadata(_metadata(**arguments))


class LocalModel:
    """A model computed without a daemon: experts straight from the file, in waves of any width.

    What infer.generation's decoding and draft use of an Engine is there. mtp: as open_served takes
    it.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        path,
        kernels_of,
        wave_experts=10**6,
        context=64,
        chunk=64,
        exact=True,
        mtp="",
        mtp_indexer=False,
    ):
        self.index = open_served(path, mtp)
        self.experts = ExpertIndex.from_gguf(self.index)
        self._files = [np.fromfile(shard, np.uint8) for shard in self.index.paths]
        self._wave_experts = wave_experts
        self.read_counts: dict[int, int] = {}
        self.hinted: list[tuple[int, list[int], int]] = []
        self.exact, self.chunk, self.logits_chunk = exact, chunk, chunk
        family = family_of(self.index)
        self.shape = family.read_shape(self.index)
        bounds = kernel_bounds(self.index, self.experts, self.shape, chunk, context)
        layout = resident_layout(resident_tensors(self.index), 1)
        region = self._resident_region(layout)
        weights = self._weights(layout, region)
        kernels = kernels_of(bounds)
        parts = Parts(self.index, self.experts, weights, kernels, self, context, mtp_indexer)
        self.model = family.build(parts)
        self.kv = self.shape.cache.allocate(context, exact, self.device)
        self.mtp = family.build_mtp(parts) if mtp else None

    def _resident_region(self, layout) -> int:
        self._resident = np.zeros(layout.total_bytes, np.uint8)
        for placed in layout.tensors:
            tensor = placed.tensor
            file = self._files[tensor.file_index]
            source = file[tensor.offset : tensor.offset + tensor.byte_count]
            self._resident[placed.payload_offset : placed.payload_offset + len(source)] = source
        return self._resident.ctypes.data

    def _weights(self, layout, region) -> Weights:
        return Weights(self.index.paths[0], layout, region, self, self.device)

    def wave_experts(self, layer: int) -> int:
        return self._wave_experts

    def absent(self, layer, experts) -> np.ndarray:
        """As if those with odd numbers were not there."""
        return experts % 2 == 1

    def unread(self, layer, experts) -> np.ndarray:
        return self.absent(layer, experts)

    def hint(self, layer, experts, layers_ahead) -> None:
        self.hinted.append((layer, experts.tolist(), layers_ahead))

    def read(self, layer, experts, use_counts, compute, meanwhile) -> None:
        assert len(set(experts.tolist())) == len(experts) <= self._wave_experts
        self.read_counts[layer] = self.read_counts.get(layer, 0) + 1
        bases = [self._files[file].ctypes.data for file in self.experts.part_files[layer]]
        addresses = bases + self.experts.part_offsets[layer, experts]
        meanwhile()
        # In two parts, as when some have to be read.
        for places in np.array_split(np.arange(len(experts)), 2):
            compute(places, addresses[places])

    def check(self, ids) -> None:
        self.kv.make_room(len(ids))

    def redo_if_lost(self, compute):
        """There is no daemon to lose."""
        return compute()

    def extend(self, ids, tap=None) -> np.ndarray:
        return self.logits(ids, tap)[-1]

    def logits(self, ids, tap=None) -> np.ndarray:
        rows = []
        with torch.inference_mode():
            for first in range(0, len(ids), self.chunk):
                chunk = torch.tensor(ids[first : first + self.chunk], dtype=torch.int64)
                rows.append(self.model.forward(chunk, self.kv, self.exact, False, tap).numpy())
        return np.concatenate(rows)


@pytest.fixture(scope="session")
def local_model() -> type[LocalModel]:
    return LocalModel
