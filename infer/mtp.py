"""The multi-token-prediction (MTP) block: guesses the token after the next one.

The row of token t (from token 1 on) joins what the trunk made of the token before with t itself:

    [ norm(embedding of token t) | norm(the trunk's last hidden state at t - 1, normed) ]
       -> projection to the model's width -> a transformer layer -> norm -> output: logits of t + 1

Sources: the DeepSeek-V3 report, 2.2; transformers' and llama.cpp's GLM-4.5 and Hy3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.blocks.moe import Tap
from infer.caches.cache import Cache, CacheShape
from infer.kernels.interface import Kernels, MatrixGroup
from infer.kernels.quant_matrix import QuantMatrix
from infer.model import Layer, PromptForesight


@dataclass(frozen=True)
class MtpBlock:
    """cache: what its layer keeps of a token; position i of such a cache belongs to token i + 1.

    joint [width, 2 * width] and head [vocab, width] are groups of one matrix.
    """

    kernels: Kernels
    eps: float
    cache: CacheShape
    embedding: QuantMatrix
    token_norm: Tensor
    hidden_norm: Tensor
    joint: MatrixGroup
    layer: Layer
    head_norm: Tensor
    head: MatrixGroup
    ahead: PromptForesight

    def forward(
        self,
        ids: Tensor,
        hidden: Tensor,
        kv: Cache,
        exact: bool,
        last_only: bool,
        tap: Tap | None = None,
    ) -> Tensor:
        """ids int64 [n], hidden [n, width] of the token before each -> logits [n or 1, vocab].

        `hidden` is the trunk's, after its output norm. `kv` is advanced; after an exception it is
        as before.
        """
        kernels, eps, start = self.kernels, self.eps, kv.length
        tokens = kernels.rms_norm(kernels.embed(self.embedding, ids), self.token_norm, eps)
        before = kernels.rms_norm(hidden, self.hidden_norm, eps)
        x = kernels.linear(torch.cat((tokens, before), dim=1), self.joint, exact)[0]
        self.ahead.begin(x, 0)
        x = self.layer.forward(kernels, eps, x, 0, kv, start, exact, ahead=self.ahead)
        x = kernels.rms_norm(x[-1:] if last_only else x, self.head_norm, eps)
        if tap is not None:
            tap("mtp_hidden", x)
        logits = kernels.linear(x, self.head, exact)[0]
        kv.length = start + len(ids)
        return logits
