"""Drafting: the MTP block guesses a token ahead, the model verifies it along with the known one.

    known token t --> MTP block --> guess g
    [t, g] --> model --> logits after t: does g stand?   yes: logits after g too, two tokens at once
                                                         no: g is taken back, another one drawn

The block's row of a token needs the model's hidden state of the token before it. Rows are computed
for tokens that stand only; those of one pass wait until the next token is known:

    tokens       0 1 2 ... r  | tail ...  | next          rows r of the block's cache are there;
    rows           1 2 ... r  | waiting   | guesses       hidden: of the tokens before those waiting
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.blocks.moe import Tap
from infer.caches.cache import Cache
from infer.config import MTP_DRAFT
from infer.engine import Engine
from infer.generation.decoding import Decoding
from infer.generation.sampler import Sampler
from infer.generation.speculation import acceptance, residual

Logits = npt.NDArray[np.float32]

# The last token has no row, and that of the token before it may be waiting.
ROWS_BEHIND = 2


def choose_decoding(engine: Engine, draft: str) -> Decoding:
    """For a kind of draft as DraftConfig names it."""
    return Drafting(engine) if draft == MTP_DRAFT else Decoding(engine)


class Drafting(Decoding):
    """As Decoding, with fewer passes through the model where guesses stand.

    Greedy answers have the same bits, drawn ones the same distribution. The engine must have an MTP
    block.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert engine.mtp is not None
        self._kv = engine.mtp.cache.allocate(engine.kv.context, engine.exact, engine.device)
        self._hidden: Tensor | None = None  # [len(tail) + 1, width]
        self._tail: list[int] = []
        self._drawn: int | None = None  # by verification, for the next `draw`
        self._held_ahead = False  # whether that token is held already

    def rewind(self, kept_count: int) -> int:
        kv, rows = self._engine.kv, self._kv
        self._drawn, self._held_ahead = None, False
        waiting_count = rows.length + len(self._tail) + 1
        if self._hidden is not None and kept_count == kv.length == waiting_count:
            return kept_count
        # The hidden state of the last token kept is not: that token is computed again.
        kept_count = max(0, min(kept_count - 1, rows.length))
        self._forget_hidden()
        kv.truncate(kept_count)
        rows.truncate(kept_count)
        return kept_count

    def planes(self) -> dict[str, Tensor]:
        own = {f"mtp_{name}": plane for name, plane in self._kv.planes().items()}
        return super().planes() | own

    @property
    def whole_count(self) -> int:
        return min(super().whole_count, self._kv.length + ROWS_BEHIND)

    def restored(self, token_count: int) -> None:
        super().restored(token_count)
        self._kv.length = max(0, token_count - ROWS_BEHIND)
        self._forget_hidden()

    def extend(self, ids: Sequence[int]) -> None:
        self._engine.check(ids)
        chunk = self._engine.chunk
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            self._logits, hidden = self._run(partial(self._engine.extend, part))
            self._compute_rows(part, hidden)

    def draw(self, sampler: Sampler) -> int:
        if self._drawn is None:
            return super().draw(sampler)
        token, self._drawn = self._drawn, None
        return token

    def take(self, token: int, sampler: Sampler) -> None:
        kv = self._engine.kv
        if self._held_ahead:
            self._held_ahead = False
        elif kv.context - kv.length < 2:
            self.extend([token])
        else:
            self._take_with_guess(token, sampler)

    def _take_with_guess(self, token: int, sampler: Sampler) -> None:
        guesses = sampler.distribution(self._guess(token))
        guess = sampler.draw(guesses)
        logits, hidden = self._run(partial(self._engine.logits, [token, guess]))
        self.guessed_count += 1
        choices = sampler.distribution(logits[0])
        if sampler.chance(acceptance(choices, guesses, guess)):
            self.accepted_count += 1
            self._hidden, self._tail = hidden, [guess]
            self._drawn, self._held_ahead = guess, True
            self._logits = logits[1]
        else:
            self._engine.kv.truncate(self._engine.kv.length - 1)
            self._hidden, self._tail = hidden[:1], []
            self._drawn = sampler.draw(residual(choices, guesses))

    def _guess(self, token: int) -> Logits:
        """The block's logits [vocab] for the token after `token`."""
        assert self._hidden is not None
        ids, hidden = [*self._tail, token], self._hidden
        self._forget_hidden()
        return self._rows(ids, hidden)

    def _compute_rows(self, ids: Sequence[int], hidden: Tensor) -> None:
        """The rows of tokens that the model has just computed, and those waiting before them."""
        if self._hidden is None:  # the first token has no row, or has kept it
            ids, before = ids[1:], hidden[:-1]
        else:
            ids, before = [*self._tail, *ids], torch.cat((self._hidden, hidden[:-1]))
        self._forget_hidden()  # broken off, it must not be taken for the one of the last row
        if ids:
            self._rows(ids, before)
        self._hidden, self._tail = hidden[-1:], []

    def _rows(self, ids: Sequence[int], hidden: Tensor) -> Logits:
        """Compute the block's rows of `ids`; the last one's logits [vocab]."""
        return mtp_rows(self._engine, ids, hidden, self._kv, last_only=True)[-1]

    def _forget_hidden(self) -> None:
        self._hidden, self._tail = None, []

    def _run(self, compute: Callable[[Tap], Logits]) -> tuple[Logits, Tensor]:
        """What a pass through the model gives, and its last hidden states [n, width]."""
        last = f"hidden.{self._engine.shape.n_layers}"
        states: list[Tensor] = []

        def tap(name: str, values: Tensor) -> None:
            if name == last:
                states.append(values)

        logits = compute(tap)
        return logits, torch.cat(states)


def mtp_rows(
    engine: Engine,
    ids: Sequence[int],
    hidden: Tensor,
    kv: Cache,
    last_only: bool,
    tap: Tap | None = None,
) -> Logits:
    """The MTP block's rows of `ids` behind those in `kv`; `hidden` as in MtpBlock.forward.

    Logits [n, vocab], or of the last row of each chunk.
    """
    logits = []
    chunk = engine.chunk if last_only else engine.logits_chunk
    with torch.inference_mode():
        for first in range(0, len(ids), chunk):
            part = slice(first, first + chunk)
            tokens = torch.tensor(ids[part], dtype=torch.int64, device=engine.device)
            compute = partial(_mtp_chunk, engine, tokens, hidden[part], kv, last_only, tap)
            logits.append(engine.redo_if_lost(compute))
    return np.concatenate(logits)


def _mtp_chunk(
    engine: Engine, tokens: Tensor, hidden: Tensor, kv: Cache, last_only: bool, tap: Tap | None
) -> Logits:
    assert engine.mtp is not None
    rows = engine.mtp.forward(tokens, hidden, kv, engine.exact, last_only, tap)
    return rows.cpu().numpy()
