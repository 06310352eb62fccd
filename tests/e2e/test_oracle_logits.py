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
KINDS = {
    "hy3": ["iq1_m", "iq2_xxs", "iq3_xxs", "mtp-udmix", "mxfp4_moe", "q2_k", "q4_k_m", "q8_0"],
    "glm": ["iq2_xxs", "iq3_xxs", "mtp-udmix", "q2_k"],
}


@pytest.fixture(scope="module")
def oracle_dir(shared_dir) -> Path:
    return shared_dir / "oracle"


@pytest.mark.parametrize("family", KINDS)
def test_no_file_is_left_out(oracle_dir, family):
    found = sorted(oracle_dir.glob(f"{family}-*.gguf"))
    assert [path.stem.removeprefix(f"{family}-") for path in found] == KINDS[family]


@pytest.fixture(
    scope="module",
    params=[(family, kind) for family in KINDS for kind in KINDS[family]],
    ids="-".join,
)
def served(request, module_place, oracle_dir) -> Iterator[tuple[str, list[int], np.ndarray]]:
    """A daemon that serves the file, ids, and the logits they should lead to."""
    family, kind = request.param
    daemon = module_place.daemon(oracle_dir / f"{family}-{kind}.gguf")
    ids = np.load(oracle_dir / f"{family}.npz")["ids"].ravel().tolist()
    logits = np.load(oracle_dir / f"{family}-quant-logits.npz")
    yield daemon.name, ids, logits[f"{RENAMED.get(kind, kind)}.dequant"]
    daemon.stop()


@pytest.mark.parametrize("chunk", [48, 16, 5, 1])
def test_exact_logits(chunk, served):
    name, ids, expected = served
    with Session(ModelConfig(name=name, exact=True, chunk=chunk)) as session:
        rows = session.engine.logits(ids)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(rows.argmax(axis=1), expected.argmax(axis=1))
