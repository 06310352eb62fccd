"""Drafting with small real models: the same greedy tokens, fewer passes where guesses stand."""

import numpy as np
import pytest
import torch
from gguf_mtp import agreeing_model

from infer.generation.decoding import Decoding
from infer.generation.draft import Drafting
from infer.generation.generate import Answer, Conversation
from infer.generation.sampler import Sampler, SamplerConfig
from infer.kernels.ggml_cpu import GgmlKernels
from infer.text.tokenizer import Tokenizer
from shared.daemon_options import OWN_MTP

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def drawn(decoding, sampler, count):
    tokens = []
    for _ in range(count):
        tokens.append(decoding.draw(sampler))
        decoding.take(tokens[-1], sampler)
    return tokens


@pytest.fixture
def tiny(gguf_factory, tmp_path):
    return gguf_factory.hy3_model(mtp=True, seed=1).write(tmp_path / "tiny.gguf")


def greedy_tokens(model, drafting, count):
    decoding = Drafting(model) if drafting else Decoding(model)
    decoding.extend(PROMPT)
    return drawn(decoding, Sampler(SamplerConfig(temperature=0)), count), decoding


@pytest.mark.parametrize("exact", [True, False])
def test_a_real_models_greedy_answer_is_the_same(tiny, local_model, exact):
    made = {"exact": exact, "context": 160, "mtp": OWN_MTP}
    expected, _ = greedy_tokens(local_model(tiny, GgmlKernels, **made), False, 100)
    tokens, drafting = greedy_tokens(local_model(tiny, GgmlKernels, **made), True, 100)
    assert tokens == expected
    assert drafting.guessed_count > drafting.accepted_count


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_so_it_is_where_many_guesses_stand(local_model, tmp_path, seed):
    """And it takes fewer passes through the model."""
    path = agreeing_model(0.01, seed=seed).write(tmp_path / "agreeing.gguf")
    made = {"exact": False, "context": 160, "mtp": OWN_MTP}
    plain = local_model(path, GgmlKernels, **made)
    expected, _ = greedy_tokens(plain, False, 100)
    model = local_model(path, GgmlKernels, **made)
    tokens, drafting = greedy_tokens(model, True, 100)
    assert tokens == expected
    assert 0.1 < drafting.accepted_count / drafting.guessed_count < 0.95
    assert model.read_counts[1] == 1 + drafting.guessed_count < plain.read_counts[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["hy3", "glm"])
def test_the_oracles_greedy_answer_is_the_same(shared_dir, local_model, family, exact):
    path = shared_dir / "oracle" / f"{family}-mtp-udmix.gguf"
    made = {"exact": exact, "context": 160, "mtp": OWN_MTP}
    expected, _ = greedy_tokens(local_model(path, GgmlKernels, **made), False, 100)
    tokens, _ = greedy_tokens(local_model(path, GgmlKernels, **made), True, 100)
    assert tokens == expected


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["hy3", "glm"])
def test_two_tokens_at_once_have_the_bits_of_one_by_one(shared_dir, local_model, family, exact):
    """What makes greedy answers the same: verification computes nothing else."""
    path = shared_dir / "oracle" / f"{family}-mtp-udmix.gguf"
    ids = np.load(shared_dir / "oracle" / f"{family}.npz")["ids"].ravel().tolist()
    single, double = (local_model(path, GgmlKernels, exact=exact, chunk=n) for n in (1, 2))
    assert (single.logits(ids) == double.logits(ids)).all()


def test_a_conversation_goes_on_over_drafting(tiny, local_model):
    """Two answers, the second behind the first, with a prompt that differs in the middle."""
    greedy = Sampler(SamplerConfig(temperature=0))

    def answers(drafting):
        model = local_model(tiny, GgmlKernels, context=160, mtp=OWN_MTP)
        decoding = Drafting(model) if drafting else Decoding(model)
        tokenizer = Tokenizer.from_metadata(model.index.metadata)
        conversation = Conversation(model, tokenizer, decoding)
        texts = []
        for prompt in (PROMPT, [*PROMPT, 7, 7], [*PROMPT[:4], 8, 9, 10]):
            pieces = conversation.answer(prompt, greedy, 12, Answer())
            texts.append("".join(piece.text for piece in pieces))
        return texts

    assert answers(True) == answers(False)


def test_drafting_goes_on_from_saved_planes(tiny, local_model):
    """Whatever was waiting when they were saved; rows are written anew, not read."""
    made = {"context": 160, "mtp": OWN_MTP}
    greedy = Sampler(SamplerConfig(temperature=0))
    before = Drafting(local_model(tiny, GgmlKernels, **made))
    before.extend(PROMPT)
    held = [*PROMPT, *drawn(before, greedy, 20)]
    after = Drafting(local_model(tiny, GgmlKernels, **made))
    assert {name.partition("_")[0] for name in after.planes()} == {"keys", "values", "mtp"}
    for name, plane in after.planes().items():
        plane.fill_(torch.nan)
        plane[:, : len(held)] = before.planes()[name][:, : len(held)]
    after.restored(len(held))
    kept = after.rewind(len(held))
    assert kept >= len(held) - 3
    after.extend([*held[kept:], 7])
    before.extend([*held[before.rewind(len(held)) :], 7])
    assert drawn(after, greedy, 30) == drawn(before, greedy, 30)
