"""The line about a long prompt, with a clock and a terminal of our own."""

import io

import pytest
import torch

from infer.chat.progress import PrefillProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class World:
    def __init__(self, stream):
        self.now_s = 100.0
        self.stream = stream
        self.progress = PrefillProgress(4, stream, lambda: self.now_s)

    def layers(self, token_count, each_s):
        """A chunk's layers as a model tells of them, each taking some time."""
        for layer in range(4):
            self.progress.tap(f"hidden.{layer}", torch.empty(token_count, 1))
            self.progress.tap(f"router_idx.{layer}", torch.empty(1, 1))
            self.now_s += each_s
        self.progress.tap("hidden.4", torch.empty(token_count, 1))

    @property
    def shown(self):
        return self.stream.getvalue().split("\r\x1b[K")


def test_tokens_percent_and_time_left():
    world = World(Terminal())
    with world.progress.prefill(1000):
        world.layers(400, 1.0)
        assert world.shown[1:] == [
            "100 of 1000 prompt tokens, 10%, 9 s left",
            "200 of 1000 prompt tokens, 20%, 8 s left",
            "300 of 1000 prompt tokens, 30%, 7 s left",
            "400 of 1000 prompt tokens, 40%, 6 s left",
        ]
        world.layers(600, 1.0)
        assert world.shown[-1] == "1000 of 1000 prompt tokens, 100%, 0 s left"
    assert world.shown[-1] == "", "the line is gone"


def test_within_a_second_nothing_is_shown():
    world = World(Terminal())
    with world.progress.prefill(100):
        world.layers(100, 0.2)
    assert world.stream.getvalue() == ""


def test_a_line_is_not_written_more_often_than_it_can_be_read():
    world = World(Terminal())
    with world.progress.prefill(10_000):
        for _ in range(100):
            world.layers(100, 0.01)
    assert len(world.shown) <= 3 + 3 / 0.2


def test_nothing_but_a_terminal_sees_it():
    world = World(io.StringIO())
    with world.progress.prefill(1000):
        world.layers(1000, 1.0)
    assert world.stream.getvalue() == ""


def test_the_line_goes_when_the_prompt_is_broken_off():
    world = World(Terminal())

    def broken_off():
        with world.progress.prefill(1000):
            world.layers(400, 1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert world.shown[-1] == ""


def test_decoding_is_not_watched():
    world = World(Terminal())
    world.layers(1, 5.0)
    assert world.stream.getvalue() == ""
