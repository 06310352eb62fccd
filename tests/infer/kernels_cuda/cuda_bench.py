"""What the tests of products on the GPU share: how close is close, and a layer of experts."""

import numpy as np
import torch

from infer.kernels import reference
from infer.kernels.cuda.formats import FLOAT_FORMATS
from infer.kernels.interface import ExpertBatch, ExpertFormat
from infer.kernels.scratch import KernelBounds
from shared.quants import TensorType

# Of the norm of a result. Eight-bit activations are off by at most half of 1/127 of their block's
# largest value: for normal values 0.6% each, and as much in a sum of many.
INT8_TOLERANCE = 0.01
# Two products in a row, of which the second sees the long-tailed products of the first.
INT8_SWIGLU_TOLERANCE = 0.03
DENSE_TOLERANCE = 0.01
EXACT_TOLERANCE = 1e-5
D_MODEL, D_FF, EXPERTS, TOP_K, TOKENS = 512, 256, 6, 3, 9
BOUNDS = KernelBounds(
    tokens=256,
    columns=2816,
    expert_columns=1536,
    pairs=256 * TOP_K,
    experts=EXPERTS,
    heads=1,
    head_dim=1,
    context=1,
)


def inputs(rows, columns, seed=2):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).cuda()


def relative_error(result, expected):
    return ((result.cpu().double() - expected).norm() / expected.norm()).item()


def tolerance(name):
    return EXACT_TOLERANCE if name in FLOAT_FORMATS else INT8_TOLERANCE


class Layer:
    """Some experts and a routing of some tokens to TOP_K of them each."""

    def __init__(
        self, upload, gate="IQ2_XXS", up="Q4_K", down="Q2_K", tokens=TOKENS, widths=(D_MODEL, D_FF)
    ):
        seeds = range(EXPERTS)
        self.d_model, d_ff = widths
        types = (TensorType[name] for name in (gate, up, down))
        self.format = ExpertFormat(*types, self.d_model, d_ff)
        self.parts = (
            [upload(gate, d_ff, self.d_model, seed) for seed in seeds],
            [upload(up, d_ff, self.d_model, seed + 10) for seed in seeds],
            [upload(down, self.d_model, d_ff, seed + 20) for seed in seeds],
        )
        rng = np.random.default_rng(4)
        self.choice = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
        self.x = inputs(tokens, self.d_model)

    def batch(self, pairs):
        """The pairs, sorted by expert."""
        chosen = self.choice.reshape(-1)[pairs]
        order = np.argsort(chosen, kind="stable")
        experts, starts = np.unique(chosen[order], return_index=True)
        return ExpertBatch(
            self.format,
            np.asarray(pairs, np.int32)[order],
            np.append(starts, len(pairs)).astype(np.int32),
            *(np.array([part[e].matrix.address for e in experts], np.int64) for part in self.parts),
        )

    def out(self):
        return torch.full((*self.choice.shape, self.d_model), torch.nan, device="cuda")

    def run(self, kernels, exact, *batches):
        out = self.out()
        for pairs in batches:
            kernels.experts(self.x, self.batch(pairs), out, exact)
        return out

    def pairs(self):
        return np.arange(self.choice.size)

    def addresses(self):
        rows = [[part[e].matrix.address for e in self.choice.reshape(-1)] for part in self.parts]
        return torch.tensor(rows, dtype=torch.int64, device="cuda")

    def expected(self):
        out = torch.empty(*self.choice.shape, self.d_model, dtype=torch.float64)
        for token, rank in np.ndindex(*self.choice.shape):
            weights = (part[self.choice[token, rank]].dense for part in self.parts)
            x = self.x[token : token + 1].cpu().double()
            out[token, rank] = reference.swiglu(x, *weights)[0]
        return out
