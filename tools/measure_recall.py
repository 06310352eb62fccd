"""How many of the experts that a router chooses are foreseen from the layers before it.

    python tools/measure_recall.py MODEL.gguf --file TEXT.txt [--tokens 800] [--json]

The text is computed as decode does, token by token, by the same code that gives hints. Recall is of
the router's choice: among as many experts as it chooses, and among a margin more; from the plain
gate and with the correction that is learnt on the way. On random weights it means nothing.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from infer.ahead.predict import Correction, Floats, Predictor
from infer.ahead.prefetch import MAX_DEPTH, Integers, margin_count
from infer.blocks.moe import MoeFfn
from infer.config import ModelConfig
from infer.session import Session
from shared.command import run_command

SKIPPED_SHARE = 0.25  # at the beginning, where the correction has learnt little


class NoCorrection(Correction):
    """The plain gate."""

    def __init__(self, _n_experts: int) -> None:
        """There is nothing to keep."""

    def apply(self, scores: Floats) -> Floats:
        return scores

    def learn(self, scores: Floats, actual: Floats) -> None:
        """It does not."""


class WatchfulPredictor(Predictor):
    """Guesses for tokens too that miss no expert, where the product has no use for it."""

    sees_hits = True


class RecallMeter:
    """Hears every guess and every choice; `found` [layer, distance, rank] and `chosen` [layer]."""

    def __init__(self, layers: Sequence[int], n_layers: int, top_k: int) -> None:
        self.candidate_count = top_k + margin_count(top_k)
        self.found = np.zeros((n_layers, MAX_DEPTH + 1, self.candidate_count), np.int64)
        self.chosen_count = np.zeros((n_layers, MAX_DEPTH + 1), np.int64)
        self.counting = False
        self._layers = list(layers)
        self._guesses: dict[int, dict[int, Integers]] = {}

    def pause(self) -> None:
        self._guesses.clear()

    def targets(self, layer: int) -> Sequence[tuple[int, int]]:
        behind = [number for number in self._layers if number > layer]
        return list(enumerate(behind[:MAX_DEPTH], 1))

    def forecast(self, forecasts: Mapping[tuple[int, int], Integers]) -> None:
        for (distance, layer), ranked in forecasts.items():
            self._guesses.setdefault(layer, {})[distance] = ranked

    def chosen(self, layer: int, experts: Sequence[int]) -> None:
        for distance, ranked in self._guesses.pop(layer, {}).items():
            if self.counting:
                self.found[layer, distance] += np.isin(ranked, experts)
                self.chosen_count[layer, distance] += len(experts)

    def recall(self, distance: int, count: int) -> float:
        found = self.found[:, distance, :count].sum()
        return float(found / self.chosen_count[:, distance].sum())


def measure(session: Session, ids: list[int], correction: type[Correction]) -> RecallMeter:
    engine = session.engine
    shape, top_k = engine.shape, engine.client.experts.top_k
    layers = engine.model.layers
    numbers = [number for number, layer in enumerate(layers) if isinstance(layer.ffn, MoeFfn)]
    meter = RecallMeter(numbers, len(layers), top_k)
    engine.model.foresight = WatchfulPredictor(engine.kernels, shape.eps, layers, meter, correction)
    engine.kv.truncate(0)
    for place, token in enumerate(ids):
        meter.counting = place >= SKIPPED_SHARE * len(ids)
        if engine.kv.length == engine.kv.context:
            engine.kv.truncate(0)
        engine.extend([token])
    return meter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--file", type=Path, required=True, metavar="TEXT.txt")
    parser.add_argument("--tokens", type=int, default=800, metavar="N")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    config = ModelConfig(model=arguments.model, device="cpu", prefetch="off")
    rows = []
    with Session(config) as session:
        ids = session.tokenizer.encode(arguments.file.read_text(encoding="utf-8"))[
            : arguments.tokens
        ]
        top_k = session.engine.client.experts.top_k
        wide = top_k + margin_count(top_k)
        for gate, correction in (("plain", NoCorrection), ("corrected", Correction)):
            meter = measure(session, ids, correction)
            for distance in range(1, MAX_DEPTH + 1):
                rows.append(
                    {
                        "gate": gate,
                        "layers_ahead": distance,
                        "tokens": len(ids),
                        f"recall_at_{top_k}": round(meter.recall(distance, top_k), 4),
                        f"recall_at_{wide}": round(meter.recall(distance, wide), 4),
                    }
                )
    if arguments.json:
        print(json.dumps(rows))
        return
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>12}" for value in row.values()))


if __name__ == "__main__":
    sys.exit(run_command("measure_recall", main))
