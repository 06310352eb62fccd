"""What a GPU computes of latent attention by torch's operations; they run on any device."""

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from infer.kernels import reference
from infer.kernels.cuda import latent as latent_module
from infer.kernels.cuda.head_products import FEW_TOKENS, HeadProducts
from infer.kernels.cuda.latent import latent_attention, rope_pairs, select
from infer.kernels.quant_matrix import QuantMatrix

HEADS, WIDTH, VALUES, CONTEXT = 6, 72, 56, 400


def random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[None, 4096], ids=["whole", "in blocks"])
def _bytes(request, monkeypatch):
    if request.param is not None:
        for name in ("ATTENTION_BYTES", "PRODUCT_BYTES", "SELECT_BYTES"):
            monkeypatch.setattr(latent_module, name, request.param)


def test_rope_pairs():
    angles, x = random(CONTEXT, 6) * 100, random(90, HEADS, 24)
    expected = reference.rope_pairs(x, angles.cos(), angles.sin(), 300, 11)
    rope_pairs(x, angles.cos(), angles.sin(), 300, 11)
    torch.testing.assert_close(x, expected)


@pytest.mark.usefixtures("_bytes")
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 50), (CONTEXT - 20, 20)])
@pytest.mark.parametrize("top_k", [None, 7, 64, CONTEXT + 5])
def test_latent_attention(start, rows, top_k):
    q, latent = random(rows, HEADS, WIDTH), random(CONTEXT, WIDTH, seed=2)
    latent[start + rows :] = torch.nan
    selected = None
    if top_k is not None:
        selected = select(random(rows, 3, 8), random(rows, 3), random(CONTEXT, 8), start, top_k)
    result = latent_attention(q, latent, VALUES, start, 0.2, selected)
    expected = reference.latent_attention(q.double(), latent, VALUES, start, 0.2, selected)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_bytes")
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 50), (CONTEXT - 20, 20)])
@pytest.mark.parametrize("top_k", [1, 40, CONTEXT + 5])
def test_select(start, rows, top_k):
    """Whole numbers, so that no order of a sum matters and there are many ties."""
    q, weights = (random(*s).round() for s in ((rows, 5, 8), (rows, 5)))
    keys = random(CONTEXT, 8, seed=3).round()
    keys[start + rows :] = torch.nan
    result = select(q, weights, keys, start, top_k)
    assert torch.equal(result, reference.select(q, weights, keys, start, top_k))


def test_missing_scores_select_positions_all_the_same():
    q = torch.full((2, 3, 8), torch.nan)
    selected = select(q, torch.ones(2, 3), torch.ones(CONTEXT, 8), 200, 50)
    assert selected.tolist() == [list(range(50))] * 2


class DeviceWithoutKernels:
    """In the place of infer.kernels.cuda.device.Device."""

    device = torch.device("cpu")

    def function(self, *_) -> None:
        return None


class DenseOnCpu:
    """In the place of infer.kernels.cuda.dense.Dense."""

    def embed(self, matrix, ids, out) -> None:
        out.copy_(reference.dequantize(matrix)[ids])


@pytest.mark.parametrize("rows", [19, 20])
def test_heads_products(rows):
    """Of matrices that are one stack, and of parts of heads that have more rows."""
    dense = random(HEADS, 20, 64).numpy()
    data = np.ascontiguousarray(gguf.quants.quantize(dense, GGMLQuantizationType.Q8_0))
    kind = int(GGMLQuantizationType.Q8_0)
    whole = QuantMatrix.over(kind, 64, data)
    matrices = [whole.part(head * 20 + 20 - rows, rows) for head in range(HEADS)]
    bounds = SimpleNamespace(latent=None)
    products = HeadProducts(DeviceWithoutKernels(), DenseOnCpu(), bounds)
    group = products.group(matrices)
    assert len(group.parts) == (1 if rows == 20 else HEADS)
    x = random(FEW_TOKENS + 1, HEADS, 64, seed=2)
    weights = torch.stack([reference.dequantize(matrix) for matrix in matrices])
    torch.testing.assert_close(products(x, group, False), torch.einsum("nhc,hrc->nhr", x, weights))
