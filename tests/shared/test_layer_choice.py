"""Which layers are streamed: as few as do, spread out, none larger than need be."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shared.layer_choice import NOTHING_STREAMED, Residents, choose_layers

SIZES = st.dictionaries(st.integers(0, 99), st.integers(1, 1000), max_size=30)


def choose(layer_bytes, freed_bytes):
    residents = Residents(sum(layer_bytes.values()), layer_bytes)
    return choose_layers(residents, lambda choice: choice.freed_bytes >= freed_bytes)


def test_they_are_spread_over_the_model():
    layers = choose(dict.fromkeys(range(80), 10), 380).layers
    assert len(layers) == 40
    assert {after - before for before, after in pairwise(layers)} == {2}


def test_a_large_layer_stays_as_long_as_others_do():
    sizes = dict.fromkeys(range(8), 10) | {0: 13, 4: 13}
    assert choose(sizes, 40).layers == (1, 2, 3, 5, 6, 7)
    assert len(choose(sizes, 47).layers) == 7


@given(SIZES, st.integers(0, 30_000))
def test_they_free_enough_or_the_most_that_can_be(layer_bytes, freed_bytes):
    choice = choose(layer_bytes, freed_bytes)
    assert list(choice.layers) == sorted(set(choice.layers))
    assert set(choice.layers) <= set(layer_bytes)
    sizes = [layer_bytes[layer] for layer in choice.layers]
    assert choice.streamed_bytes == sum(sizes)
    assert choice.buffers_bytes == 2 * max(sizes, default=0)
    if choice.freed_bytes < freed_bytes:
        assert choose(layer_bytes, freed_bytes + 1) == choice
        assert choice.freed_bytes >= 0, "all in place is one of the choices"


@given(SIZES, st.integers(0, 30_000))
def test_what_is_wanted_is_never_exceeded(layer_bytes, wanted_bytes):
    residents = Residents(sum(layer_bytes.values()), layer_bytes, wanted_bytes)
    choice = choose_layers(residents, lambda _: False)
    kept_bytes = sum(layer_bytes.values()) - choice.streamed_bytes
    assert kept_bytes <= wanted_bytes
    if wanted_bytes >= sum(layer_bytes.values()):
        assert choice == NOTHING_STREAMED
