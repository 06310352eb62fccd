"""Model families: each module here turns GGUF metadata into a model made of shared blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from infer.blocks.moe import ExpertSource
from infer.families import glm_dsa, hy3
from infer.families.parts import Parts
from infer.model import Model, ModelShape
from infer.mtp import MtpBlock
from shared.errors import UnsupportedModel
from shared.gguf_index import GgufIndex

__all__ = ["ExpertSource", "Family", "Parts", "family_of"]


@dataclass(frozen=True)
class Family:
    """`read_shape` needs the metadata only; `build` and `build_mtp` bind the tensors."""

    name: str
    read_shape: Callable[[GgufIndex], ModelShape]
    build: Callable[[Parts], Model]
    build_mtp: Callable[[Parts], MtpBlock]


_FAMILIES = {"hy3": hy3, "glm_dsa": glm_dsa}
FAMILIES = {
    architecture: Family(name, family.read_shape, family.build, family.build_mtp)
    for name, family in _FAMILIES.items()
    for architecture in family.ARCHITECTURES
}


def family_of(index: GgufIndex) -> Family:
    """The family of a file's architecture; UnsupportedModel if we do not know it."""
    family = FAMILIES.get(index.architecture)
    if family is None:
        raise UnsupportedModel(
            f"{index.paths[0]} has architecture {index.architecture!r}, which is not supported",
            f"supported are: {', '.join(sorted(FAMILIES))}",
        )
    return family
