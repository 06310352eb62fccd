"""Replay a prompt put into decoding: what it costs what goes on beside it, or follows behind it.

    python tools/replay_scan.py gptoss20b_routing.npz [--shares 0.2,0.4] [--prompts 300,1000,8000]
        [--chunk 2048] [--rounds 0.5,1.5,inf] [--seeds 6]

Texts of the trace, drawn at random: 300 tokens of some fill the caches; one is decoded for 200
tokens (before); a prompt, made of others and of the begin of one more, is computed in chunks, layer
by layer; then the first text goes on (beside), or the last one (behind). Hits in percent of the
lookups of the first 50 tokens and of all, by the weight of prompts: see shared/scan.py; inf is in
full. Slots are a share of the experts, less what a section has in use and in reserve.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from number_lists import parse_count, parse_counts, parse_shares

from shared.command import run_command
from shared.policy import LfuAgeing
from shared.scan import SCAN_ROUNDS, USE_PARTS, use_parts

WARM_UP_TOKENS = 300
DECODE_TOKENS = 200
FIRST_TOKENS = 50
SHARES = "0.2,0.4"
PROMPTS = "300,1000,8000"
CHUNK = 2048

Tokens = npt.NDArray[np.uint8]  # [tokens, layers, top_k]


@dataclass(frozen=True)
class Texts:
    """experts [tokens, layers, top_k]; starts: where each text begins, and the end of the last."""

    experts: Tokens
    starts: list[int]

    @classmethod
    def load(cls, path: Path) -> "Texts":
        with np.load(path) as arrays:
            experts = arrays["experts"]
            return cls(experts, [*arrays["offsets"].tolist(), len(experts)])

    def text(self, number: int) -> Tokens:
        return self.experts[self.starts[number] : self.starts[number + 1]]

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)


class ScannedCache:
    """One tier's slots by the daemon's policy. scan_rounds: how much a prompt weighs."""

    def __init__(
        self, n_layers: int, n_experts: int, top_k: int, slot_count: int, scan_rounds: float
    ) -> None:
        self._shape = n_experts, top_k
        self._slot_count = slot_count
        self._scan_rounds = scan_rounds
        self._policy = LfuAgeing(n_layers * n_experts)
        self._inside = np.zeros(n_layers * n_experts, np.bool_)
        self._uses = np.zeros(n_layers * n_experts)

    def decode(self, tokens: Tokens) -> float:
        """Percent of the lookups that hit."""
        hit_count = 0
        for token in tokens:
            for layer, experts in enumerate(token):
                hit_count += self._serve(self._keys(layer, experts), np.ones(len(experts)))
        return 100 * hit_count / tokens.size

    def compute_prompt(self, tokens: Tokens, chunk: int) -> None:
        n_experts, top_k = self._shape
        weight = use_parts(len(tokens), top_k, n_experts, self._scan_rounds) / USE_PARTS
        wave = max(top_k, self._slot_count // 64)
        for first in range(0, len(tokens), chunk):
            part = tokens[first : first + chunk]
            for layer in range(part.shape[1]):
                experts, counts = np.unique(part[:, layer], return_counts=True)
                keys = self._keys(layer, experts)
                order = np.argsort(~self._inside[keys], kind="stable")  # as waves are made
                for at in range(0, len(order), wave):
                    places = order[at : at + wave]
                    self._serve(keys[places], weight * counts[places])

    def _keys(self, layer: int, experts: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        return experts.astype(np.int32) + np.int32(layer * self._shape[0])

    def _serve(self, keys: npt.NDArray[np.int32], uses: npt.NDArray[np.float64]) -> int:
        """A section; how many of its experts are there already."""
        self._uses[keys] = uses
        self._policy.absorb(self._uses)
        self._uses[keys] = 0
        missing = keys[~self._inside[keys]]
        over_count = int(self._inside.sum()) + len(missing) - self._slot_count
        if over_count > 0:
            self._inside[keys], kept = False, self._inside[keys]
            there = np.flatnonzero(self._inside).astype(np.int32)
            self._inside[there[self._policy.coldest(there, over_count)]] = False
            self._inside[keys] = kept
        self._inside[missing] = True
        return len(keys) - len(missing)


def replay(
    texts: Texts, share: float, prompt_count: int, chunk: int, scan_rounds: float, seed: int
) -> list[float]:
    """Hit rates: before; beside, of the first tokens and of all; behind, likewise."""
    rng = np.random.default_rng(seed)
    n_layers, top_k = texts.experts.shape[1:]
    n_experts = int(texts.experts.max()) + 1
    long = np.flatnonzero(texts.lengths() >= 2 * DECODE_TOKENS + FIRST_TOKENS)
    first, last = rng.choice(long, 2, replace=False)
    others = [n for n in rng.permutation(len(texts.starts) - 1) if n not in (first, last)]
    warm_up = np.concatenate([texts.text(n) for n in others[-9:]])[-WARM_UP_TOKENS:]
    filling = np.concatenate([texts.text(n) for n in others[:-9]])
    begin, behind = np.split(texts.text(last), [DECODE_TOKENS])
    prompt = np.concatenate([filling[: max(0, prompt_count - len(begin))], begin])[-prompt_count:]
    before, beside = np.split(texts.text(first), [DECODE_TOKENS])
    rates: list[float] = []
    for after in (beside, behind):
        slot_count = int(share * n_layers * n_experts) - 2 * top_k
        cache = ScannedCache(n_layers, n_experts, top_k, slot_count, scan_rounds)
        cache.decode(warm_up)
        before_pct = cache.decode(before)
        cache.compute_prompt(prompt, chunk)
        begun_pct = cache.decode(after[:FIRST_TOKENS])
        rest_pct = cache.decode(after[FIRST_TOKENS:DECODE_TOKENS])
        begun_share = FIRST_TOKENS / DECODE_TOKENS
        rates += [begun_pct, begun_share * begun_pct + (1 - begun_share) * rest_pct]
    return [before_pct, *rates]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE.npz")
    parser.add_argument("--shares", type=parse_shares, default=SHARES)
    parser.add_argument("--prompts", type=parse_counts, default=PROMPTS, help="tokens")
    parser.add_argument("--chunk", type=parse_count, default=CHUNK, help="tokens")
    parser.add_argument("--rounds", type=parse_shares, default=f"0.5,{SCAN_ROUNDS},inf")
    parser.add_argument("--seeds", type=parse_count, default=6)
    arguments = parser.parse_args()
    texts = Texts.load(arguments.trace)
    print("slots  prompt  rounds  before  beside: first, all  behind: first, all")
    for share in arguments.shares:
        for prompt_count in arguments.prompts:
            for rounds in arguments.rounds:
                how = share, prompt_count, arguments.chunk, rounds
                rates = [replay(texts, *how, seed) for seed in range(arguments.seeds)]
                means = "  ".join(f"{mean:6.1f}" for mean in np.mean(rates, axis=0))
                print(f"{share:5.0%}  {prompt_count:6}  {rounds:6}  {means}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command("replay_scan", main))
