"""Recorded jobs: what they copy, what follows the position, whose time it was."""

import numpy as np
import pytest
import torch
from gguf_blocks import random_blocks

from infer.kernels.ggml_cpu import GgmlKernels
from infer.kernels.quant_matrix import QuantMatrix
from infer.kernels.scratch import KernelBounds
from shared.quants import TensorType

HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 4, 2, 64, 600
WIDTH, ROWS = 512, 96


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request):
    bounds = KernelBounds(
        tokens=1,
        columns=WIDTH,
        expert_columns=WIDTH,
        pairs=1,
        experts=4,
        heads=HEADS,
        head_dim=HEAD_DIM,
        context=CONTEXT,
    )
    return GgmlKernels(bounds, request.param)


def matrix(seed):
    rng = np.random.default_rng(seed)
    return QuantMatrix.over(
        TensorType.Q4_K, WIDTH, random_blocks(rng, TensorType.Q4_K, ROWS, WIDTH)
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_nothing_is_computed_while_it_is_recorded_and_all_when_it_runs(kernels):
    x, weight = normal(1, WIDTH), torch.ones(WIDTH)
    group = kernels.group([matrix(1)])
    out = [torch.zeros(1, ROWS)]
    with kernels.recorded() as recorder:
        kernels.linear(kernels.rms_norm(x, weight, 1e-6), group, out=out)
    assert not out[0].any()
    program = recorder.program()
    for seed in (2, 3):
        x.copy_(normal(1, WIDTH, seed=seed))
        program.run(0, recorder.count)
        expected = kernels.linear(kernels.rms_norm(x, weight, 1e-6), group)[0]
        assert torch.equal(out[0], expected)


def test_a_group_may_be_used_again_for_other_inputs(kernels):
    """A recorded product has tasks of its own."""
    x, other = normal(1, WIDTH), normal(1, WIDTH, seed=5)
    group = kernels.group([matrix(1)])
    with kernels.recorded() as recorder:
        (out,) = kernels.linear(x, group)
    expected = kernels.linear(x, group)[0]
    kernels.linear(other, group)
    recorder.program().run(0, recorder.count)
    assert torch.equal(out, expected)


def test_matrices_may_be_put_in_anothers_place(kernels):
    x, second = normal(1, WIDTH), matrix(2)
    with kernels.recorded() as recorder:
        (out,) = kernels.linear(x, kernels.group([matrix(1)]))
    recorder.weights_of(-1)[:] = second.address
    recorder.program().run(0, recorder.count)
    assert torch.equal(out, kernels.linear(x, kernels.group([second]))[0])


@pytest.mark.parametrize("position", [0, 1, 255, 256, 511, 599])
def test_rotation_cache_and_attention_follow_the_position(kernels, position):
    keys, values = (normal(CONTEXT, KV_HEADS, HEAD_DIM, seed=s).half() for s in (1, 2))
    cos, sin = normal(CONTEXT, HEAD_DIM // 2, seed=3), normal(CONTEXT, HEAD_DIM // 2, seed=4)
    q, k = normal(1, HEADS, HEAD_DIM, seed=5), normal(1, KV_HEADS, HEAD_DIM, seed=6)
    recorded_q, recorded_k, recorded_keys = q.clone(), k.clone(), keys.clone()
    with kernels.recorded() as recorder:
        kernels.rope(recorded_q, cos, sin, 0)
        kernels.rope(recorded_k, cos, sin, 0)
        recorder.store(recorded_k, recorded_keys)
        out = kernels.attention(recorded_q, recorded_keys, values, 0, 0.125)
    program = recorder.program()
    program.move_to(position)
    program.run(0, recorder.count)

    kernels.rope(q, cos, sin, position)
    kernels.rope(k, cos, sin, position)
    keys[position] = k[0]
    assert torch.equal(recorded_keys, keys)
    assert torch.equal(out, kernels.attention(q, keys, values, position, 0.125))


def test_time_is_counted_to_the_part_that_was_named(kernels):
    x = normal(1, WIDTH)
    with kernels.recorded() as recorder:
        recorder.part = "one"
        kernels.add(x, normal(1, WIDTH))
        recorder.part = "two"
        kernels.add(x, normal(1, WIDTH))
    program = recorder.program()
    assert program.spent_s == {"one": 0, "two": 0}
    program.run(0, 1)
    assert program.spent_s["one"] > 0
    assert program.spent_s["two"] == 0


def test_an_error_ends_recording(kernels):
    with pytest.raises(KeyError), kernels.recorded():
        raise KeyError
    x = normal(1, WIDTH)
    expected = x + x
    kernels.add(x, x.clone())
    assert torch.equal(x, expected)
