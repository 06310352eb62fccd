"""Modules that several tests share. Tests are no package, so these are made importable by hand."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_beside(file: str, *names: str) -> list[ModuleType]:
    """Modules in the folder of `file`, in the order in which they need each other; from here on
    they can be imported by their names."""
    return [_load(Path(file).with_name(f"{name}.py")) for name in names]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
