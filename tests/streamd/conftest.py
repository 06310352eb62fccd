"""Makes the helper modules beside it importable for the tests; tests are no package here."""

import importlib.util
import sys
from pathlib import Path

for _name in ("cache_bench", "cache_world"):  # in the order in which they need each other
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
