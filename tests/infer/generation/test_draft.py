"""Drafting over a chain of tokens whose probabilities are known."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from infer.caches.cache import Cache
from infer.generation.draft import Drafting
from infer.generation.sampler import Sampler, SamplerConfig
from infer.generation.speculation import acceptance
from shared.errors import ReadFailed, RequestError

VOCAB_COUNT = 5
CPU = torch.device("cpu")


@dataclass
class _Shape:
    n_layers: int = 2


class ChainBlock:
    """Guesses from a table by the last token; checks that it is given the right hidden state."""

    def __init__(self, table):
        self.table = table
        self.cache = self
        self.rows = []  # (token, position of the hidden state it was given)

    def allocate(self, context, exact, device):
        return Cache(context)

    def forward(self, ids, hidden, kv, exact, last_only, tap=None):
        assert len(ids) == len(hidden)
        positions = hidden[:, 0].int().tolist()
        del self.rows[kv.length :]
        assert positions == list(range(kv.length, kv.length + len(ids)))
        self.rows += zip(ids.tolist(), positions, strict=True)
        kv.length += len(ids)
        return self.table[ids[-1:] if last_only else ids]


@dataclass
class ChainEngine:
    """The next token depends on the last one alone; a hidden state is its token's position."""

    table: np.ndarray  # float32 [vocab, vocab]: logits by the last token
    mtp: ChainBlock
    context: int = 64
    chunk: int = 4
    fails: bool = False
    exact: bool = True
    device: torch.device = CPU
    shape: _Shape = field(default_factory=_Shape)
    held: list[int] = field(default_factory=list)
    pass_count: int = 0
    verified: list[int] = field(default_factory=list)  # tokens that were computed with a guess

    def __post_init__(self):
        self.kv = Cache(self.context)

    def check(self, ids):
        self.kv.make_room(len(ids))

    def redo_if_lost(self, compute):
        return compute()

    def extend(self, ids, tap):
        return self._run(ids, tap)[-1]

    def logits(self, ids, tap):
        token, _guess = ids
        self.verified.append(token)
        return self._run(ids, tap)

    def _run(self, ids, tap):
        self.check(ids)
        if self.fails:
            raise ReadFailed("the disk is gone", "get another")
        start = self.kv.length
        positions = torch.arange(start, start + len(ids), dtype=torch.float32)
        tap("hidden.0", positions[:, None] - 1)
        tap("hidden.2", positions[:, None])
        self.held[start:] = ids
        self.kv.length += len(ids)
        self.pass_count += 1
        return self.table[list(ids)]


@pytest.fixture
def chain():
    rng = np.random.default_rng(7)
    model = rng.normal(0, 1.5, (VOCAB_COUNT, VOCAB_COUNT)).astype(np.float32)
    guesses = torch.from_numpy(model + rng.normal(0, 1, model.shape).astype(np.float32))
    return lambda **knobs: ChainEngine(model, ChainBlock(guesses), **knobs)


def drawn(decoding, sampler, count):
    tokens = []
    for _ in range(count):
        tokens.append(decoding.draw(sampler))
        decoding.take(tokens[-1], sampler)
    return tokens


def test_transitions_have_the_models_probabilities(chain):
    count = 30_000
    engine = chain(context=count + 8, chunk=16)
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=0.8, seed=3))
    drafting.extend([0])
    tokens = drawn(drafting, sampler, count)
    pairs = np.zeros((VOCAB_COUNT, VOCAB_COUNT))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    expected = np.array(
        [_dense(Sampler(SamplerConfig(temperature=0.8)).distribution(row)) for row in engine.table]
    )
    counts = pairs.sum(1, keepdims=True)
    # The standard deviation of a share p of n draws; 5 of them are missed once in a million.
    deviation = np.sqrt(expected * (1 - expected) / counts)
    assert (np.abs(pairs / counts - expected) < 5 * deviation).all()
    assert 0.3 < drafting.accepted_count / drafting.guessed_count < 0.95
    assert engine.pass_count < count


def _dense(choices):
    values = np.zeros(VOCAB_COUNT)
    values[choices.ids] = choices.probabilities
    return values


def test_guesses_stand_as_often_as_the_algebra_says(chain):
    engine = chain(context=20_000)
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=5))
    drafting.extend([0])
    drawn(drafting, sampler, 12_000)
    stands = []
    for model, guesses in zip(engine.table, engine.mtp.table.numpy(), strict=True):
        target, draft = sampler.distribution(model), sampler.distribution(guesses)
        stands.append(
            sum(p * acceptance(target, draft, int(guess)) for guess, p in zip(*draft, strict=True))
        )
    after = np.array(engine.verified)
    expected = np.array(stands)[after]
    deviation = np.sqrt((expected * (1 - expected)).sum())
    assert abs(drafting.accepted_count - expected.sum()) < 5 * deviation
    assert drafting.guessed_count == len(after)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_greedy_tokens_are_the_same(chain, chunk):
    greedy = Sampler(SamplerConfig(temperature=0))
    engine = chain(chunk=chunk)
    drafting = Drafting(engine)
    drafting.extend([2, 0, 1, 3, 3])
    tokens = drawn(drafting, greedy, 40)
    last, expected = 3, []
    for _ in tokens:
        last = int(engine.table[last].argmax())
        expected.append(last)
    assert tokens == expected
    assert engine.held[: engine.kv.length][:45] == [2, 0, 1, 3, 3, *expected]


def test_rows_are_those_of_tokens_that_stand(chain):
    engine = chain()
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=1))
    drafting.extend([2, 0, 1])
    held = [2, 0, 1, *drawn(drafting, sampler, 30)]
    assert 0 < drafting.accepted_count < drafting.guessed_count
    assert [token for token, _ in engine.mtp.rows] == held[1 : 1 + len(engine.mtp.rows)]
    assert len(engine.mtp.rows) >= len(held) - 3


def test_the_last_places_of_the_context_are_used(chain):
    engine = chain(context=12)
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=1))
    drafting.extend([2, 0, 1])
    assert len(drawn(drafting, sampler, 9)) == 9
    assert engine.kv.length == 12
    with pytest.raises(RequestError):
        drafting.extend([1])


@pytest.mark.parametrize("kept_count", [0, 1, 3, 4, 7])
def test_after_going_back_all_is_as_if_never_gone_on(chain, kept_count):
    engine = chain()
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=1))
    drafting.extend([2, 0, 1])
    held = [2, 0, 1, *drawn(drafting, sampler, 6)]
    kept = drafting.rewind(kept_count)
    assert kept_count - 1 <= kept <= kept_count or kept == 0
    drafting.extend([*held[kept:kept_count], 4, 2])
    assert engine.held[: engine.kv.length] == [*held[:kept_count], 4, 2]
    assert [token for token, _ in engine.mtp.rows] == [*held[:kept_count], 4, 2][1:]


def test_nothing_is_computed_again_where_an_answer_goes_on(chain):
    engine = chain()
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=2))
    drafting.extend([2, 0, 1])
    while drafting.accepted_count == drafting.guessed_count:
        drawn(drafting, sampler, 1)
    assert drafting.rewind(engine.kv.length) == engine.kv.length


def test_a_failed_pass_leaves_a_state_to_go_on_from(chain):
    engine = chain()
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=1))
    drafting.extend([2, 0, 1])
    held = [2, 0, 1, *drawn(drafting, sampler, 6)]
    token = drafting.draw(sampler)
    while drafting._held_ahead:
        drafting.take(token, sampler)
        held.append(token)
        token = drafting.draw(sampler)
    engine.fails = True
    with pytest.raises(ReadFailed):
        drafting.take(token, sampler)
    engine.fails = False
    kept = drafting.rewind(len(held))
    assert kept >= len(held) - 1
    drafting.extend([*held[kept:], 4])
    assert engine.held[: engine.kv.length] == [*held, 4]
    assert [token for token, _ in engine.mtp.rows] == [*held, 4][1:]


class _BreaksOffBlock:
    """Ctrl-C while the block computes its rows, which the model's are there for already."""

    def __init__(self, block):
        self._block = block
        self.breaks = False
        self.cache = block

    def forward(self, *arguments, **names):
        if self.breaks:
            raise KeyboardInterrupt
        return self._block.forward(*arguments, **names)


def test_rows_that_a_broken_off_pass_lacks_are_not_vouched_for(chain):
    engine = chain()
    engine.mtp = block = _BreaksOffBlock(engine.mtp)
    drafting, sampler = Drafting(engine), Sampler(SamplerConfig(temperature=1, seed=1))
    drafting.extend([2, 0, 1])
    assert drafting.whole_count == 3
    block.breaks = True
    with pytest.raises(KeyboardInterrupt):
        drafting.extend([4, 3, 2])
    assert engine.kv.length == 6
    assert drafting.whole_count == 4, "rows of tokens 1 and 2, and two tokens that need none"
    block.breaks = False
    kept = drafting.rewind(6)
    drafting.extend([2, 0, 1, 4, 3, 2, 1][kept:])
    held = [2, 0, 1, 4, 3, 2, 1, *drawn(drafting, sampler, 8)]
    assert engine.held[: len(held)] == held
    rows = [token for token, _ in engine.mtp._block.rows]
    assert rows == held[1 : 1 + len(rows)]
