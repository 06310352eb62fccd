"""Generating an answer: prefill what is new, then one token after the other until a stop."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from infer.engine import Engine
from infer.generation.decoding import Decoding
from infer.generation.sampler import Sampler
from infer.text.text_stream import TextStream
from infer.text.thinking import ThinkingTracker
from infer.text.tokenizer import Tokenizer


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


# Fills planes with what is known of a prompt's beginning; how many tokens that is.
Recall = Callable[[Sequence[int], dict[str, Tensor]], int]
# Takes how many tokens are to be computed, while the block runs.
Watch = Callable[[int], AbstractContextManager[None]]


def recall_nothing(_prompt: Sequence[int], _planes: dict[str, Tensor]) -> int:
    return 0


def watch_nothing(_token_count: int) -> AbstractContextManager[None]:
    return nullcontext()


class Conversation:
    """The tokens that the KV cache holds, so that a longer prompt prefills only its new tail."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        decoding: Decoding | None = None,
        recall: Recall = recall_nothing,
        watch: Watch = watch_nothing,
    ) -> None:
        """recall: asked once for what is to begin a conversation; watch: sees each prefill."""
        self._engine = engine
        self._recall = recall
        self._watch = watch
        self._decoding = decoding or Decoding(engine)
        self._tokenizer = tokenizer
        self._held: list[int] = []

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens that `planes` begin with."""
        return tuple(self._held[: self._decoding.whole_count])

    @property
    def planes(self) -> dict[str, Tensor]:
        return self._decoding.planes()

    def reset(self) -> None:
        self._held.clear()
        self._decoding.rewind(0)

    def resume(self, ids: Sequence[int]) -> None:
        """The planes have been filled with these tokens since `reset`."""
        assert not self._held
        self._decoding.restored(len(ids))
        self._held += ids

    def answer(
        self, prompt: Sequence[int], sampler: Sampler, max_tokens: int, answer: Answer
    ) -> Iterator[Piece]:
        """Pieces of the answer as they come; closing the iterator ends the answer.

        max_tokens: 0 for as many as the context holds. RequestError if the prompt does not fit.
        """
        engine, decoding = self._engine, self._decoding
        started_s = time.perf_counter()
        self._prefill(prompt, answer)
        answer.prefill_s = time.perf_counter() - started_s
        room_count = engine.kv.context - engine.kv.length
        stream = TextStream(self._tokenizer)
        tracker = ThinkingTracker(self._tokenizer, prompt)
        started_s = time.perf_counter()
        for _ in range(min(max_tokens, room_count) if max_tokens else room_count):
            token = decoding.draw(sampler)
            if token in self._tokenizer.stop_ids:
                answer.stopped = True
                break
            answer.token_count += 1
            if not tracker.see(token) and (text := stream.feed(token)):
                yield Piece(text, tracker.thinking)
            decoding.take(token, sampler)
            self._held.append(token)
            answer.decode_s = time.perf_counter() - started_s
        if text := stream.flush():
            yield Piece(text, tracker.thinking)

    def _prefill(self, prompt: Sequence[int], answer: Answer) -> None:
        """Compute what is new. Broken off, it leaves whole chunks, and `held` says which."""
        kv, decoding = self._engine.kv, self._decoding
        kv.make_room(len(prompt) - kv.length)  # before anything is forgotten for it
        if not self._held:
            self.reset()
            self.resume(prompt[: self._recall(prompt, self.planes)])
        kept_count = decoding.rewind(self._common_prefix(prompt))
        del self._held[kept_count:]
        new = list(prompt[kept_count:])
        answer.prompt_count, answer.prefilled_count = len(prompt), len(new)
        try:
            with self._watch(len(new)):
                decoding.extend(new)
        finally:
            self._held += new[: kv.length - kept_count]

    def _common_prefix(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that are held already; the last one is always computed anew."""
        limit = min(len(self._held), self._engine.kv.length, len(prompt) - 1)
        count = 0
        while count < limit and self._held[count] == prompt[count]:
            count += 1
        return count
