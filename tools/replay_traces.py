"""Routing traces as groups of expert lookups.

A group is what one layer needs at once: the union of a prefill layer's experts, or the top-k of one
decode step in one layer. A key is `layer * n_experts + expert`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Trace:
    """groups: (is_decode, keys) in order; key_bytes: int64 [n_layers * n_experts]."""

    name: str
    n_layers: int
    n_experts: int
    key_bytes: npt.NDArray[np.int64]
    groups: tuple[tuple[bool, tuple[int, ...]], ...]

    @property
    def lookup_count(self) -> int:
        return sum(len(keys) for _, keys in self.groups)


def load_trace(path: Path, token_count: int = 0) -> Trace:
    """By its form: .route.csv, a fingerprint .npz, or a .npz that `streamd --trace` wrote.

    token_count: of a .npz, only so many tokens from its start; 0 for all.
    """
    if path.suffix == ".csv":
        return _load_route_csv(path)
    with np.load(path) as arrays:
        if "experts" in arrays:
            return _load_fingerprints(path.stem, arrays["experts"], token_count)
    raise SystemExit(f"{path} is no routing trace: give a .route.csv or a .npz with 'experts'")


def _load_route_csv(path: Path) -> Trace:
    """Header lines `# layer=L expert_bytes=B`, then turn, phase, step, layer, slot, expert, ..."""
    n_layers = n_experts = 0
    layer_bytes: dict[int, int] = {}
    groups: dict[tuple[int, ...], dict[int, None]] = {}
    with path.open() as lines:
        for line in lines:
            if line.startswith("#"):
                words = dict(word.split("=", 1) for word in line.split() if "=" in word)
                n_layers = int(words.get("n_layer", n_layers))
                n_experts = int(words.get("n_expert", n_experts))
                if "layer" in words:
                    layer_bytes[int(words["layer"])] = int(words["expert_bytes"])
                continue
            cells = line.split(",")
            if not cells[0].strip().isdigit():
                continue
            turn, phase, step, layer, _, expert = (int(cell) for cell in cells[:6])
            # All tokens of a prefill layer are one group, each decode step one of its own.
            group = (turn, phase, step if phase else -1, layer)
            groups.setdefault(group, {})[layer * n_experts + expert] = None
    key_bytes = np.repeat([layer_bytes[layer] for layer in range(n_layers)], n_experts)
    ordered = tuple((group[1] == 1, tuple(keys)) for group, keys in groups.items())
    return Trace(path.name, n_layers, n_experts, key_bytes.astype(np.int64), ordered)


def _load_fingerprints(name: str, experts: npt.NDArray[np.integer], token_count: int) -> Trace:
    """uint8 [tokens, layers, top_k]; every token is a decode step."""
    experts = experts[: token_count or None]
    _, n_layers, _ = experts.shape
    n_experts = int(experts.max()) + 1
    keys = experts.astype(np.int64) + np.arange(n_layers)[None, :, None] * n_experts
    ordered = tuple((True, tuple(group)) for group in _rows(keys))
    return Trace(name, n_layers, n_experts, np.ones(n_layers * n_experts, np.int64), ordered)


def _rows(keys: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    yield from keys.reshape(-1, keys.shape[-1]).tolist()
