import pytest

from infer.text.thinking import ThinkingTracker


@pytest.mark.parametrize("suffix", ["", ":opensource"])
def test_reasoning_is_what_stands_between_think_tokens(small_tokenizer, suffix):
    tokenizer = small_tokenizer(extra=[(f"<think{suffix}>", 3), (f"</think{suffix}>", 3)])
    opens, closes = (tokenizer.token_id(f"<{s}think{suffix}>") for s in ("", "/"))
    tracker = ThinkingTracker(tokenizer, [97, opens])
    assert tracker.thinking
    assert not tracker.see(98)
    assert tracker.thinking
    assert tracker.see(closes)
    assert not tracker.thinking
    assert not ThinkingTracker(tokenizer, [opens, closes]).thinking


def test_without_think_tokens_nothing_is_reasoning(small_tokenizer):
    assert not ThinkingTracker(small_tokenizer(), [60, 116]).thinking


def test_think_tokens_may_be_user_defined(small_tokenizer):
    tokenizer = small_tokenizer(extra=[("<think>", 4), ("</think>", 4)])
    tracker = ThinkingTracker(tokenizer, [97, 258])
    assert tracker.thinking
    assert tracker.see(259)
    assert not tracker.thinking
