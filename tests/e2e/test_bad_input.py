"""What cannot work ends with a short message of cause and remedy, and leaves nothing behind.

`infer` runs in this process where it gets as far as importing torch; what it prints and returns is
the same.
"""

import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import infer.cli

MAX_MESSAGE_CHARS = 500
STREAMD, INFER = "streamd", "infer"
BOTH = (STREAMD, INFER)


@pytest.fixture(autouse=True)
def nothing_left(place) -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before
    assert place.leftovers() == []


@pytest.fixture
def refusal(place, capfd, monkeypatch) -> Callable[..., str]:
    """Runs a command that must fail; its message."""

    def run(program: str, *words: object) -> str:
        if program == STREAMD:
            done = place.run(program, *words)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            monkeypatch.setattr(sys, "argv", [program, *map(str, words)])
            code = infer.cli.main()
            out, err = capfd.readouterr()
        assert code == 1, err
        assert out == ""
        cause, *remedy = err.splitlines()
        assert cause.startswith(f"{program}: ")
        assert len(remedy) == 1, err
        assert remedy[0].startswith("  ")
        assert len(err) <= MAX_MESSAGE_CHARS
        return err

    return run


# Files


class Broken(NamedTuple):
    """A file that no program can use, or only the daemon. make(factory, bytes, path)."""

    make: Callable[[ModuleType, ModuleType, Path], object]
    words: str
    programs: tuple[str, ...] = BOTH


def _raw(**lies) -> Callable[[ModuleType, ModuleType, Path], object]:
    return lambda _, raw, path: path.write_bytes(raw.raw_gguf(**lies))


def _changed(change: Callable[[object], object], **knobs) -> Callable[..., object]:
    """A sound model after `change`."""

    def make(factory: ModuleType, _: ModuleType, path: Path) -> None:
        model = factory.hy3_model(**knobs)
        change(model)
        model.write(path)

    return make


def _without_key(name: str) -> Callable[..., object]:
    return _changed(lambda model: model.metadata.pop(name))


def _without_tensor(name: str) -> Callable[..., object]:
    return _changed(lambda model: model.tensors.pop(name))


def _reshaped(name: str, *shape: int, type_id: int | None = None) -> Callable[..., object]:
    def make(factory: ModuleType, _: ModuleType, path: Path) -> None:
        model = factory.hy3_model()
        kind = model.tensors[name].type_id if type_id is None else type_id
        model.tensors[name] = factory.random_tensor(np.random.default_rng(0), shape, kind)
        model.write(path)

    return make


def _patched(patch: Callable[[ModuleType, Path], object]) -> Callable[..., object]:
    """A sound file, some of whose bytes are overwritten."""

    def make(factory: ModuleType, raw: ModuleType, path: Path) -> None:
        factory.hy3_model().write(path)
        patch(raw, path)

    return make


def _make_big_endian(_: ModuleType, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack(">I", 3))


def _truncate(byte_count: int) -> Callable[..., object]:
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


# Options and the machine


@pytest.fixture
def sound_model(gguf_factory, tmp_path) -> Path:
    return gguf_factory.hy3_model().write(tmp_path / "model.gguf")


@pytest.mark.parametrize("program", BOTH)
def test_a_budget_below_the_floor(program, refusal, sound_model):
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", sound_model, "--host-cache", "1K")
    assert re.search(r"cannot hold .*\n  give --host-cache 1M or more", message)


@pytest.mark.parametrize("program", BOTH)
def test_a_socket_path_that_is_too_long(
    program, refusal, sound_model, tmp_path, monkeypatch, place
):
    directory = tmp_path / ("x" * 100)
    monkeypatch.setenv("STREAMD_RUNTIME_DIR", str(directory))
    monkeypatch.setitem(place.environment, "STREAMD_RUNTIME_DIR", str(directory))
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", sound_model)
    assert re.search(r"socket path .* bytes long, 107 fit\n  .*STREAMD_RUNTIME_DIR", message)
    assert not list(directory.glob("*"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('host-cash = "1G"', "unknown option 'host-cash'"),
        ('host-cache = "much"', "--host-cache cannot be 'much'"),
        ("host-cache = ", "is not TOML"),
    ],
)
def test_a_configuration_that_cannot_be(text, words, refusal, sound_model, tmp_path):
    config = tmp_path / "streamd.toml"
    config.write_text(text)
    assert words in refusal(STREAMD, "serve", "--model", sound_model, "--config", config)


@pytest.mark.parametrize("program", BOTH)
def test_an_option_that_does_not_parse(program, refusal, sound_model):
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", sound_model, "--io", "quickly")
    assert re.search("--io cannot be 'quickly'\n  choose one of: auto", message)


@pytest.mark.parametrize(
    "command",
    [
        (STREAMD, "stats"),
        (STREAMD, "stop"),
        (INFER, "chat", "-p", "hi"),
        (INFER, "logits", "--tokens", "1", "--out", "l.npy"),
        (INFER, "tokenize", "hi"),
    ],
)
@pytest.mark.parametrize("name", [(), ("--name", "nobody")])
def test_no_daemon_is_running(command, name, refusal):
    message = refusal(*command, *name)
    assert re.search(r"no daemon .*\(running: none\)\n  start one with: streamd --model", message)


def test_a_daemon_of_another_model(place, refusal, sound_model, tmp_path):
    daemon = place.daemon(sound_model)
    message = refusal(INFER, "chat", "-p", "hi", "--model", tmp_path / "b.gguf", "--name", "model")
    assert re.search("the daemon 'model' serves .*, not .*b.gguf\n", message)
    daemon.stop()


# Requests


LOGITS = ("logits", "--out", os.devnull)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chat", "-p", "long " * 50, "--ctx", "32"), "tokens do not fit a context of 32"),
        ((*LOGITS, "--tokens", ",".join(["7"] * 33), "--ctx", "32"), "33 tokens do not fit"),
        ((*LOGITS, "--tokens", "1,384"), "token 384 is not in the vocabulary"),
        ((*LOGITS, "--tokens=-1"), "token -1 is not in the vocabulary"),
        ((*LOGITS, "--tokens", "1,two"), "is no list"),
        (("logits", "--tokens", "1", "--out", "nowhere/l.npy"), "cannot write nowhere/l.npy"),
        (("perplexity", "--file", "nowhere.txt"), "cannot read nowhere.txt"),
        (("chat", "-p", "hi", "--ctx", "2000"), "more than the model's context of 1024"),
        (("chat", "-p", "hi", "--effort", "high"), "does not know reasoning effort 'high'"),
        (("chat", "-p", "hi", "--think"), "no switch for --think"),
        (("bench", "-p", "1000", "-n", "100"), "1100 tokens do not fit a context of 1024"),
    ],
)
def test_a_request_that_cannot_be_met(words, message, refusal, sound_model):
    assert message in refusal(INFER, *words, "--model", sound_model)


def test_a_process_says_the_same(place, tmp_path):
    """What the tests above see in this process is what a user sees."""
    done = place.run(INFER, "chat", "--model", tmp_path / "absent.gguf", "-p", "hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"infer: cannot open {tmp_path}/absent.gguf: No such file or directory",
        "  check the path and its permissions",
    ]
