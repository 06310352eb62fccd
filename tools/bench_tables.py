"""Rows of dataclasses as a table for people, and as files."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def print_table(rows: Sequence[Any], names: Sequence[str]) -> None:
    """Of each row the fields of these names."""
    table = [list(names), *([_text(asdict(row)[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)))


def write_json(path: Path, head: Mapping[str, Any], name: str, rows: Sequence[Any]) -> None:
    """The rows under `name`, behind what is said of all of them."""
    values = {**head, name: [asdict(row) for row in rows]}
    path.write_text(json.dumps(values, indent=1) + "\n")


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
