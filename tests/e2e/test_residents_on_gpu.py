"""On a real GPU: the resident tensors there alone, and the same bits."""

import numpy as np
import pytest
import torch

from infer.config import ModelConfig
from infer.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

IDS = list(range(20, 60))


@pytest.mark.parametrize("resident", ["auto", "2M"])
def test_the_bits_are_those_of_tensors_kept_in_ram_too(place, demo_model, resident):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    rows, held = {}, {}
    for switch in ("on", "off"):
        words = ("--device", "cuda:0", "--gpu-resident", resident, "--cpu-clients", switch)
        daemon = place.daemon(demo_model, *words, "--gpu-cache", "40M", "--name", f"r-{switch}")
        config = ModelConfig(model=demo_model, name=daemon.name, device="cuda:0", ctx=512)
        with Session(config) as session:
            rows[switch] = session.engine.logits(IDS)
            held[switch] = session.engine.client.stats()["resident_bytes"]
        daemon.stop()
    np.testing.assert_array_equal(rows["on"], rows["off"])
    assert held["off"] < held["on"]
    assert (held["off"] == 0) == (resident == "auto")
