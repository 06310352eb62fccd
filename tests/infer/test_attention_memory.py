"""Attention over 8,000 tokens takes memory in proportion to them, not to their square."""

import subprocess
import sys

import pytest
import torch

from infer.kernels import reference, reference_kernels
from infer.kernels.reference_kernels import ReferenceKernels

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8000, 8, 2, 32
QUERIES = 2000  # the last ones, which see the most; those before them would cost time alone
SCORE_BYTES = 4 * HEADS * QUERIES * TOKENS  # one for each query and key: 512 MB
BOUND_BYTES = 128 << 20

# In a process of its own, whose peak is nobody else's. VmHWM is in KiB.
SCRIPT = f"""
import re, sys, torch
from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.reference_kernels import ReferenceKernels
from infer.kernels.scratch import KernelBounds

def peak():
    status = open("/proc/self/status").read()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status)[1])

n, heads, kv_heads, head_dim = {TOKENS}, {HEADS}, {KV_HEADS}, {HEAD_DIM}
bounds = KernelBounds(
    tokens=n, columns=256, expert_columns=256, pairs=2 * n, experts=8, heads=heads,
    head_dim=head_dim, context=n,
)
kernels = GgmlKernels(bounds) if sys.argv[1] == "ggml" else ReferenceKernels()
q = torch.randn(n, heads, head_dim)
keys, values = (torch.randn(n, kv_heads, head_dim).half() for _ in range(2))
first = n - {QUERIES}
kernels.attention(q[first : first + 8], keys[: first + 8], values[: first + 8], first, 0.1)
before = peak()
kernels.attention(q[first:], keys, values, first, 0.1)
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["ggml", "reference"])
def test_peak_memory_of_a_long_prompt(kind):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < BOUND_BYTES < SCORE_BYTES / 2


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_tiles_of_queries_are_the_whole(rows, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    start, n = 13, 50

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    monkeypatch.setattr(reference_kernels, "_TILE_SCORES", rows * HEADS * (start + n))
    q, keys, values = random(n, HEADS, 32), random(80, KV_HEADS, 32), random(80, KV_HEADS, 32)
    latent, index_keys = random(80, 32), random(80, 16)
    index_q, weights = random(n, HEADS, 16), random(n, HEADS)
    kernels = ReferenceKernels()
    torch.testing.assert_close(
        kernels.attention(q, keys, values, start, 0.3),
        reference.attention(q, keys, values, start, 0.3),
    )
    selected = kernels.select(index_q, weights, index_keys, start, 5)
    assert torch.equal(selected, reference.select(index_q, weights, index_keys, start, 5))
    for chosen in (None, selected):
        torch.testing.assert_close(
            kernels.latent_attention(q, latent, 24, start, 0.3, chosen),
            reference.latent_attention(q, latent, 24, start, 0.3, chosen),
        )
