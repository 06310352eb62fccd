"""How a GGUF tensor is put together from a checkpoint's tensors, and what families share of it.

A `Piece` is one GGUF tensor: a stack of matrices (experts, heads; one for a plain tensor), each
being some rows of a checkpoint's tensor, as they are or transposed:

    ffn_up_exps [columns, rows, experts]  <-  experts.0.up_proj, experts.1.up_proj, ...
                                          or  the second half of the rows of gate_up_proj, each
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors_files import Checkpoint

from shared.errors import MalformedModel, UnsupportedModel

_REMEDY = "use a checkpoint of the model in transformers' form"


@dataclass(frozen=True)
class Source:
    """Rows of a checkpoint's tensor, seen as [rows of all its axes, columns], from `first_row`."""

    name: str
    first_row: int = 0


@dataclass(frozen=True)
class Piece:
    """`shape` in ggml's order. `transposed`: a source is [columns, rows] of its matrix."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    transposed: bool = False

    @property
    def rows(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    def load(
        self, checkpoint: Checkpoint, matrix: int, first: int, last: int
    ) -> NDArray[np.float32]:
        """Rows [first, last) of one of the matrices, float32 [rows, columns]."""
        source = self.sources[matrix]
        if not self.transposed:
            begin = source.first_row
            return checkpoint.rows(source.name, begin + first, begin + last)
        whole = checkpoint.rows(source.name, source.first_row, source.first_row + self.shape[0])
        return whole.T[first:last]


@dataclass
class Pieces:
    """Collects the pieces of a model. `names`: the checkpoint's tensors; None where there is no
    checkpoint, only a config: then all tensors are taken to be there that a model needs."""

    config: Mapping[str, Any]
    names: Collection[str] | None
    found: list[Piece] = field(default_factory=list)

    def number(self, *keys: str, default: int | None = None) -> int:
        """A whole number from the config, under the first of several keys that is there."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                raise MalformedModel(f"config.json: {key} is {value!r}, not a number", _REMEDY)
        if default is None:
            raise MalformedModel(f"config.json lacks {keys[0]}", _REMEDY)
        return default

    def has(self, name: str) -> bool:
        """Whether an optional tensor is there; without a checkpoint it is not."""
        return self.names is not None and name in self.names

    def first(self, *names: str) -> str:
        """The first of several names that the checkpoint has; without one, the first."""
        return next((name for name in names if self.has(name)), names[0])

    def add(self, name: str, shape: tuple[int, ...], *sources: str) -> None:
        """A tensor of one matrix, under the first of the sources that is there."""
        self.found.append(Piece(name, shape, (Source(self.first(*sources)),)))

    def add_stack(
        self, name: str, shape: tuple[int, ...], sources: list[Source], transposed: bool = False
    ) -> None:
        assert len(sources) == shape[2]
        self.found.append(Piece(name, shape, tuple(sources), transposed))

    def dense(self, block: str, layer: str, width: int, inner: int) -> None:
        self._gated(f"{block}.ffn", "", width, inner, [f"{layer}.mlp"])

    def experts(
        self, block: str, layer: str, width: int, inner: int, count: int, shared: int
    ) -> None:
        """Routed experts, of one tensor each or fused; `shared` is the shared experts' width."""
        mlp = f"{layer}.mlp"
        fused = f"{mlp}.experts.gate_up_proj"
        if self.has(fused):
            gate = [Source(fused, 2 * inner * expert) for expert in range(count)]
            up = [Source(fused, 2 * inner * expert + inner) for expert in range(count)]
            down = [Source(f"{mlp}.experts.down_proj", width * expert) for expert in range(count)]
        else:
            gate, up, down = (
                [Source(f"{mlp}.experts.{expert}.{part}_proj.weight") for expert in range(count)]
                for part in ("gate", "up", "down")
            )
        self.add_stack(f"{block}.ffn_gate_exps.weight", (width, inner, count), gate)
        self.add_stack(f"{block}.ffn_up_exps.weight", (width, inner, count), up)
        self.add_stack(f"{block}.ffn_down_exps.weight", (inner, width, count), down)
        self._gated(
            f"{block}.ffn", "_shexp", width, shared, [f"{mlp}.shared_experts", f"{mlp}.shared_mlp"]
        )

    def next_token_block(self, block: str, layer: str, width: int, vocab: int) -> None:
        """What an MTP block has besides a layer's tensors."""
        self.add(f"{block}.nextn.eh_proj.weight", (2 * width, width), f"{layer}.eh_proj.weight")
        for norm in ("enorm", "hnorm"):
            self.add(f"{block}.nextn.{norm}.weight", (width,), f"{layer}.{norm}.weight")
        self.add(
            f"{block}.nextn.shared_head_norm.weight",
            (width,),
            f"{layer}.shared_head.norm.weight",
            f"{layer}.final_layernorm.weight",
        )
        optional = {"embed_tokens": "embed_tokens", "shared_head_head": "shared_head.head"}
        for ours, theirs in optional.items():
            if self.has(f"{layer}.{theirs}.weight"):
                self.add(f"{block}.nextn.{ours}.weight", (width, vocab), f"{layer}.{theirs}.weight")

    def _gated(self, prefix: str, suffix: str, width: int, inner: int, sources: list[str]) -> None:
        for part, shape in {
            "gate": (width, inner),
            "up": (width, inner),
            "down": (inner, width),
        }.items():
            self.add(
                f"{prefix}_{part}{suffix}.weight",
                shape,
                *(f"{source}.{part}_proj.weight" for source in sources),
            )


def check_against(checkpoint: Checkpoint, pieces: list[Piece], ignored: Collection[str]) -> None:
    """MalformedModel where the checkpoint's tensors are not, whole, what the pieces are made of."""
    used_rows: dict[str, int] = {}
    for piece in pieces:
        columns, rows = piece.shape[0], piece.rows
        if piece.transposed:
            columns, rows = rows, columns
        for source in piece.sources:
            stored = checkpoint.find(source.name)
            if stored.shape[-1] != columns:
                raise MalformedModel(
                    f"{source.name} has shape {stored.shape},"
                    f" config.json demands {columns} columns",
                    _REMEDY,
                )
            used_rows[source.name] = used_rows.get(source.name, 0) + rows
    for name, rows in used_rows.items():
        shape = checkpoint.find(name).shape
        if int(np.prod(shape[:-1], dtype=int)) != rows:
            raise MalformedModel(
                f"{name} has shape {shape}, config.json demands {rows} rows", _REMEDY
            )
    unknown = sorted(checkpoint.weight_names() - used_rows.keys() - set(ignored))
    if unknown:
        raise UnsupportedModel(
            f"{checkpoint.folder} has {len(unknown)} tensors that have no place,"
            f" such as {unknown[0]}",
            "the model is of another kind than its config.json says, or newer than this converter",
        )


def layer_kinds(config: Mapping[str, Any], n_layers: int, dense_default: int) -> list[bool]:
    """Whether each trunk layer has experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense_count = config.get("first_k_dense_replace", dense_default)
        return [layer >= dense_count for layer in range(n_layers)]
    if len(kinds) != n_layers or not set(kinds) <= {"dense", "sparse"}:
        raise MalformedModel(
            f"config.json: mlp_layer_types is no list of {n_layers} kinds", _REMEDY
        )
    return [kind == "sparse" for kind in kinds]


def rope_base(config: Mapping[str, Any], default: float | None = None) -> float:
    """The base of plain RoPE; UnsupportedModel for a scaled one."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    share = parameters.get("partial_rotary_factor", 1.0)
    if kind != "default" or share != 1.0:
        raise UnsupportedModel(
            f"config.json: RoPE of type {kind}, of {share} of a head, is not supported", _REMEDY
        )
    base = parameters.get("rope_theta", config.get("rope_theta", default))
    if base is None:
        raise MalformedModel("config.json lacks rope_theta", _REMEDY)
    return float(base)


def require(config: Mapping[str, Any], **expected: Any) -> None:
    """UnsupportedModel where the config says something else than the families compute."""
    for key, value in expected.items():
        if config.get(key, value) not in (value, None):
            raise UnsupportedModel(
                f"config.json: {key} is {config[key]!r}; only {value!r} is supported", _REMEDY
            )
