"""`streamd heatmap`: a picture of how much each expert is used, and where it is."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, StreamError
from shared.wire import IN_GPU, IN_HOST, Heat, HeatRequest
from streamd.ask import ask

# Inches an expert and a layer take, within what a picture may be.
CELL_INCHES = 0.07
MIN_INCHES, MAX_INCHES = 4.0, 40.0
DPI = 120
_MARKS = ((IN_HOST, "#00b7c3", "in a host slot"), (IN_GPU, "#7cfc00", "in a GPU slot"))


def heatmap(name: str, out: Path) -> int:
    """Ask the daemon and draw; ConfigError without matplotlib or where `out` cannot be."""
    pyplot = _matplotlib()
    answer = ask(name, HeatRequest())
    assert isinstance(answer, Heat)
    figure = _draw(pyplot, name, *unpack(answer))
    try:
        figure.savefig(out, dpi=DPI, format=out.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {out}: {error}", "give --out FILE.png") from error
    finally:
        pyplot.close(figure)
    print(out)
    return 0


def _matplotlib() -> Any:
    try:
        import matplotlib  # noqa: PLC0415 - an extra

        matplotlib.use("Agg")  # a file is drawn; there may be no screen
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"heatmap draws with matplotlib, which is not there: {error}",
            f"{sys.executable} -m pip install matplotlib",
        ) from error
    return pyplot


def unpack(answer: Heat) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Heat float32 and tiers uint8, [n_layers, n_experts]; dense layers have a heat of NaN."""
    shape = (answer.n_layers, answer.n_experts)
    if len(answer.tiers) != shape[0] * shape[1] or len(answer.heat) != 4 * len(answer.tiers):
        raise StreamError("the daemon's answer contradicts itself", "restart the daemon")
    heat = np.frombuffer(answer.heat, np.float32).reshape(shape).copy()
    heat[answer.dense_layers] = np.nan
    return heat, np.frombuffer(answer.tiers, np.uint8).reshape(shape)


def _draw(
    pyplot: Any, name: str, heat: npt.NDArray[np.float32], tiers: npt.NDArray[np.uint8]
) -> Any:
    """Layers downwards, experts to the right; a mark in the cells of what is resident."""
    n_layers, n_experts = heat.shape
    width, height = (
        float(np.clip(CELL_INCHES * count + 2, MIN_INCHES, MAX_INCHES))
        for count in (n_experts, n_layers)
    )
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.set_facecolor("0.85")  # dense layers
    image = axes.imshow(np.log2(1 + heat), aspect="auto", cmap="magma", interpolation="nearest")
    figure.colorbar(image, label="uses, recent ones counting more: log2(1 + n)")
    for number, (bit, colour, label) in enumerate(_MARKS):
        layers, experts = np.nonzero(tiers & bit)
        if len(layers):
            shift = 0.25 * (2 * number - 1)  # both marks fit into a cell
            axes.scatter(experts + shift, layers, s=3, marker="s", color=colour, label=label)
    if np.any(tiers):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False)
    axes.set(xlabel="expert", ylabel="layer", title=f"{name}: use and residency of experts")
    return figure
