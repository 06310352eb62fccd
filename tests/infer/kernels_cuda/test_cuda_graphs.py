"""What is captured in a graph once must follow its inputs, addresses and position afterwards."""

import pytest
import torch

from infer.kernels.cuda.kernels import CudaKernels
from infer.kernels.interface import ExpertFormat
from infer.kernels.scratch import KernelBounds
from shared.quants import TensorType

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

D_MODEL, D_FF, TOP_K, TOKENS, HEADS, HEAD_DIM = 512, 256, 3, 2, 4, 128
BOUNDS = KernelBounds(
    tokens=TOKENS,
    columns=D_MODEL,
    expert_columns=D_FF,
    pairs=TOKENS * TOP_K,
    experts=6,
    heads=HEADS,
    head_dim=HEAD_DIM,
    context=500,
)


def test_a_captured_step_follows_what_it_reads(upload):
    kernels = CudaKernels(BOUNDS)
    shapes = ((D_FF, D_MODEL), (D_FF, D_MODEL), (D_MODEL, D_FF))
    names = ("IQ2_XXS", "Q4_K", "Q2_K")
    parts = [
        [upload(name, *shape, seed).matrix for seed in range(TOKENS * TOP_K)]
        for name, shape in zip(names, shapes, strict=True)
    ]
    kind = ExpertFormat(*(TensorType[name] for name in names), D_MODEL, D_FF)
    addresses = torch.tensor([[m.address for m in part] for part in parts]).cuda()
    resident = [upload("Q8_0", *shape).matrix for shape in shapes]
    group = kernels.group([resident[0], upload("Q4_K", 96, D_MODEL).matrix])
    x = torch.randn(TOKENS, D_MODEL, device="cuda")
    cache = torch.randn(2, 500, 2, HEAD_DIM, device="cuda").to(torch.bfloat16)
    position = torch.tensor([3], dtype=torch.int32, device="cuda")
    out = torch.empty(TOKENS, TOP_K, D_MODEL, device="cuda")

    def step():
        kernels.experts_at(x, kind, addresses, out)
        q = x.view(TOKENS, HEADS, HEAD_DIM)
        mixed = kernels.attention(q, *cache, position, 0.1)
        return (*kernels.linear(x, group), kernels.swiglu(x, *resident), mixed)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.normal_()
    addresses.copy_(addresses.roll(1, 1))
    position.fill_(400)
    graph.replay()
    replayed = [result.clone() for result in (out, *captured)]
    direct = step()
    for result, expected in zip(replayed, (out, *direct), strict=True):
        assert torch.equal(result, expected)


def test_rows_go_to_the_host_and_come_from_there():
    kernels = CudaKernels(BOUNDS)
    x, pinned = torch.randn(1, D_MODEL, device="cuda"), torch.zeros(1, D_MODEL).pin_memory()
    rows = torch.randn(1, TOP_K, D_MODEL + 2, device="cuda")
    results = torch.randn(TOP_K, D_MODEL + 2).pin_memory()
    sources = torch.zeros(TOP_K, dtype=torch.int64, device="cuda")
    kernels.give(x, pinned)
    kernels.take_rows(sources, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.give(x, pinned)
        kernels.take_rows(sources, rows)
    for computed in ((), (1,), (0, 2)):
        x.normal_()
        before = rows.cpu().clone()
        results.normal_()
        sources.zero_()
        for rank in computed:
            sources[rank] = results[rank].data_ptr()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(pinned, x.cpu())
        for rank in range(TOP_K):
            expected = results[rank] if rank in computed else before[0, rank]
            assert torch.equal(rows[0, rank].cpu(), expected)
