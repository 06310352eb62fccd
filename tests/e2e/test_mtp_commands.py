"""The MTP block as a user meets it: served when asked for, used for drafting, else refused."""

import json

import gguf
import numpy as np
import pytest

Q2_K = gguf.GGMLQuantizationType.Q2_K
TOKENS = "3,1,4,1,5,9,2,6"


@pytest.fixture(scope="module")
def made(gguf_factory, tmp_path_factory):
    """Paths: a model with an MTP block whose experts are larger, the same without, the block."""
    directory = tmp_path_factory.mktemp("models")
    model = gguf_factory.hy3_model(mtp=True, layer_expert_types={3: [Q2_K] * 3})
    whole = model.write(directory / "whole.gguf")
    block = {name: t for name, t in model.tensors.items() if name.startswith("blk.3.")}
    for name in block:
        del model.tensors[name]
    alone = gguf_factory.TinyModel("hy_v3", {"hy_v3.block_count": 4}, block)
    return whole, model.write(directory / "trunk.gguf"), alone.write(directory / "mtp.gguf")


def json_of(place, *words):
    done = place.run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_takes_memory_only_where_it_is_asked_for(place, made):
    whole, trunk, block = made
    plain = json_of(place, "streamd", "plan", "--model", whole)
    served = json_of(place, "streamd", "plan", "--model", whole, "--mtp")
    apart = json_of(place, "streamd", "plan", "--model", trunk, "--mtp", block)
    assert len(served["class_slots"]) == len(plain["class_slots"]) + 1
    for name in ("floor_bytes", "resident_bytes"):
        assert plain[name] == json_of(place, "streamd", "plan", "--model", trunk)[name]
        assert plain[name] < served[name] == apart[name]


def dumped(place, path, *words):
    files = ("--out", path / "l.npy", "--dump", path / "d.npz")
    done = place.run("infer", "logits", "--exact", "--tokens", TOKENS, *words, *files)
    assert done.returncode == 0, done.stderr
    return np.load(path / "l.npy"), dict(np.load(path / "d.npz"))


def test_its_logits_are_dumped_from_a_daemon_of_ones_own(place, made, tmp_path):
    whole, trunk, block = made
    logits, values = dumped(place, tmp_path, "--model", whole, "--mtp")
    assert values["mtp_logits"].shape == (7, logits.shape[1])
    assert values["mtp_hidden"].shape == (7, values["hidden.0"].shape[1])
    apart, others = dumped(place, tmp_path, "--model", trunk, "--mtp", block)
    np.testing.assert_array_equal(apart, logits)
    np.testing.assert_array_equal(others["mtp_logits"], values["mtp_logits"])


def test_the_smallest_cache_will_do(place, made):
    """Drafting streams the block's experts through the floor of their class."""
    _, trunk, block = made
    floor_bytes = json_of(place, "streamd", "plan", "--model", trunk, "--mtp", block)["floor_bytes"]
    daemon = place.daemon(trunk, "--mtp", block, "--host-cache", floor_bytes)
    words = ("bench", "--name", daemon.name, "-p", "9", "-n", "20", "--warmup", "0")
    bench = json_of(place, "infer", *words, "--draft", "mtp")
    assert bench["draft_speedup"] == pytest.approx(bench["draft_decode_tps"] / bench["decode_tps"])
    assert 0 <= bench["draft_accepted_share"] <= 1
    assert place.stats(daemon.name)["tiers"]["host"]["evictions"] > 0


def test_the_answer_is_the_same(place, made):
    whole, _, _ = made
    words = ("chat", "--model", whole, "--temp", "0", "--max-tokens", "30", "-p", "the end and the")
    plain, drafted = (place.run("infer", *words, *more) for more in ((), ("--draft", "mtp")))
    assert plain.returncode == drafted.returncode == 0, drafted.stderr
    assert plain.stdout == drafted.stdout != ""
    assert "guesses stood" in drafted.stderr
    assert "guesses stood" not in plain.stderr


def test_what_there_is_not_is_refused(refusal, place, made):
    whole, trunk, _ = made
    message = refusal("infer", "bench", "--model", trunk, "--draft", "mtp")
    assert "has no MTP block" in message
    assert "--mtp FILE" in message
    daemon = place.daemon(whole)
    message = refusal("infer", "bench", "--name", daemon.name, "--draft", "mtp")
    assert "does not serve the MTP block" in message
    assert "restart it with --mtp" in message
