"""Options, machines and requests that cannot work: a short message of cause and remedy."""

import os
import re
from pathlib import Path

import pytest

STREAMD, INFER = "streamd", "infer"
BOTH = (STREAMD, INFER)


@pytest.fixture
def sound_model(gguf_factory, tmp_path) -> Path:
    return gguf_factory.hy3_model().write(tmp_path / "model.gguf")


@pytest.mark.parametrize("program", BOTH)
def test_a_budget_below_the_floor(program, refusal, sound_model):
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", sound_model, "--host-cache", "1K")
    assert re.search(r"cannot hold .*\n  give --host-cache 1MB or more", message)


@pytest.mark.parametrize("program", BOTH)
@pytest.mark.parametrize("options", [(), ("--device", "cpu"), ("--gpu-reserve", "1M")])
def test_a_context_beyond_the_models(program, options, refusal, sound_model):
    words = ("serve",) if program == STREAMD else ("chat", "-p", "hi")
    message = refusal(program, *words, "--model", sound_model, "--ctx", "100000", *options)
    assert re.search(r"--ctx 100000 is more than the model's context of \d+\n  give", message)


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
    assert re.search("--io cannot be 'quickly'\n  choose one of:? auto", message)


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
    remedy = "nothing has been stopped" if "stop" in command else "start one with: streamd --model"
    assert re.search(rf"no daemon .*is running\n  {remedy}", message)


def test_a_daemon_of_another_model(place, refusal, sound_model, tmp_path):
    daemon = place.daemon(sound_model)
    message = refusal(INFER, "chat", "-p", "hi", "--model", tmp_path / "b.gguf", "--name", "model")
    assert re.search("the daemon 'model' serves .*, not .*b.gguf\n", message)
    daemon.stop()


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
        (
            ("perplexity", "--file", "nowhere.txt"),
            "cannot read nowhere.txt: No such file or directory\n",
        ),
        (("chat", "-p", "hi", "--temp", "x"), "--temp cannot be 'x'\n  give a number\n"),
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
