"""`--version`: of the installed package."""

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGE = "streamd-infer"


def program_version() -> str:
    """That of the package, else "unknown": sources can be run without being installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


class VersionAction(argparse.Action):
    """Prints program and version and exits; they are looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"{parser.prog} {program_version()}")
        parser.exit()
