"""The maker of synthetic models: what it refuses, before it writes anything."""

import make_synthetic
import pytest

from shared.command import run_command


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs the command, which has to fail; what it says."""

    def run(*words: str) -> str:
        out = () if "--out" in words else ("--out", str(tmp_path / "s.gguf"))
        monkeypatch.setattr("sys.argv", ["make_synthetic", *out, *words])
        assert run_command("make_synthetic", make_synthetic.main) == 1
        assert not (tmp_path / "s.gguf").exists()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "cause", "remedy"),
    [
        (("--layers", "-3"), "--layers -3: the first layer is dense", "2 or more"),
        (("--layers", "1"), "--layers 1: the first layer is dense", "2 or more"),
        (("--expert-count", "0"), "--expert-count 0: each token goes to 8", "8 or more"),
        (("--expert-count", "7"), "--expert-count 7: each token goes to 8", "8 or more"),
        (("--experts", "foo"), "--experts foo: an expert has three", "GATE,UP,DOWN"),
        (("--experts", "Q2_K,foo,Q2_K"), "--experts: no tensor of type 'foo'", "give one such"),
        (("--experts", "Q2_K,I8,Q2_K"), "--experts: no tensor of type 'I8'", "give one such"),
        (("--resident", "XX"), "--resident: no tensor of type 'XX'", "give one such"),
        (("--out", "/nonexist/s.gguf"), "/nonexist/s.gguf cannot be written", "another --out"),
    ],
)
def test_what_cannot_be_made_is_told(refused, words, cause, remedy):
    told = refused(*words).splitlines()
    assert told[0].startswith(f"make_synthetic: {cause}")
    assert remedy in told[1]


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path, refused, monkeypatch):
    out = tmp_path / "there.gguf"
    out.write_bytes(b"a model of somebody's")
    assert "there.gguf exists\n  give another --out, or --force" in refused("--out", str(out))
    assert out.read_bytes() == b"a model of somebody's"
    monkeypatch.setattr(make_synthetic, "write_model", lambda arguments: out.write_bytes(b"new"))
    monkeypatch.setattr("sys.argv", ["make_synthetic", "--out", str(out), "--force"])
    assert run_command("make_synthetic", make_synthetic.main) == 0
    assert out.read_bytes() == b"new"
