"""What `streamd plan` prints: sentences for people, figures for programs."""

from collections.abc import Iterator

from shared.gpu_plan import CLIENT_CONTEXT_BYTES, DAEMON_CONTEXT_BYTES, GpuPlan
from shared.sizes import size_text, three_digits
from shared.stats_view import counted
from streamd.planning.model_plan import ModelPlan, slots_bytes
from streamd.planning.plan import AUTO_SHARE

_RATE_OPTIONS = {
    "disk": "--disk 5GB/s, or measure it with streamd bench-io",
    "pcie": "--pcie 13GB/s",
    "compute": "--bandwidth 288GB/s",
}
_PART_NAMES = {"disk": "the disk", "pcie": "PCIe", "compute": "computing"}


def plan_values(plan: ModelPlan) -> dict[str, object]:
    """For programs; sizes are bytes, rates bytes a second."""
    host = plan.host
    return {
        "model": str(plan.config.model),
        "floor_bytes": host.floor_bytes,
        "full_bytes": host.full_bytes,
        "budget_bytes": host.budget_bytes,
        "host_bytes": host.layout.total_bytes,
        "resident_bytes": plan.resident_bytes,
        "host_resident_bytes": plan.host_resident_bytes,
        "process_bytes": host.process_bytes,
        "available_bytes": host.available_bytes,
        "experts": plan.experts.expert_count,
        "slots": host.layout.slot_count,
        "class_slots": list(host.layout.class_slot_counts),
        "wave_experts": list(host.wave_experts),
        "gpu": None if plan.gpu is None else _gpu_values(plan, plan.gpu),
        "gpu_refusal": plan.gpu_refusal,
        "pinnable_bytes": plan.pinnable_bytes,
        "forecast": _forecast_values(plan),
    }


def _gpu_values(plan: ModelPlan, gpu: GpuPlan) -> dict[str, object]:
    return {
        "device": plan.gpu_name,
        "floor_bytes": gpu.floor_bytes,
        "full_bytes": gpu.full_bytes,
        "budget_bytes": gpu.budget_bytes,
        "slots_bytes": slots_bytes(gpu),
        "resident_bytes": gpu.resident_bytes,
        "daemon_context_bytes": DAEMON_CONTEXT_BYTES,
        "client_context_bytes": CLIENT_CONTEXT_BYTES,
        "reserve_bytes": gpu.reserve_bytes,
        "context_tokens": plan.context,
        "free_bytes": gpu.free_bytes,
        "taken_bytes": gpu.taken_bytes,
        "streamed_layers": list(gpu.streamed.layers),
        "streamed_bytes": gpu.streamed.streamed_bytes,
        "buffers_bytes": gpu.streamed.buffers_bytes,
        "class_slots": list(gpu.layout.class_slot_counts),
        "wave_experts": list(gpu.wave_experts),
    }


def _forecast_values(plan: ModelPlan) -> dict[str, object]:
    misses, bound = plan.misses, plan.bound
    return {
        "source": misses.source,
        "gpu_hit_rate": None if plan.gpu is None else round(1 - misses.gpu, 4),
        "host_hit_rate": round(_host_hit_rate(plan), 4),
        "read_share": round(misses.host, 4),
        "token_bytes": round(plan.token_bytes),
        "disk_bytes_a_token": round(bound.disk_bytes),
        "pcie_bytes_a_token": round(bound.pcie_bytes),
        "compute_bytes_a_token": round(bound.compute_bytes),
        "tokens_per_s": {part: round(rate, 2) for part, rate in bound.tokens_per_s.items()},
        "limit": bound.limit,
    }


def render_plan(plan: ModelPlan) -> str:
    parts = (_model_lines(plan), _gpu_lines(plan), _host_lines(plan), _forecast_lines(plan))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _model_lines(plan: ModelPlan) -> Iterator[str]:
    layer_count = sum(len(c.layers) for c in plan.experts.classes)
    yield str(plan.config.model)
    yield (
        f"  {size_text(plan.host.full_bytes)} of experts ({plan.experts.expert_count:,} in"
        f" {counted(layer_count, 'layer')}),"
        f" {size_text(plan.resident_bytes)} of resident tensors (all else)"
    )
    yield (
        f"  a token needs {plan.experts.top_k} of {plan.experts.n_experts} experts in each layer,"
        f" {size_text(plan.token_bytes)}"
    )


def _no_gpu_text(plan: ModelPlan) -> str:
    if plan.config.wants_gpu is False:
        return "none are wanted (--device cpu, or --gpu-cache 0)"
    return "this machine has no GPU that can hold any"


def _gpu_lines(plan: ModelPlan) -> Iterator[str]:
    gpu = plan.gpu
    if gpu is None:
        yield "GPU"
        yield f"  no slots there: {plan.gpu_refusal or _no_gpu_text(plan)}"
        return
    room_bytes = gpu.free_bytes + DAEMON_CONTEXT_BYTES
    yield f"GPU ({plan.gpu_name}): {size_text(room_bytes)} can be had"
    slot_count = gpu.layout.slot_count
    yield _row("expert cache", slots_bytes(gpu), _cache_text(plan, slot_count))
    auto = " (auto: all that is left)" if plan.config.gpu_cache is None else ""
    yield _row("", None, f"--gpu-cache{auto}; {size_text(gpu.floor_bytes)} at least")
    choice = gpu.streamed
    what = "all of them"
    if choice.layers:
        what = f"those of {counted(len(choice.layers), 'layer')} are streamed"
    yield _row("resident tensors", gpu.resident_bytes, what)
    if choice.layers:
        yield _row("two buffers", choice.buffers_bytes, "for those layers, in each client")
    client = f"KV cache for {plan.context:,} tokens (--ctx), activations (--chunk)"
    if plan.config.gpu_reserve is not None:
        client = "as --gpu-reserve says"
    yield _row("a client", gpu.reserve_bytes, client)
    contexts_bytes = DAEMON_CONTEXT_BYTES + CLIENT_CONTEXT_BYTES
    yield _row("CUDA contexts", contexts_bytes, "the daemon's and a client's")


def _host_lines(plan: ModelPlan) -> Iterator[str]:
    host = plan.host
    yield f"RAM: {size_text(host.available_bytes)} can be had"
    slot_count = host.layout.slot_count
    yield _row("expert cache", host.layout.total_bytes, _cache_text(plan, slot_count))
    auto = f" (auto: {AUTO_SHARE:.0%} of what is left)" if plan.config.host_cache is None else ""
    yield _row("", None, f"--host-cache{auto}; {size_text(host.floor_bytes)} at least")
    if plan.pinnable_bytes is not None and plan.pinnable_bytes < host.layout.total_bytes:
        yield _row("of that pinned", plan.pinnable_bytes, "by ulimit -l; the rest costs CPU time")
    streamed_bytes = plan.gpu.streamed.streamed_bytes if plan.gpu is not None else 0
    copied = f"of which {size_text(streamed_bytes)} are copied to the GPU for every token"
    elsewhere = "the others are in GPU memory alone" if not plan.config.cpu_clients else ""
    what = ", ".join(filter(None, (copied if streamed_bytes else "", elsewhere)))
    yield _row("resident tensors", plan.host_resident_bytes, what)
    yield _row("the daemon", host.process_bytes, "its process, besides these")


def _forecast_lines(plan: ModelPlan) -> Iterator[str]:
    misses, bound, config = plan.misses, plan.bound, plan.config
    known = f"the trace {misses.source}" if config.trace else f"recorded routing of {misses.source}"
    yield f"Forecast of decoding, from {known}"
    if plan.gpu is not None:
        yield (
            f"  hits: {1 - misses.gpu:.0%} in the GPU's cache, {_host_hit_rate(plan):.0%} of the"
            " rest in RAM"
        )
    else:
        yield f"  hits: {_host_hit_rate(plan):.0%} in RAM"
    moved = {
        "disk": bound.disk_bytes,
        "pcie": bound.pcie_bytes,
        "compute": bound.compute_bytes,
    }
    for part, size_bytes in moved.items():
        if part == "pcie" and plan.gpu is None:
            continue
        yield f"  {_PART_NAMES[part]:<16} {_moved_text(plan, part, size_bytes)}"
    if bound.limit:
        rate = three_digits(bound.tokens_per_s[bound.limit])
        yield f"  at most {rate} tokens/s, by {_PART_NAMES[bound.limit]}"


def _moved_text(plan: ModelPlan, part: str, size_bytes: float) -> str:
    """What a part moves for a token, and what that allows; no bound where it moves nothing."""
    if size_bytes == 0:
        return "nothing to copy" if part == "pcie" else "nothing to read"
    allowed = plan.bound.tokens_per_s.get(part)
    at = f"rate unknown: {_RATE_OPTIONS[part]}"
    if allowed is not None:
        at = f"at most {three_digits(allowed)} tokens/s"
        if part == "disk" and plan.is_disk_measured:
            at += " as bench-io measured it here"
    return f"{size_text(size_bytes):>9} a token; {at}"


def _host_hit_rate(plan: ModelPlan) -> float:
    """Of what the tier before it has missed."""
    misses = plan.misses
    return 1 - misses.host / misses.gpu if misses.gpu else 1.0


def _cache_text(plan: ModelPlan, slot_count: int) -> str:
    return f"{slot_count:,} slots, {slot_count / plan.experts.expert_count:.1%} of the experts"


def _row(what: str, size_bytes: float | None, remark: str) -> str:
    size = "" if size_bytes is None else size_text(size_bytes)
    return f"  {what:<16} {size:>9}  {remark}".rstrip()
