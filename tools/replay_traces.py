"""Routing traces as groups of expert lookups.

A group is what one layer needs at once: the union of a prefill layer's experts, or the top-k of one
decode step in one layer. A key is `layer * n_experts + expert`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError

DAEMON_TRACE = b'{"format": "streamd-trace"'

Group = tuple[bool, tuple[int, ...]]  # whether it is of decode, keys


@dataclass(frozen=True)
class Trace:
    """groups: (is_decode, keys) in order; key_bytes: int64 [n_layers * n_experts]."""

    name: str
    n_layers: int
    n_experts: int
    key_bytes: npt.NDArray[np.int64]
    groups: tuple[Group, ...]

    @property
    def lookup_count(self) -> int:
        return sum(len(keys) for _, keys in self.groups)

    def with_groups(self, groups: Iterable[Group]) -> "Trace":
        """The same experts, other lookups."""
        return replace(self, groups=tuple(groups))

    def by_layer(self) -> Iterator[tuple["Trace", int]]:
        """Each layer's lookups alone, in order, and its experts' bytes; keys stay what they are."""
        groups: list[list[Group]] = [[] for _ in range(self.n_layers)]
        for group in self.groups:
            groups[group[1][0] // self.n_experts].append(group)
        layer_bytes = self.key_bytes.reshape(self.n_layers, -1).sum(axis=1).tolist()
        for own, size_bytes in zip(groups, layer_bytes, strict=True):
            yield self.with_groups(own), size_bytes


def load_trace(path: Path, token_count: int = 0) -> Trace:
    """By its form: .route.csv, a fingerprint .npz, or what `streamd --trace` wrote.

    token_count: of a .npz, only so many tokens from its start; 0 for all. ConfigError for what is
    none of these.
    """
    try:
        trace = _load(path, token_count)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}", "give the path of a trace"
        ) from error
    except (ValueError, KeyError, IndexError, TypeError, BadZipFile) as error:
        raise _no_trace(path) from error
    if not trace.groups:
        raise _no_trace(path)
    return trace


def _no_trace(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is no routing trace",
        "give a .route.csv, a .npz with 'experts', or what streamd --trace has written",
    )


def _load(path: Path, token_count: int) -> Trace:
    if path.suffix == ".csv":
        return _load_route_csv(path)
    content = path.read_bytes()
    if content.startswith(DAEMON_TRACE):
        return _load_daemon_trace(path.name, content)
    with np.load(path) as arrays:
        return _load_fingerprints(path.stem, arrays["experts"], token_count)


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


def _load_daemon_trace(name: str, content: bytes) -> Trace:
    """Its format: see streamd/records/trace.py. Sections are groups; what was lost is missing."""
    line, _, body = content.partition(b"\n")
    header = json.loads(line)
    n_layers, n_experts, top_k = header["n_layers"], header["n_experts"], header["top_k"]
    cells = np.frombuffer(body[: len(body) // 2 * 2], "<u2").astype(np.int64)
    groups = []
    at = 0
    while at + 4 <= len(cells):
        _, layer, use_count, count = cells[at : at + 4].tolist()
        experts = cells[at + 4 : at + 4 + count]
        at += 4 + count
        if layer < n_layers and at <= len(cells):
            is_decode = use_count == count <= top_k
            groups.append((is_decode, tuple((layer * n_experts + experts).tolist())))
    key_bytes = np.repeat(np.array(header["layer_bytes"], np.int64), n_experts)
    return Trace(name, n_layers, n_experts, key_bytes, tuple(groups))


def _rows(keys: npt.NDArray[np.int64]) -> Iterator[list[int]]:
    yield from keys.reshape(-1, keys.shape[-1]).tolist()
