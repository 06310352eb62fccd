"""Prompts computed at once against their tokens one by one, through real daemons at their floors.

Longer ones, and other budgets, take a minute: tools/check_prefill.py.
"""

import math
import sys

import check_prefill
import pytest
import torch
from gguf_factory import hy3_model
from gguf_glm import glm_model

from shared.errors import RequestError

LENGTHS = (1, 2, 7, 33, 129)


@pytest.fixture(params=[hy3_model, glm_model], ids=["hy3", "glm"])
def model(request, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(tmp_path))
    made = request.param(n_experts=check_prefill.EXPERTS)
    return made.write(tmp_path / "model.gguf")


def _check(model, lengths, shares, device="cpu"):
    checks = list(check_prefill.check(model, device, lengths, shares))
    assert len(checks) == 2 * len(lengths) * len(shares)
    at_floor = [one.evictions for one in checks if one.share == 0]
    assert max(at_floor) > 0
    assert {one.tokens for one in checks} == set(lengths)
    return max(one.difference for one in checks)


def test_what_is_no_number_is_the_worst():
    same = {"model": "m", "share": 0.0, "chunk": 64, "tokens": 2, "evictions": 0}
    checks = [check_prefill.Check(difference=size, **same) for size in (1e-6, math.nan, 1e-7)]
    assert math.isnan(check_prefill.worst_of(checks))
    assert check_prefill.worst_of(checks[::2]) == 1e-6


def test_a_tolerance_of_0_is_taken_at_its_word(monkeypatch, tmp_path, capsys):
    one = check_prefill.Check("m", 0.0, 64, 2, 1e-9, 0)
    monkeypatch.setattr(check_prefill, "check", lambda *_: [one])
    words = ["check_prefill", "--model", str(tmp_path / "m.gguf"), "--tolerance", "0"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(RequestError, match="are not what their tokens are"):
        check_prefill.main()
    assert "allowed are 0e+00" in capsys.readouterr().out


def test_short_prompts(model):
    assert _check(model, LENGTHS, (0.0,)) <= check_prefill.TOLERANCE


@pytest.mark.gpu
def test_short_prompts_on_a_gpu(model):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert _check(model, LENGTHS, (0.0, 1.0), "cuda:0") <= check_prefill.GPU_TOLERANCE
