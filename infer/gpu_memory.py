"""A client's share of a GPU's memory: torch's allocator is kept to what the plan says.

It keeps what it has once had for later: 1.1 GB beside 1.9 GB in use, after prompts of 8,000 tokens.
Where it may not take more it lets go of that first.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from shared.client_memory import FIXED_BYTES, OUTSIDE_BYTES
from shared.errors import GpuError

T = TypeVar("T")


def limit_memory(device: torch.device, activation_bytes: int) -> None:
    """From now on: beside what has been allocated by now, activations and the fixed part."""
    if device.type != "cuda":
        return
    room_bytes = activation_bytes + FIXED_BYTES - OUTSIDE_BYTES
    most_bytes = torch.cuda.memory_allocated(device) + room_bytes
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total_bytes), device)


def within_memory(device: torch.device, strict: bool, compute: Callable[[], T]) -> T:
    """What `compute` returns, which may be computed twice; GpuError where memory does not hold it.

    strict: the limit has been asked for. Otherwise it is lifted before anything is refused.
    """
    try:
        return compute()
    except torch.OutOfMemoryError as error:
        if strict:
            raise _refusal() from error
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    try:
        return compute()
    except torch.OutOfMemoryError as error:
        raise _refusal() from error


def _refusal() -> GpuError:
    return GpuError(
        "GPU memory does not hold what computing takes beside the model",
        "give a smaller --chunk or --ctx, or the daemon a larger --vram or --gpu-reserve",
    )
