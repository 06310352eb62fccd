"""What docs/security.md promises of the code as a whole."""

import ast
import stat
from pathlib import Path

import pytest

PROJECT_DIR = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "streamd", "infer")
SOURCES = [path for name in PACKAGES for path in sorted((PROJECT_DIR / name).rglob("*.py"))]
# They turn bytes into whatever code the bytes ask for.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EVALUATORS = {"eval", "exec"}


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _allows_pickle(call: ast.Call) -> bool:
    """numpy and torch unpickle what they load where they are told to, or not told otherwise."""
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if _name(call) == "torch.load":
        return words.get("weights_only") != "True"
    return words.get("allow_pickle", "False") != "False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT_DIR)))
def test_nothing_is_unpickled_or_evaluated(path):
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert not imported & UNPICKLERS
    assert not [call for call in _calls(tree) if _name(call) in EVALUATORS]
    assert not [call for call in _calls(tree) if _allows_pickle(call)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT_DIR)))
def test_no_shell_is_started(path):
    for call in _calls(ast.parse(path.read_text())):
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert words.get("shell", "False") == "False"
        assert _name(call) not in ("os.system", "os.popen")


def test_the_check_would_notice():
    for source in ("numpy.load(f, allow_pickle=True)", "torch.load(f)"):
        assert [call for call in _calls(ast.parse(source)) if _allows_pickle(call)]
    assert not _allows_pickle(_calls(ast.parse("torch.load(f, weights_only=True)"))[0])


def test_nothing_is_left_executable_or_writable_for_others():
    for path in SOURCES:
        assert not path.stat().st_mode & stat.S_IWOTH, path
