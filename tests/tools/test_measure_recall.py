"""Recall is measured of every token, whether its experts had to be read or not."""

from pathlib import Path

from measure_recall import NoCorrection, measure

from infer.config import ModelConfig
from infer.session import Session

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-hy3-iq2mix.gguf"


def test_tokens_that_miss_nothing_are_counted_too():
    ids = list(range(40, 56))
    with Session(ModelConfig(model=DEMO, device="cpu", prefetch="off", ctx=64)) as session:
        first, again = (measure(session, ids, NoCorrection) for _ in range(2))
    assert first.chosen_count[:, 1].sum() > 0
    assert (again.chosen_count == first.chosen_count).all()
    assert (again.found == first.found).all()
    assert 0.2 < again.recall(1, again.candidate_count) < 1
