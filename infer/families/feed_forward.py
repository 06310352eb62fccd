"""Feed-forward blocks by their tensor names, which the families share."""

from infer.blocks.ffn import DenseFfn
from infer.blocks.moe import MoeFfn, Routing
from infer.families.parts import Parts
from infer.kernels.interface import ExpertFormat
from shared.errors import MalformedModel, UnsupportedModel

GATING_SIGMOID = 2


def check_router(parts: Parts) -> None:
    """UnsupportedModel for a router that `Kernels.route_sigmoid` does not compute.

    A file that does not say has a normalised sigmoid router without groups.
    """
    index = parts.index
    gating = index.arch_optional("expert_gating_func", int, GATING_SIGMOID)
    if gating != GATING_SIGMOID or not index.arch_optional("expert_weights_norm", bool, True):
        raise UnsupportedModel(
            f"{index.paths[0]}: gating function {gating} or unnormalised router weights",
            "use a file with a normalised sigmoid router (expert_gating_func 2)",
        )
    if index.arch_optional("expert_group_count", int, 1) > 1:
        raise UnsupportedModel(
            f"{index.paths[0]}: its router chooses among groups of experts",
            "use a file with one group (expert_group_count 1)",
        )


def feed_forward(parts: Parts, width: int, number: int) -> DenseFfn | MoeFfn:
    """Block `number`'s: dense where it has no router."""
    if f"blk.{number}.ffn_gate_inp.weight" in parts.weights:
        return _moe(parts, width, number)
    hidden = parts.index.arch_key("feed_forward_length", int)
    return _gated(parts, width, f"blk.{number}", "", hidden)


def _gated(parts: Parts, width: int, prefix: str, suffix: str, hidden: int) -> DenseFfn:
    weights = parts.weights
    return DenseFfn(
        parts.kernels,
        weights.matrix(f"{prefix}.ffn_gate{suffix}.weight", hidden, width),
        weights.matrix(f"{prefix}.ffn_up{suffix}.weight", hidden, width),
        weights.matrix(f"{prefix}.ffn_down{suffix}.weight", width, hidden),
    )


def _moe(parts: Parts, width: int, number: int) -> MoeFfn:
    index, weights, experts = parts.index, parts.weights, parts.experts
    prefix = f"blk.{number}"
    gate_name = f"{prefix}.ffn_gate_exps.weight"
    expert_input, expert_width, _ = index.tensors[gate_name].shape
    if expert_input != width:
        raise MalformedModel(
            f"{index.paths[0]}: {gate_name} takes {expert_input} inputs, the model is {width} wide",
            "convert or download the model again",
        )
    # The shared experts lie side by side, as one block.
    shared_width = index.arch_optional(
        "expert_shared_feed_forward_length",
        int,
        expert_width * index.arch_optional("expert_shared_count", int, 1),
    )
    bias = weights.first(f"{prefix}.exp_probs_b", f"{prefix}.exp_probs_b.bias")
    gate_type, up_type, down_type = experts.part_types[number].tolist()
    return MoeFfn(
        parts.kernels,
        parts.source,
        number,
        Routing(experts.top_k, index.arch_optional("expert_weights_scale", float, 1.0)),
        weights.matrix(f"{prefix}.ffn_gate_inp.weight", experts.n_experts, width),
        weights.vector(bias, experts.n_experts),
        ExpertFormat(gate_type, up_type, down_type, width, expert_width),
        _gated(parts, width, prefix, "_shexp", shared_width) if shared_width else None,
    )
