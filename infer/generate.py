"""Generating an answer: prefill what is new, then one token after the other until a stop."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.engine import Engine
from infer.sampler import Sampler
from infer.text_stream import TextStream
from infer.thinking import ThinkingTracker
from infer.tokenizer import Tokenizer


class Piece(NamedTuple):
    text: str
    reasoning: bool


@dataclass
class Answer:
    """What became of one answer; filled in while it is generated."""

    prompt_count: int = 0
    prefilled_count: int = 0
    token_count: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stopped: bool = False  # at an end-of-turn token, not at a limit

    @property
    def decode_tps(self) -> float:
        return self.token_count / self.decode_s if self.decode_s else 0.0


class Conversation:
    """The tokens that the KV cache holds, so that a longer prompt prefills only its new tail."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def reset(self) -> None:
        self._held.clear()
        self._engine.kv.truncate(0)

    def answer(
        self, prompt: Sequence[int], sampler: Sampler, max_tokens: int, answer: Answer
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come; closing the iterator ends the answer.

        max_tokens: 0 for as many as the context holds. RequestError if the prompt does not fit.
        """
        engine = self._engine
        kept_count = self._common_prefix(prompt)
        engine.kv.truncate(kept_count)
        del self._held[kept_count:]
        new = list(prompt[kept_count:])
        answer.prompt_count, answer.prefilled_count = len(prompt), len(new)
        started_s = time.perf_counter()
        logits = engine.extend(new)
        self._held += new
        answer.prefill_s = time.perf_counter() - started_s
        room_count = engine.kv.context - engine.kv.length
        stream = TextStream(self._tokenizer)
        tracker = ThinkingTracker(self._tokenizer, prompt)
        started_s = time.perf_counter()
        for _ in range(min(max_tokens, room_count) if max_tokens else room_count):
            token = sampler.sample(logits)
            if token in self._tokenizer.stop_ids:
                answer.stopped = True
                break
            answer.token_count += 1
            if not tracker.see(token) and (text := stream.feed(token)):
                yield Piece(text, tracker.thinking)
            logits = engine.extend([token])
            self._held.append(token)
            answer.decode_s = time.perf_counter() - started_s
        if text := stream.flush():
            yield Piece(text, tracker.thinking)

    def _common_prefix(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that are held already; the last one is always computed anew."""
        limit = min(len(self._held), len(prompt) - 1)
        count = 0
        while count < limit and self._held[count] == prompt[count]:
            count += 1
        return count
