"""Makes cache_bench.py importable for the tests beside it; tests are no package here."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "cache_bench", Path(__file__).with_name("cache_bench.py")
)
_module = importlib.util.module_from_spec(_spec)
sys.modules["cache_bench"] = _module
_spec.loader.exec_module(_module)
