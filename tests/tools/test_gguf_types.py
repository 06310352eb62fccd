"""Rules for types, and what becomes of those that cannot be followed."""

import argparse

import gguf
import numpy as np
import pytest
from gguf_importance import Importance, Sums
from gguf_quantize import dequantize, needs_importance, quantize, type_of, writable_types
from gguf_types import (
    TypeChooser,
    TypeRules,
    add_type_options,
    chooser,
    compile_pattern,
    parse_rule,
)

from shared.errors import ConfigError, MalformedModel, UnsupportedModel

F32, Q8_0 = type_of("f32"), type_of("Q8_0")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*_exps", "blk.3.ffn_up_exps.weight", "blk.3.ffn_up_shexp.weight"),
        ("blk.{3..5,8}.*", "blk.8.attn_q.weight", "blk.6.attn_q.weight"),
        ("blk.{3}.attn_q", "blk.3.attn_q.weight", "blk.33.attn_q.weight"),
        ("output", "output.weight", "output_norm.weight"),
        ("blk.1.attn_q.weight", "blk.1.attn_q.weight", "blk.1xattn_q.weight"),
    ],
)
def test_patterns(pattern, yes, no):
    assert compile_pattern(pattern).fullmatch(yes)
    assert not compile_pattern(pattern).fullmatch(no)


@pytest.mark.parametrize("pattern", ["blk.{a}", "blk.{5..3}", "{}", "{1..999999}", "{1,,2}"])
def test_patterns_that_say_nothing(pattern):
    with pytest.raises(ConfigError):
        compile_pattern(pattern)


@pytest.mark.parametrize("text", ["", "=", "x=", "=Q8_0", "Q8_0"])
def test_rules_that_are_none(text):
    with pytest.raises(ConfigError, match="no rule"):
        parse_rule(text)


@pytest.mark.parametrize("name", ["Q9_9", "", "I32", "Q8_K"])
def test_types_that_cannot_be_made(name):
    with pytest.raises(UnsupportedModel, match="not a tensor type"):
        type_of(name)


def _chooser(*rules, importance=None, fallback=None, mtp=None):
    return TypeChooser(TypeRules(rules), importance, fallback, mtp, n_layers=4)


def test_the_last_rule_that_fits_counts():
    types = _chooser(("*", "Q8_0"), ("*_exps", "Q4_K"), ("blk.1.*", "keep"))
    assert types.choose("blk.0.ffn_up_exps.weight", (256, 8, 2), F32).type_id == type_of("Q4_K")
    assert types.choose("blk.0.attn_q.weight", (256, 8), F32).type_id == Q8_0
    assert types.choose("blk.1.attn_q.weight", (256, 8), F32).type_id == F32


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("output_norm.weight", (256,)),
        ("blk.1.exp_probs_b", (8,)),
        ("blk.1.exp_probs_b.bias", (8,)),
        ("blk.1.ffn_gate_inp.weight", (256, 8)),
        ("blk.1.indexer.k_norm.bias", (256,)),
    ],
)
def test_vectors_and_routers_stay_floats(name, shape):
    assert _chooser(("*", "Q4_K")).choose(name, shape, F32).type_id == F32


def test_rows_that_are_no_whole_blocks_get_a_type_that_fits():
    types = _chooser(("*", "IQ2_XXS"), fallback=Q8_0)
    choice = types.choose("blk.1.attn_k_b.weight", (192, 512, 64), F32)
    assert choice.type_id == Q8_0
    assert "192" in choice.note
    assert types.choose("x.weight", (100, 4), F32).type_id == type_of("F16")


def test_a_type_that_demands_importance_is_refused_or_replaced_without():
    name, shape = "blk.1.ffn_up_exps.weight", (256, 8, 2)
    with pytest.raises(UnsupportedModel, match="demands an importance matrix") as caught:
        _chooser(("*", "IQ2_XXS")).choose(name, shape, F32)
    assert "--fallback" in caught.value.remedy
    with pytest.raises(UnsupportedModel) as caught:
        _chooser(("*", "IQ2_XXS")).choose("blk.4.ffn_up_exps.weight", shape, F32)
    assert "--mtp-experts" in caught.value.remedy
    choice = _chooser(("*", "IQ2_XXS"), fallback=type_of("Q2_K")).choose(name, shape, F32)
    assert choice.type_id == type_of("Q2_K")
    assert "no importance matrix" in choice.note
    unseen = Sums(np.zeros((2, 256), np.float32), np.zeros(2, np.float32))
    known = Sums(np.ones((2, 256), np.float32), np.ones(2, np.float32))
    for sums, expected in ((unseen, "Q2_K"), (known, "IQ2_XXS")):
        importance = Importance("x", (), 1, 1, {name: sums})
        types = _chooser(("*", "IQ2_XXS"), importance=importance, fallback=type_of("Q2_K"))
        assert types.choose(name, shape, F32).type_id == type_of(expected)


def test_a_tensor_that_has_its_type_already_needs_no_importance():
    wanted = type_of("IQ2_XXS")
    types = _chooser(("*", "IQ2_XXS"))
    assert types.choose("blk.1.ffn_up_exps.weight", (256, 8, 2), wanted).type_id == wanted


def test_mtp_experts_have_a_type_of_their_own():
    types = _chooser(("*_exps", "IQ2_XXS"), mtp=type_of("Q2_K"))
    choice = types.choose("blk.4.ffn_up_exps.weight", (256, 8, 2), F32)
    assert (choice.type_id, choice.note) == (type_of("Q2_K"), "MTP expert")
    assert types.choose("blk.4.attn_q.weight", (256, 8), F32).type_id == F32


def _arguments(*words):
    parser = argparse.ArgumentParser()
    add_type_options(parser, "as they are")
    return parser.parse_args(words)


def test_the_command_line_comes_after_the_file(tmp_path):
    path = tmp_path / "mix.toml"
    path.write_text('[types]\n"*" = "Q8_0"\n"*_exps" = "Q4_K"\n')
    types = chooser(
        _arguments("--types", str(path), "--type", "blk.1.*=Q6_K"), [("*", "F16")], n_layers=4
    )
    wanted = [types.rules.wanted(f"blk.{n}.ffn_up_exps.weight") for n in (0, 1)]
    assert wanted == [type_of("Q4_K"), type_of("Q6_K")]


@pytest.mark.parametrize(
    "text", ["", "types = 3", '[types]\n"*" = 8', "[", '[other]\n"*" = "Q8_0"']
)
def test_files_that_are_no_rules_are_refused(tmp_path, text):
    path = tmp_path / "mix.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        chooser(_arguments("--types", str(path)), (), n_layers=4)


def test_a_fallback_that_demands_importance_is_none():
    with pytest.raises(ConfigError, match="itself"):
        chooser(_arguments("--fallback", "IQ2_XXS"), (), n_layers=4)


# The others' tables take seconds to make; the package has no Q1_0.
FAST = sorted(set(writable_types()) - {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS", "IQ3_S", "Q1_0"})


@pytest.mark.parametrize("name", FAST)
def test_quantised_rows_are_near_and_read_as_the_gguf_package_does(name):
    weights = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    data = quantize(weights, type_of(name), np.ones(256, np.float32))
    back = dequantize(data, type_of(name), 256)
    error = np.sqrt(np.mean((back - weights) ** 2))
    assert error < (1.0 if name.startswith("TQ") else 0.5)
    kind = gguf.GGMLQuantizationType[name]
    np.testing.assert_array_equal(back, gguf.quants.dequantize(data, kind).reshape(3, 256))


def test_importance_decides_where_the_error_goes():
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(64, 256)).astype(np.float32)
    importance = np.where(np.arange(256) < 64, 100.0, 0.01).astype(np.float32)
    kind = type_of("Q2_K")

    def error(given):
        back = dequantize(quantize(weights, kind, given), kind, 256)
        return np.mean((back - weights)[:, :64] ** 2)

    assert error(importance) < 0.9 * error(None)


def test_what_needs_importance():
    assert needs_importance(type_of("IQ2_XXS"))
    assert not needs_importance(type_of("Q2_K"))


def test_weights_that_are_not_finite():
    with pytest.raises(MalformedModel, match="not a finite number"):
        quantize(np.full((1, 256), np.nan, np.float32), Q8_0)
