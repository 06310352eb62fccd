"""A token decoded through recorded graphs: the same bits as the calls one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from infer.config import ModelConfig
from infer.session import Session

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-hy3-iq2mix.gguf"
PROMPT, DECODED = list(range(20, 31)), list(range(40, 60))

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def rows_of(session: Session, tap) -> np.ndarray:
    """Logits of tokens given one at a time; with a tap the engine makes the calls one by one."""
    engine = session.engine
    engine.kv.truncate(0)
    engine.extend(PROMPT)
    return np.stack([engine.extend([token], tap) for token in DECODED])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("gpu_cache", ["auto", "6M"])
def test_graphs_give_the_bits_of_the_calls(exact, gpu_cache):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    config = ModelConfig(
        model=DEMO, device="cuda:0", exact=exact, gpu_cache=gpu_cache, host_cache="10M", ctx=512
    )
    with Session(config) as session:
        one_by_one = rows_of(session, lambda *_: None)
        recorded = rows_of(session, None)
        assert np.array_equal(one_by_one, recorded)
        times = session.engine.graphs.times
        assert times.token_count == len(DECODED)
        assert (times.misses_s > 0) == (gpu_cache != "auto")
