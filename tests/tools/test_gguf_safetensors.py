"""Reading safetensors files: dtypes, scales, and files that lie."""

import json
import struct

import numpy as np
import pytest
import torch
from checkpoint_factory import bf16, write_safetensors
from safetensors_files import Checkpoint

from shared.errors import MalformedModel, ModelError, UnsupportedModel


def _open(folder, tensors, config=None, name="model.safetensors"):
    (folder / "config.json").write_text(json.dumps(config or {}))
    write_safetensors(folder / name, tensors)
    return Checkpoint(folder)


def _float8(values):
    """(values as torch rounds them to F8_E4M3, their bytes)"""
    rounded = torch.from_numpy(values).to(torch.float8_e4m3fn)
    return rounded.float().numpy(), rounded.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("dtype", "kind"), [("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8")])
def test_plain_floats(tmp_path, dtype, kind):
    values = np.random.default_rng(0).normal(size=(5, 8)).astype(kind)
    checkpoint = _open(tmp_path, {"w": (dtype, (5, 8), values.tobytes())})
    np.testing.assert_array_equal(checkpoint.rows("w", 1, 4), values[1:4].astype(np.float32))
    checkpoint.close()


@pytest.mark.parametrize(
    ("dtype", "torch_type"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]
)
def test_all_codes_of_8_bit_floats(tmp_path, dtype, torch_type):
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch_type).float().numpy()
    one = np.ones(1, np.float32).tobytes()
    tensors = {"w": (dtype, (2, 128), codes.tobytes()), "w_scale": ("F32", (1,), one)}
    checkpoint = _open(tmp_path, tensors)
    np.testing.assert_array_equal(checkpoint.rows("w", 0, 2).reshape(-1), expected)
    checkpoint.close()


def test_a_scale_for_each_block(tmp_path):
    """Blocks of 128 x 128, cut off at the edges; any rows of the tensor."""
    rng = np.random.default_rng(1)
    rounded, raw = _float8(rng.normal(size=(300, 200)).astype(np.float32))
    scale = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    tensors = {
        "a.weight": ("F8_E4M3", (300, 200), raw),
        "a.weight_scale_inv": ("F32", (3, 2), scale.tobytes()),
    }
    checkpoint = _open(tmp_path, tensors)
    expected = rounded * np.kron(scale, np.ones((128, 128), np.float32))[:300, :200]
    np.testing.assert_array_equal(checkpoint.rows("a.weight", 0, 300), expected)
    np.testing.assert_array_equal(checkpoint.rows("a.weight", 120, 270), expected[120:270])
    assert checkpoint.weight_names() == {"a.weight"}
    checkpoint.close()


def test_a_scale_for_each_block_of_fused_experts_of_another_block_size(tmp_path):
    rng = np.random.default_rng(2)
    rounded, raw = _float8(rng.normal(size=(2, 96, 64)).astype(np.float32))
    scale, scale_raw = bf16(rng.uniform(0.5, 2, (2, 2, 1)))
    tensors = {
        "gate_up": ("F8_E4M3", (2, 96, 64), raw),
        "gate_up_scale_inv": ("BF16", (2, 2, 1), scale_raw),
    }
    config = {"quantization_config": {"weight_block_size": [64, 64]}}
    checkpoint = _open(tmp_path, tensors, config)
    expected = (rounded * np.repeat(scale, 64, axis=1)[:, :96]).reshape(-1, 64)
    np.testing.assert_array_equal(checkpoint.rows("gate_up", 50, 150), expected[50:150])
    checkpoint.close()


@pytest.mark.parametrize("shape", [(), (1,), (40, 1)])
def test_a_scale_for_all_or_each_row(tmp_path, shape):
    rng = np.random.default_rng(3)
    rounded, raw = _float8(rng.normal(size=(40, 32)).astype(np.float32))
    scale = rng.uniform(0.5, 2, shape).astype(np.float32)
    tensors = {
        "w": ("F8_E4M3", (40, 32), raw),
        "w_scale": ("F32", shape, scale.tobytes()),
        "w.input_scale": ("F32", (1,), scale.tobytes()[:4]),
    }
    checkpoint = _open(tmp_path, tensors)
    rows = checkpoint.rows("w", 10, 30)
    np.testing.assert_array_equal(rows, (rounded * scale)[10:30])
    assert checkpoint.weight_names() == {"w"}
    checkpoint.close()


def test_an_index_says_which_file_has_a_tensor(tmp_path):
    a, b = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    write_safetensors(tmp_path / "one.safetensors", {"a": ("F32", (2, 4), a.tobytes())})
    write_safetensors(tmp_path / "two.safetensors", {"b": ("F32", (2, 4), b.tobytes())})
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.rows("b", 0, 2), b)
    assert len(checkpoint.paths) == 2
    checkpoint.close()
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(MalformedModel, match=r"two\.safetensors is missing"):
        Checkpoint(tmp_path)


def test_8_bit_floats_without_a_scale_are_refused(tmp_path):
    checkpoint = _open(tmp_path, {"w": ("F8_E4M3", (2, 4), bytes(8))})
    with pytest.raises(MalformedModel, match="without a scale"):
        checkpoint.rows("w", 0, 1)
    checkpoint.close()


def test_a_scale_that_fits_nothing_is_refused(tmp_path):
    tensors = {
        "w": ("F8_E4M3", (300, 4), bytes(1200)),
        "w_scale_inv": ("F32", (2, 1), bytes(8)),
    }
    checkpoint = _open(tmp_path, tensors)
    with pytest.raises(MalformedModel, match="fits no"):
        checkpoint.rows("w", 0, 1)
    checkpoint.close()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 31]},
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [-32, 0]},
        {"dtype": "F32", "shape": [2, 4], "data_offsets": [32, 64]},
        {"dtype": "F32", "shape": [2, 4]},
        [],
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry):
    head = json.dumps({"w": entry}).encode()
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(32))
    with pytest.raises(MalformedModel, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 5) + b"[1,2]"])
def test_files_that_are_none_are_refused(tmp_path, data):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(MalformedModel):
        Checkpoint(tmp_path)


def test_integers_are_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="I32"):
        _open(tmp_path, {"w": ("I32", (2,), bytes(8))})


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="0 safetensors files"):
        Checkpoint(tmp_path)
