"""Conversations over an engine that only counts: what is computed, kept and given out."""

from contextlib import contextmanager

import numpy as np
import pytest

from infer.generation.generate import Answer, Conversation
from infer.generation.sampler import Sampler, SamplerConfig
from shared.errors import RequestError


class CountingEngine:
    """Continues with the token after the last one it saw; keeps what it was given."""

    class _Kv:
        def __init__(self, context):
            self.context, self.length = context, 0

        def truncate(self, length):
            assert 0 <= length <= self.length
            self.length = length

        def make_room(self, token_count):
            if self.length + token_count > self.context:
                raise RequestError("too long", "shorten it")

        def planes(self):
            return {}

    def __init__(self, vocab_size, context=32):
        self.kv = self._Kv(context)
        self.vocab_size = vocab_size
        self.computed = []

    def extend(self, ids):
        self.kv.make_room(len(ids))
        self.computed.append(list(ids))
        self.kv.length += len(ids)
        return np.eye(self.vocab_size, dtype=np.float32)[ids[-1] + 1]


@pytest.fixture
def talk(small_tokenizer):
    tokenizer = small_tokenizer(extra=[("<end>", 3)], eos_token_id=258)
    engine = CountingEngine(tokenizer.vocab_size)
    conversation = Conversation(engine, tokenizer)

    def say(prompt, max_tokens=0):
        answer = Answer()
        sampler = Sampler(SamplerConfig(temperature=0))
        pieces = list(conversation.answer(prompt, sampler, max_tokens, answer))
        return "".join(piece.text for piece in pieces), answer

    return say, engine, conversation


def test_an_answer_ends_at_the_stop_token_and_does_not_show_it(talk):
    say, _, _ = talk
    text, answer = say([255])
    assert text == "ababc"  # tokens 256 and 257; 258 ends
    assert (answer.token_count, answer.stopped) == (2, True)


def test_a_longer_prompt_computes_only_its_new_tail(talk):
    say, engine, _ = talk
    say([10, 255])
    engine.computed.clear()
    _, answer = say([10, 255, 256, 257, 20, 255])
    assert engine.computed[0] == [20, 255]
    assert (answer.prompt_count, answer.prefilled_count) == (6, 2)


def test_another_prompt_computes_from_where_it_differs(talk):
    say, engine, _ = talk
    say([10, 11, 255])
    engine.computed.clear()
    say([10, 12, 255])
    assert engine.computed[0] == [12, 255]


def test_the_same_prompt_again_computes_its_last_token(talk):
    say, engine, _ = talk
    say([10, 255])
    engine.computed.clear()
    say([10, 255])
    assert engine.computed[0] == [255]


def test_reset_forgets(talk):
    say, engine, conversation = talk
    say([10, 255])
    conversation.reset()
    engine.computed.clear()
    say([10, 255])
    assert engine.computed[0] == [10, 255]


def test_limits_end_an_answer_unstopped(talk):
    say, engine, _ = talk
    _, answer = say([100], max_tokens=3)
    assert (answer.token_count, answer.stopped) == (3, False)
    _, answer = say([100])
    assert engine.kv.length == engine.kv.context
    assert not answer.stopped


def test_a_prompt_that_does_not_fit_changes_nothing_that_was_held(talk):
    say, engine, _ = talk
    say([10, 255])
    with pytest.raises(RequestError):
        say([10, 255, *range(100, 140)])
    engine.computed.clear()
    _, answer = say([10, 255, 256, 257, 20, 255])
    assert answer.prefilled_count < 6


def test_an_answer_broken_off_is_held_as_far_as_it_was_computed(talk):
    _, engine, conversation = talk
    pieces = conversation.answer([97], Sampler(SamplerConfig(temperature=0)), 0, Answer())
    assert [next(pieces).text for _ in range(2)]
    pieces.close()
    held = engine.kv.length
    engine.computed.clear()
    list(conversation.answer([97, 98, 255], Sampler(SamplerConfig(temperature=0)), 0, Answer()))
    assert held >= 2
    assert engine.computed[0] == [255]


def test_what_is_recalled_is_not_computed(small_tokenizer):
    engine = CountingEngine(small_tokenizer().vocab_size)
    asked = []

    def recall(prompt, planes):
        asked.append((list(prompt), planes))
        return 3

    conversation = Conversation(engine, small_tokenizer(), recall=recall)
    sampler = Sampler(SamplerConfig(temperature=0))
    list(conversation.answer([10, 11, 12, 100], sampler, 1, Answer()))
    assert engine.computed == [[100], [101]]
    assert conversation.held == (10, 11, 12, 100, 101)
    list(conversation.answer([10, 11, 90], sampler, 1, Answer()))
    assert asked == [([10, 11, 12, 100], {})], "only where nothing is held"
    conversation.reset()
    list(conversation.answer([10, 11, 12], sampler, 1, Answer()))
    assert engine.computed[-2:] == [[12], [13]], "the last token is computed in any case"


def test_a_prompt_broken_off_is_held_as_far_as_whole_chunks_went(small_tokenizer):
    class BreaksOff(CountingEngine):
        def extend(self, ids):
            if len(ids) > 4:
                super().extend(ids[:4])
                raise KeyboardInterrupt
            return super().extend(ids)

    engine = BreaksOff(small_tokenizer().vocab_size)
    conversation = Conversation(engine, small_tokenizer())
    sampler = Sampler(SamplerConfig(temperature=0))
    prompt = [10, 11, 12, 13, 14, 15, 100]
    with pytest.raises(KeyboardInterrupt):
        next(conversation.answer(prompt, sampler, 1, Answer()))
    assert conversation.held == (10, 11, 12, 13)
    answer = Answer()
    list(conversation.answer(prompt, sampler, 1, answer))
    assert (answer.prefilled_count, engine.computed[1]) == (3, [14, 15, 100])


def test_a_prefill_is_watched(small_tokenizer):
    engine = CountingEngine(small_tokenizer().vocab_size)
    seen = []

    @contextmanager
    def watch(token_count):
        seen.append(token_count)
        yield
        seen.append(list(engine.computed))

    conversation = Conversation(engine, small_tokenizer(), watch=watch)
    list(conversation.answer([10, 11, 100], Sampler(SamplerConfig(temperature=0)), 1, Answer()))
    assert seen == [3, [[10, 11, 100]]]
