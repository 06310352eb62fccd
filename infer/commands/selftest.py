"""`infer selftest`: does this machine compute what it should?"""

import argparse
from collections.abc import Callable, Iterator

import torch

from infer.kernels.choose import choose_kernels
from infer.kernels.interface import Kernels
from infer.selftest.gqa import check_gqa
from infer.selftest.mla import check_dsa, check_mla
from infer.selftest.outcome import Outcome
from infer.selftest.quants import check_quants
from infer.selftest.stage import BOUNDS, Stage
from shared.errors import ConfigError

Check = Callable[[Kernels, Stage], Iterator[Outcome]]
CHECKS: dict[str, Check] = {
    "gqa": check_gqa,
    "mla": check_mla,
    "dsa": check_dsa,
    "quants": check_quants,
}
_SEED = 5


def selftest(arguments: argparse.Namespace) -> int:
    """Print a line for each comparison; 1 if any is out of its limit."""
    names = list(CHECKS) if "all" in arguments.checks else dict.fromkeys(arguments.checks)
    device = _device(arguments.device)
    kernels = choose_kernels(BOUNDS, arguments.threads or None, device)
    done = failed = 0
    with torch.inference_mode():
        for name in names:
            for outcome in CHECKS[name](kernels, Stage(device, _SEED)):
                print(_line(name, outcome), flush=True)
                done += outcome.error is not None
                failed += not outcome.passed
    print(f"{failed} of {done} failed" if failed else f"all {done} passed", f"on {device}")
    return 1 if failed else 0


def _line(check: str, outcome: Outcome) -> str:
    if outcome.error is None:
        return f"{check:<7} {outcome.what}"
    verdict = "ok" if outcome.passed else "FAILED"
    numbers = f"{outcome.error:8.1e} < {outcome.limit:.0e}"
    return f"{check:<7} {outcome.what:<32} {numbers}  {verdict}"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device", "give auto, cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: there are no kernels for it", "give cpu or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there is no such CUDA device", "give --device cpu")
    return device
