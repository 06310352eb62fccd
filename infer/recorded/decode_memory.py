"""The memory of a decode step on a GPU: what its graphs share, and share with the host."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepBuffers:
    """What outlives a graph. One token: x, normed, shared [1, width], rows [1, top_k, width]."""

    x: Tensor
    normed: Tensor
    shared: Tensor
    rows: Tensor
    scores: Tensor  # of the router, [1, experts]
    ids: Tensor
    weights: Tensor
    addresses: Tensor  # int64 [4, top_k], for the graph that is to run, as Mailboxes has them
    logits: Tensor  # [1, vocab]
    control: Tensor  # int64 [3]: token, position, step
    token: Tensor = field(init=False)
    position: Tensor = field(init=False)
    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.token = self.control[:1]
        self.position = self.control.view(torch.int32)[2:3]
        self.step = self.control[2:]

    @classmethod
    def build(
        cls, width: int, experts: int, top_k: int, vocab_size: int, device: torch.device
    ) -> "StepBuffers":
        def floats(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device)

        return cls(
            *(floats(1, width) for _ in range(3)),
            floats(1, top_k, width),
            floats(1, experts),
            torch.zeros((1, top_k), dtype=torch.int32, device=device),
            floats(1, top_k),
            torch.zeros((4, top_k), dtype=torch.int64, device=device),
            floats(1, vocab_size),
            torch.zeros(3, dtype=torch.int64, device=device),
        )


class Mailboxes:
    """What host and GPU tell each other; row i of a table belongs to the i-th router."""

    def __init__(self, moe_count: int, top_k: int, vocab_size: int) -> None:
        def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype).pin_memory()

        self.control = numbers(3, dtype=torch.int64)
        self.mail = numbers(moe_count, 1 + -(-top_k // 2), dtype=torch.int64)
        # The addresses of all experts or of the misses, and those of the hits if something misses:
        # gate, up and down, or, in their place, of a row of results that the CPU has computed.
        self.addresses = numbers(moe_count, 4, top_k, dtype=torch.int64)
        self.hits = numbers(moe_count, 4, top_k, dtype=torch.int64)
        self.logits = numbers(vocab_size, dtype=torch.float32)
