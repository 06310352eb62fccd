"""--exact against float32 arithmetic on dequantised weights, for every quantisation of the oracle.

Through the daemon: each file is served, and each way to cut the prompt is a client of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from infer.config import ModelConfig
from infer.session import Session

TOLERANCE = 1e-4
# From file name to the name of its logits, where that is another.
RENAMED = {"mtp-udmix": "udmix"}
KINDS = ["iq1_m", "iq2_xxs", "iq3_xxs", "mtp-udmix", "mxfp4_moe", "q2_k", "q4_k_m", "q8_0"]


@pytest.fixture(scope="module")
def oracle_dir(shared_dir) -> Path:
    return shared_dir / "oracle"


def test_no_file_is_left_out(oracle_dir):
    assert [
        path.stem.removeprefix("hy3-") for path in sorted(oracle_dir.glob("hy3-*.gguf"))
    ] == KINDS


@pytest.fixture(scope="module")
def ids(oracle_dir) -> list[int]:
    return np.load(oracle_dir / "hy3.npz")["ids"].ravel().tolist()


@pytest.fixture(scope="module", params=KINDS)
def served(request, module_place, oracle_dir) -> Iterator[tuple[str, np.ndarray]]:
    """A daemon that serves the file, and the logits it should lead to."""
    daemon = module_place.daemon(oracle_dir / f"hy3-{request.param}.gguf")
    logits = np.load(oracle_dir / "hy3-quant-logits.npz")
    yield daemon.name, logits[f"{RENAMED.get(request.param, request.param)}.dequant"]
    daemon.stop()


@pytest.mark.parametrize("chunk", [48, 16, 5, 1])
def test_exact_logits(chunk, served, ids):
    name, expected = served
    with Session(ModelConfig(name=name, exact=True, chunk=chunk)) as session:
        rows = session.engine.logits(ids)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(rows.argmax(axis=1), expected.argmax(axis=1))
