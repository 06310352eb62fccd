"""Files that cannot be used: a short message of cause and remedy, and nothing is left behind."""

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

STREAMD, INFER = "streamd", "infer"
BOTH = (STREAMD, INFER)
# Writes a broken file, given tests/gguf_factory.py, tests/gguf_bytes.py and the path.
Make = Callable[[ModuleType, ModuleType, Path], object]


class Broken(NamedTuple):
    """A file, what the message about it says, and which programs cannot use it."""

    make: Make
    words: str
    programs: tuple[str, ...] = BOTH


def _raw(**lies) -> Make:
    return lambda _, raw, path: path.write_bytes(raw.raw_gguf(**lies))


def _changed(change: Callable[[object], object], **knobs) -> Make:
    """A sound model after `change`."""

    def make(factory: ModuleType, _: ModuleType, path: Path) -> None:
        model = factory.hy3_model(**knobs)
        change(model)
        model.write(path)

    return make


def _without_key(name: str) -> Make:
    return _changed(lambda model: model.metadata.pop(name))


def _without_tensor(name: str) -> Make:
    return _changed(lambda model: model.tensors.pop(name))


def _reshaped(name: str, *shape: int, type_id: int | None = None) -> Make:
    def make(factory: ModuleType, _: ModuleType, path: Path) -> None:
        model = factory.hy3_model()
        kind = model.tensors[name].type_id if type_id is None else type_id
        model.tensors[name] = factory.random_tensor(np.random.default_rng(0), shape, kind)
        model.write(path)

    return make


def _patched(patch: Callable[[ModuleType, Path], object]) -> Make:
    """A sound file, some of whose bytes are overwritten."""

    def make(factory: ModuleType, raw: ModuleType, path: Path) -> None:
        factory.hy3_model().write(path)
        patch(raw, path)

    return make


def _make_big_endian(_: ModuleType, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack(">I", 3))


def _truncate(byte_count: int) -> Make:
    """To `byte_count`, from the end if negative."""
    return _patched(lambda _, path: os.truncate(path, byte_count % (path.stat().st_size + 1)))


def _rename_architecture(model) -> None:
    model.architecture = "other"
    keys = [key for key in model.metadata if key.startswith("hy_v3.")]
    for key in keys:
        model.metadata[key.replace("hy_v3.", "other.")] = model.metadata.pop(key)


def _make_dense(model) -> None:
    for name in [name for name in model.tensors if "_exps." in name]:
        del model.tensors[name]


BROKEN = {
    "missing": Broken(lambda *_: None, "No such file"),
    "directory": Broken(lambda _, __, path: path.mkdir(), "is a directory"),
    "not a GGUF": Broken(lambda _, __, path: path.write_text("hello"), "not a GGUF file"),
    "empty": Broken(lambda _, __, path: path.touch(), "not a GGUF file"),
    "header truncated": Broken(_truncate(5000), "ends inside its header"),
    "data truncated": Broken(_truncate(-5000), "is truncated"),
    "big-endian": Broken(_patched(_make_big_endian), "is big-endian"),
    "future version": Broken(_raw(version=4), "GGUF version 4"),
    "absurd tensor count": Broken(_raw(tensor_count=2**60), "claims .* tensors"),
    "absurd key count": Broken(_raw(key_count=2**60), "claims .* keys"),
    "alignment 0": Broken(
        _patched(lambda raw, path: raw.patch_scalar(path, "general.alignment", 0)),
        "general.alignment 0",
    ),
    "unknown tensor type": Broken(
        _patched(lambda raw, path: raw.patch_tensor(path, "blk.1.attn_q.weight", type_id=77)),
        "attn_q.weight.*77",
    ),
    "architecture without keys": Broken(
        _raw(), "of architecture 'test', lacks the key 'test.block_count'"
    ),
    "no experts": Broken(_changed(_make_dense), "has no routed experts"),
    "expert_count missing": Broken(_without_key("hy_v3.expert_count"), "expert_count"),
    "expert tensor missing": Broken(
        _without_tensor("blk.1.ffn_up_exps.weight"), "lacks the tensor blk.1.ffn_up_exps.weight"
    ),
    "expert tensor misshapen": Broken(
        _reshaped("blk.1.ffn_down_exps.weight", 256, 128, 8), "ffn_down_exps.*shape"
    ),
    "unknown architecture": Broken(
        _changed(_rename_architecture), "architecture 'other'", (INFER,)
    ),
    "head_count missing": Broken(
        _without_key("hy_v3.attention.head_count"), "lacks the key .*head_count", (INFER,)
    ),
    "tensor missing": Broken(
        _without_tensor("blk.1.attn_q.weight"), "lacks the tensor blk.1.attn_q.weight", (INFER,)
    ),
    "tensor misshapen": Broken(
        _reshaped("blk.1.attn_q.weight", 256, 128), "blk.1.attn_q.weight has shape", (INFER,)
    ),
    "norm not F32": Broken(
        _reshaped("output_norm.weight", 256, type_id=Type.F16), "is not F32", (INFER,)
    ),
    "no tokenizer": Broken(_changed(lambda _: None, tokenizer=False), "no tokenizer", (INFER,)),
    "unknown pre-tokenizer": Broken(
        _changed(lambda model: model.metadata.update({"tokenizer.ggml.pre": "other"})),
        "other",
        (INFER,),
    ),
}


@pytest.mark.parametrize(
    ("case", "program"),
    [(case, program) for case, broken in BROKEN.items() for program in broken.programs],
)
def test_a_file_that_cannot_be_used(case, program, refusal, gguf_factory, gguf_bytes, tmp_path):
    path = tmp_path / "model.gguf"
    BROKEN[case].make(gguf_factory, gguf_bytes, path)
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", path)
    assert re.search(BROKEN[case].words, message), message
