"""The daemon's answer as arrays, and the picture made of it."""

import sys

import numpy as np
import pytest

from shared.errors import ConfigError, StreamError
from shared.wire import IN_GPU, IN_HOST, Heat
from streamd.monitoring.heatmap import _draw, heatmap, unpack

HEAT = np.array([[0, 0, 0], [1, 3, 7]], np.float32)
TIERS = np.array([[0, 0, 0], [0, IN_HOST, IN_HOST | IN_GPU]], np.uint8)


def answer(**changes):
    values = {"n_layers": 2, "n_experts": 3, "dense_layers": [0]}
    return Heat(**(values | {"heat": HEAT.tobytes(), "tiers": TIERS.tobytes()} | changes))


def test_the_answer_as_arrays():
    heat, tiers = unpack(answer())
    assert np.isnan(heat[0]).all()
    np.testing.assert_array_equal(heat[1], HEAT[1])
    np.testing.assert_array_equal(tiers, TIERS)


@pytest.mark.parametrize("changes", [{"n_layers": 3}, {"heat": b""}, {"tiers": b"12345"}])
def test_an_answer_that_contradicts_itself(changes):
    with pytest.raises(StreamError, match="contradicts itself"):
        unpack(answer(**changes))


def test_what_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - an extra

    figure = _draw(pyplot, "demo", *unpack(answer()))
    axes = figure.axes[0]
    shown = axes.images[0].get_array()
    np.testing.assert_allclose(shown[1], [1, 2, 3])
    host, gpu = (marks.get_offsets() for marks in axes.collections)
    assert [round(float(x)) for x, _ in host] == [1, 2]
    assert [round(float(x)) for x, _ in gpu] == [2]
    assert "demo" in axes.get_title()
    pyplot.close(figure)


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib, which is not there") as refusal:
        heatmap("demo", tmp_path / "h.png")
    assert "pip install" in refusal.value.remedy
