"""What a GLM file's metadata say of its attention, checked."""

from dataclasses import dataclass

from infer.blocks.mla import MlaShape
from shared.errors import MalformedModel, UnsupportedModel
from shared.experts import trunk_layer_count
from shared.gguf_index import GgufIndex
from shared.index_layers import index_layers

_REMEDY = "convert or download the model again"


@dataclass(frozen=True)
class GlmShape:
    """index_layers: those that own an index; the others read what the last of these selected."""

    mla: MlaShape
    n_layers: int
    q_lora: int
    index_heads: int
    index_dim: int
    top_k: int
    index_layers: tuple[int, ...]

    @classmethod
    def from_gguf(cls, index: GgufIndex) -> "GlmShape":
        """MalformedModel for missing keys and for sizes that contradict each other,
        UnsupportedModel for stretched rotations."""
        key, optional = index.arch_key, index.arch_optional
        # Files with unsplit matrices have a head's own widths where others have the cache's.
        key_dim = optional(
            "attention.key_length_mla", int, optional("attention.key_length", int, 0)
        )
        value_dim = optional(
            "attention.value_length_mla", int, optional("attention.value_length", int, 0)
        )
        rope = key("rope.dimension_count", int)
        n_layers = trunk_layer_count(index)
        shape = cls(
            MlaShape(
                heads=key("attention.head_count", int),
                nope=key_dim - rope,
                rope=rope,
                kv_lora=key("attention.kv_lora_rank", int),
                value_dim=value_dim,
                eps=key("attention.layer_norm_rms_epsilon", float),
            ),
            n_layers=n_layers,
            q_lora=key("attention.q_lora_rank", int),
            index_heads=key("attention.indexer.head_count", int),
            index_dim=key("attention.indexer.key_length", int),
            top_k=key("attention.indexer.top_k", int),
            index_layers=index_layers(index, n_layers),
        )
        shape._check(index)
        return shape

    def _check(self, index: GgufIndex) -> None:
        mla = self.mla
        sizes = {
            "attention.head_count": mla.heads,
            "attention.key_length_mla without what is rotated": mla.nope,
            "rope.dimension_count": mla.rope,
            "attention.kv_lora_rank": mla.kv_lora,
            "attention.value_length_mla": mla.value_dim,
            "attention.q_lora_rank": self.q_lora,
            "attention.indexer.head_count": self.index_heads,
            "attention.indexer.key_length without what is rotated": self.index_dim - mla.rope + 1,
            "attention.indexer.top_k": self.top_k,
        }
        for name, size in sizes.items():
            if size < 1:
                raise MalformedModel(f"{index.paths[0]}: {name} is too small", _REMEDY)
        if mla.rope % 2:
            raise MalformedModel(
                f"{index.paths[0]}: an odd number of dimensions, {mla.rope}, is rotated", _REMEDY
            )
        scaling = index.arch_optional("rope.scaling.type", str, "none")
        if scaling != "none":
            raise UnsupportedModel(
                f"{index.paths[0]}: its rotations are stretched by {scaling!r}",
                "use a file without rope.scaling.type",
            )
