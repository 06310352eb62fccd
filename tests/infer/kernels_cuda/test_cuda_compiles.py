"""The CUDA sources through NVRTC, for the oldest and a current GPU: compiled, not run."""

import pytest

from infer.kernels.cuda.experts import DOWN_WARPS, GATE_UP_WARPS
from infer.kernels.cuda.experts_grouped import GROUPED_TOKENS
from infer.kernels.cuda.formats import CODED_FORMATS, FLOAT_FORMATS
from infer.kernels.cuda.sources import compile_source

pytest.importorskip("cuda.bindings.nvrtc")

OLDEST, CURRENT = 75, 90


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def check(name, architecture, **defines):
    assert compile_source(name, defines, architecture).startswith(b"\x7fELF")


@pytest.mark.parametrize("architecture", [OLDEST, CURRENT])
@pytest.mark.parametrize("name", ["rows.cu", "heads.cu", "step.cu"])
def test_plain(name, architecture):
    check(name, architecture)


@pytest.mark.parametrize("architecture", [OLDEST, CURRENT])
@pytest.mark.parametrize("ranks", [0, 8])
def test_step(ranks, architecture):
    check("add_norm.cu", architecture, VALUES=4, RANKS=ranks)
    check("route.cu", architecture, PER_LANE=6 if ranks else 32)


@pytest.mark.parametrize("name", CODED_FORMATS)
def test_coded_formats(name):
    check("dequantize.cu", OLDEST, FORMAT=name, HALF_OUTPUT=1)
    check("linear.cu", OLDEST, FORMAT=name, TOKENS=2)
    check("linear.cu", CURRENT, FORMAT=name, TOKENS=1, EXACT=1)
    check("experts.cu", CURRENT, GATE=name, UP=name, TOKENS=1, WARPS=GATE_UP_WARPS)
    check("experts_grouped.cu", OLDEST, FORMAT=name, TOKENS=GROUPED_TOKENS, GATED=1)
    check("experts_grouped.cu", CURRENT, FORMAT=name, TOKENS=GROUPED_TOKENS)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_float_formats(name):
    check("dequantize.cu", CURRENT, FORMAT=name)
    check("linear_float.cu", OLDEST, FORMAT=name, TOKENS=4)
    check("experts.cu", OLDEST, GATE=name, UP="Q4_K", TOKENS=2, HIDDEN_FLOAT=1, WARPS=GATE_UP_WARPS)


@pytest.mark.parametrize("architecture", [OLDEST, CURRENT])
def test_most_tokens(architecture):
    check("linear.cu", architecture, FORMAT="Q8_0", TOKENS=8)
    check("experts.cu", architecture, FORMAT="Q2_K", TOKENS=8, WARPS=DOWN_WARPS)
    exact = {"TOKENS": 8, "EXACT": 1, "HIDDEN_FLOAT": 1, "WARPS": GATE_UP_WARPS}
    check("experts.cu", architecture, GATE="IQ2_XXS", UP="Q5_K", **exact)


@pytest.mark.parametrize("cache", [{"KV_BYTES": 4}, {"KV_BYTES": 2}, {"KV_BYTES": 2, "KV_BF16": 1}])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 8), (256, 4), (96, 2), (32, 1)])
def test_attention(cache, head_dim, group):
    check("attention.cu", OLDEST, HEAD_DIM=head_dim, GROUP=group, **cache)


@pytest.mark.parametrize("cache", [{}, {"KV_BF16": 1}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_on_tensor_cores(cache, head_dim):
    check("attention_mma.cu", 80, HEAD_DIM=head_dim, GROUP=8, **cache)


def test_machine_code_is_kept_and_found_again(tmp_path):
    first = compile_source("rows.cu", {}, 75)
    (kept,) = tmp_path.rglob("*.cubin")
    assert kept.read_bytes() == first
    kept.write_bytes(b"kept")
    assert compile_source("rows.cu", {}, 75) == b"kept"


def test_a_mistake_is_reported_with_the_compilers_words():
    with pytest.raises(AssertionError, match="FORMAT"):
        compile_source("linear.cu", {"TOKENS": 1}, 75)
