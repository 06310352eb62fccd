"""`infer selftest`: it passes here, and finds what is wrong."""

import sys

import pytest
import torch

import infer.cli
from infer.commands.selftest import CHECKS
from infer.kernels.reference_kernels import ReferenceKernels
from infer.selftest.gqa import check_gqa
from infer.selftest.mla import check_dsa, check_mla
from infer.selftest.quants import check_quants
from infer.selftest.stage import PHASES, Stage
from shared.errors import UnsupportedModel
from shared.quants import TensorType

CPU = torch.device("cpu")


def test_the_command_names_every_check():
    assert set(infer.cli.SELFTESTS) == {*CHECKS, "all"}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command; exit code, stdout and stderr."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["infer", "selftest", "--threads", "2", *words])
        code = infer.cli.main()
        return code, *capsys.readouterr()

    return command


def test_every_check_passes(run):
    code, out, err = run("--device", "cpu")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "passed on cpu" in lines[-1]
    assert {line.split()[0] for line in lines[:-1]} == set(CHECKS)


def test_single_checks(run):
    code, out, _ = run("mla", "gqa", "mla", "--device", "cpu")
    assert code == 0
    checks = [line.split()[0] for line in out.splitlines()[:-1]]
    assert checks == ["mla"] * len(PHASES) + ["gqa"] * len(PHASES)
    assert out.splitlines()[-1] == f"all {2 * len(PHASES)} passed on cpu"


@pytest.mark.parametrize("device", ["cuda:77", "nonsense", "meta", "mps"])
def test_a_device_that_is_not_there(run, device):
    code, out, err = run("gqa", "--device", device)
    assert (code, out) == (1, "")
    assert device in err


class Wrong(ReferenceKernels):
    """Reference kernels, of which one method is replaced."""

    def __init__(self, method: str, replacement) -> None:
        super().__init__()
        setattr(self, method, replacement)


RIGHT = ReferenceKernels()


@pytest.mark.parametrize(
    ("check", "method", "replacement"),
    [
        (check_gqa, "rope", lambda *_: None),
        (check_mla, "rope_pairs", lambda x, c, s, start, _=0: RIGHT.rope(x, c, s, start)),
        (check_mla, "per_head", lambda x, group, exact: 1.0001 * RIGHT.per_head(x, group)),
        (
            check_mla,
            "latent_attention",
            lambda *a: RIGHT.latent_attention(*a[:-1]) * torch.nan,
        ),
        (
            check_dsa,
            "latent_attention",  # reads all there is
            lambda *a: RIGHT.latent_attention(*a[:-1]),
        ),
        (
            check_dsa,
            "select",  # the latest positions
            lambda q, w, k, start, top_k: torch.stack(
                [torch.arange(top_k) + max(0, start + row + 1 - top_k) for row in range(len(q))]
            ).int(),
        ),
    ],
)
def test_wrong_kernels_are_found(check, method, replacement):
    with torch.inference_mode():
        outcomes = list(check(Wrong(method, replacement), Stage(CPU, 5)))
        assert all(outcome.passed for outcome in check(RIGHT, Stage(CPU, 5)))
    assert not all(outcome.passed for outcome in outcomes)


def test_types_that_a_device_does_not_have_are_named():
    def group(matrices):
        if matrices[0].type_id != TensorType.Q8_0:
            raise UnsupportedModel("no")
        return RIGHT.group(matrices)

    outcomes = list(check_quants(Wrong("group", group), Stage(CPU, 5)))
    compared = [outcome.what for outcome in outcomes if outcome.error is not None]
    assert compared == ["Q8_0 exact", "Q8_0 default"]
    assert "IQ2_XXS: not supported on cpu" in [outcome.what for outcome in outcomes]
    wrong = Wrong("linear", lambda x, g, exact: [1.1 * RIGHT.linear(x, g)[0]])
    assert not any(o.passed for o in check_quants(wrong, Stage(CPU, 5)) if o.error is not None)
