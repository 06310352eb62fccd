"""What a prompt has read ahead: how much, in which order, and what of it was guessed."""

import numpy as np
import pytest
import torch

from infer.ahead.predict import MAX_TOKENS
from infer.ahead.prompt_ahead import HORIZON_S, MAX_DISTANCE, WINDOW, PromptAhead

N_EXPERTS, WAVE = 100, 10
LAYERS = (1, 2, 4)
DENSE = 3
LAYER_COUNT = 6
CHUNK = torch.zeros(50, 8)


class Source:
    """present, below: what is in the tier that is computed from, in the one below; by layer."""

    def __init__(self):
        self.present = {layer: np.zeros(N_EXPERTS, bool) for layer in LAYERS}
        self.below = {layer: np.zeros(N_EXPERTS, bool) for layer in LAYERS}
        self.hints = []

    def wave_experts(self, layer):
        return WAVE

    def absent(self, layer, experts):
        return ~self.present[layer][experts]

    def unread(self, layer, experts):
        return ~(self.present[layer] | self.below[layer])[experts]

    def hint(self, layer, experts, layers_ahead):
        self.hints.append((layer, experts.tolist(), layers_ahead))

    def take(self):
        hints, self.hints = self.hints, []
        return hints


class Guess:
    """Sure of the same experts of every layer."""

    def __init__(self, sure=range(N_EXPERTS), layers=LAYERS):
        self.layers = list(layers)
        self.sure = np.array(sure, int)
        self.asked, self.learnt, self.forgotten = [], [], 0

    def forget(self):
        self.forgotten += 1

    def likely(self, residual, distance, layer, candidates):
        assert residual is not None
        self.asked.append((distance, layer))
        return self.sure[np.isin(self.sure, candidates)]

    def learn(self, layer, touched):
        self.learnt.append((layer, touched.tolist()))


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(source, clock):
    def begun(guess=None, tokens=CHUNK, end=LAYER_COUNT):
        ahead = PromptAhead(source, N_EXPERTS, guess, clock)
        ahead.begin(tokens, end)
        return ahead

    return begun


def waves_of(first, count):
    return [np.arange(first + i * WAVE, first + (i + 1) * WAVE) for i in range(count)]


def test_waves_are_hinted_as_far_as_the_window_goes(make, source):
    ahead = make()
    ahead.advance(1, waves_of(0, 9))
    hints = source.take()
    wave_count = -(-WINDOW // WAVE)
    assert [sections for _, _, sections in hints] == list(range(1, wave_count + 1))
    assert [expert for _, experts, _ in hints for expert in experts] == list(range(WINDOW))


def test_the_window_moves_on_as_waves_are_asked_for(make, source):
    """Each expert is hinted once, in order, by the section in which it is read."""
    ahead, hinted = make(), []
    for done in range(1, 10):
        ahead.advance(1, waves_of(done * WAVE, 10 - done))
        for layer, experts, sections in source.take():
            assert layer == 1
            hinted += experts
            assert {expert // WAVE for expert in experts} == {done - 1 + sections}
        assert len(hinted) == min(N_EXPERTS - WAVE, (done - 1) * WAVE + WINDOW)
    assert hinted == list(range(WAVE, N_EXPERTS))


def test_only_what_is_in_no_tier_counts_but_all_of_the_next_wave_is_brought_up(make, source):
    source.present[1][:15] = True
    source.below[1][15:30] = True
    ahead = make()
    ahead.advance(1, waves_of(0, 9))
    hints = source.take()
    assert hints[0] == (1, [*range(30, 40)], 4), "nothing of what is there, or below"
    assert sum(len(experts) for _, experts, _ in hints) == WINDOW
    ahead.advance(1, waves_of(10, 8))
    assert source.take() == [(1, [*range(15, 20)], 1)]
    ahead.advance(1, waves_of(20, 7))
    assert source.take() == [(1, [*range(20, 30)], 1)]


def test_when_nothing_of_a_layer_is_left_to_hint_the_next_layers_are(make, source):
    source.present[2][[3, 20]] = True
    source.below[2][21] = True
    guess = Guess(sure=())
    ahead = make(guess)
    guess.sure = np.array([7, 3, 90, *range(20, 46)])
    guess.asked.clear()
    ahead.stand(1, CHUNK)
    assert not ahead.chosen(1, np.arange(70, 90)).any()
    ahead.advance(1, waves_of(80, 1))
    (_, own, _), (layer, experts, sections), *further = source.take()
    assert own == [*range(80, 90)]
    assert (layer, experts) == (2, [7, 90, *range(22, 46)]), "the surest first"
    assert sections == 1 + N_EXPERTS // WAVE, "it holds until the last wave"
    assert further == [(4, [7, 3, 90, *range(20, 29)], 1 + 2 * N_EXPERTS // WAVE)]
    assert guess.asked == [(1, 2), (2, 4)]
    ahead.advance(1, ())
    assert source.take() == [(4, [*range(29, 39)], 2 * N_EXPERTS // WAVE)]
    assert guess.asked == [(1, 2), (2, 4)], "once a layer"
    ahead.stand(2, CHUNK)
    hinted = ahead.chosen(2, np.array([3, 7, 8, 21, 22, 90]))
    assert hinted.tolist() == [False, True, False, False, True, True]
    assert guess.learnt[-1] == (2, [3, 7, 8, 21, 22, 90])


def test_what_was_guessed_wrong_makes_room_when_its_layer_has_come(make, source):
    guess = Guess(sure=range(64))
    ahead = make(guess)
    assert source.take() == [(1, [*range(WINDOW)], 10)]
    ahead.stand(1, CHUNK)
    ahead.chosen(1, np.arange(60, 70))
    ahead.advance(1, ())
    assert source.take() == [(2, [*range(WINDOW)], 10)]


def test_a_layer_without_experts_looks_further_too(make, source):
    guess = Guess(sure=())
    ahead = make(guess)
    guess.sure = np.arange(30)
    ahead.stand(DENSE, CHUNK)
    assert source.take() == [(4, [*range(30)], 10)]
    assert ahead.chosen(4, np.arange(40)).sum() == 30


def test_where_all_is_there_nothing_is_guessed(make, source):
    for layer in LAYERS:
        source.present[layer][:] = True
    guess = Guess()
    ahead = make(guess)
    for layer in LAYERS:
        ahead.stand(layer, CHUNK)
        ahead.chosen(layer, np.arange(N_EXPERTS))
        ahead.advance(layer, ())
    assert source.take() == []
    assert guess.asked == []


def test_layers_from_the_end_on_are_not_guessed(make, source):
    guess = Guess(sure=range(4))
    ahead = make(guess, end=2)
    ahead.stand(1, CHUNK)
    ahead.chosen(1, np.arange(10))
    ahead.advance(1, ())
    assert [layer for layer, _, _ in source.take()] == [1]


@pytest.mark.parametrize("token_count", [1, MAX_TOKENS])
def test_few_tokens_are_not_guessed_for(token_count, make, source):
    ahead = make(Guess(), tokens=CHUNK[:token_count])
    ahead.stand(1, CHUNK[:token_count])
    ahead.chosen(1, np.arange(20))
    ahead.advance(1, waves_of(10, 1))
    assert source.take() == [(1, [*range(10, 20)], 1)]


def test_guesses_can_be_left_out(source, clock):
    ahead = PromptAhead(source, N_EXPERTS, Guess(), clock)
    ahead.guesses = False
    ahead.begin(CHUNK, LAYER_COUNT)
    ahead.stand(1, CHUNK)
    ahead.chosen(1, np.arange(20))
    ahead.advance(1, waves_of(10, 1))
    assert source.take() == [(1, [*range(10, 20)], 1)]


def test_a_chunk_begins_anew(make, source):
    guess = Guess(sure=range(64))
    ahead = make(guess)
    first = source.take()
    ahead.begin(CHUNK, LAYER_COUNT)
    assert source.take() == first
    assert guess.forgotten == 2


def test_what_is_needed_late_is_not_hinted_yet_but_the_next_wave_is(make, source, clock):
    ahead = make()
    for _ in range(30):
        clock.now_s += HORIZON_S / 4.5
        ahead.advance(1, ())
    clock.now_s += HORIZON_S / 4.5
    ahead.advance(1, waves_of(0, 9))
    assert [sections for _, _, sections in source.take()] == [1, 2, 3, 4]
    for _ in range(30):
        clock.now_s += 2 * HORIZON_S
        ahead.advance(1, ())
    ahead.advance(1, waves_of(0, 9))
    assert [sections for _, _, sections in source.take()] == [1]


def test_a_residual_stream_is_not_kept(make, source):
    """It may be large, and the plan knows nothing of it."""
    ahead = make(Guess(sure=range(4)))
    assert ahead._residual is None
    ahead.stand(DENSE, CHUNK)
    assert ahead._residual is None
    ahead.stand(4, CHUNK)
    ahead.advance(4, waves_of(10, 1))
    ahead.advance(4, ())
    assert ahead._residual is None


def test_it_looks_so_many_layers_ahead(source, clock):
    guess = Guess(layers=range(1, 9))
    for layer in guess.layers:
        source.present[layer] = np.ones(N_EXPERTS, bool)
        source.below[layer] = np.zeros(N_EXPERTS, bool)
        source.present[layer][:3] = False
    PromptAhead(source, N_EXPERTS, guess, clock).begin(CHUNK, 20)
    assert [layer for layer, _, _ in source.take()] == list(range(1, 1 + MAX_DISTANCE))
