"""The metadata of a GGUF file: scalars read at once, arrays only when somebody asks for them.

key count x { key: string | value type u32 | value }
string = length u64 | bytes
array  = element type u32 | element count u64 | elements
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shared.errors import MalformedModel, UnsupportedModel
from shared.fingerprint import Fingerprint
from shared.gguf_header import HeaderReader, open_model_file, shown

MAX_KEYS = 1 << 14  # real ones: 70
MIN_KEY_ENTRY_BYTES = 8 + 4 + 1  # an empty key with a one-byte value

STRING_TYPE = 8
ARRAY_TYPE = 9
# value type -> the scalar's code in `struct`, which numpy's dtypes share
_SCALAR_CODES = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_KIND_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    list: "a list of texts",
    np.ndarray: "a list of numbers",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _ArraySpan:
    """An array that stayed in the file: `offset` is absolute, `count` in elements."""

    offset: int
    element_type: int
    count: int


class Metadata(Mapping[str, Any]):
    """The key-value section of one file.

    Values are bool, int, float, str, list[str] or a numpy array [count] of the file's dtype.
    Arrays are read from the file and decoded anew at each access: keep what you get. Strings are
    UTF-8, other bytes become lone surrogates. An access to an array raises ModelChanged where the
    file is no longer the one that was opened, ModelError and ReadFailed where it cannot be read.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint, entries: Mapping[str, Any]) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        value = self._entries[key]
        return self._load(value) if isinstance(value, _ArraySpan) else value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def extended(self, entries: Mapping[str, Any]) -> "Metadata":
        """These keys and `entries`, which count where both have one."""
        return Metadata(self._path, self._fingerprint, {**self._entries, **entries})

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which must be of `kind`: bool, int, float, str, list, np.ndarray.

        A whole number serves as a float. MalformedModel where it is missing or of another kind.
        """
        if key not in self._entries:
            raise MalformedModel(
                f"{self._path} lacks the key {shown(key)}",
                "convert the model again with a newer converter",
            )
        value: object = self[key]
        if kind is float and type(value) is int:
            value = float(value)
        if (
            not isinstance(value, kind)
            or isinstance(value, bool) != (kind is bool)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            raise MalformedModel(
                f"{self._path}: the key {shown(key)} is not {_KIND_NAMES[kind]}",
                "convert the model again with a newer converter",
            )
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """As `require`, but `default` where the key is missing."""
        return self.require(key, kind) if key in self._entries else default

    def _load(self, span: _ArraySpan) -> Any:
        with open_model_file(self._path) as fd:
            self._fingerprint.check_fd(fd, self._path)
            reader = HeaderReader(fd, self._path, span.offset)
            if span.element_type == STRING_TYPE:
                return reader.strings(span.count)
            dtype = np.dtype(_SCALAR_CODES[span.element_type])
            raw = np.frombuffer(reader.raw(span.count * dtype.itemsize), np.uint8)
            # A bool byte other than 0 and 1 must not become a numpy bool as it is.
            return raw != 0 if dtype == np.bool_ else raw.view(dtype.newbyteorder("<"))


def read_metadata(reader: HeaderReader, fingerprint: Fingerprint, key_count: int) -> Metadata:
    """Parse the key-value section at the cursor, which ends up behind it.

    MalformedModel for absurd counts, duplicate keys and keys that are not UTF-8; UnsupportedModel
    for value types that we do not know and for nested arrays.
    """
    if key_count > min(MAX_KEYS, reader.remaining_bytes // MIN_KEY_ENTRY_BYTES):
        raise reader.malformed(f"claims {key_count:,} metadata keys")
    entries: dict[str, Any] = {}
    for _ in range(key_count):
        key = read_name(reader)
        if key in entries:
            raise reader.malformed(f"has the key {shown(key)} twice")
        entries[key] = read_value(reader, key)
    return Metadata(reader.path, fingerprint, entries)


def read_name(reader: HeaderReader) -> str:
    """The name of a key or tensor."""
    raw = reader.string()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise reader.malformed(f"the name {shown(raw.decode('latin-1'))} is not UTF-8") from error


def read_value(reader: HeaderReader, key: str) -> Any:
    """Step over the value at the cursor: a scalar, or where an array lies."""
    value_type = reader.number("I")
    if value_type == STRING_TYPE:
        return str(reader.string(), "utf-8", "surrogateescape")
    if value_type == ARRAY_TYPE:
        return _read_array(reader, key)
    return reader.number(_scalar_code(reader, key, value_type))


def _read_array(reader: HeaderReader, key: str) -> _ArraySpan:
    element_type = reader.number("I")
    count = reader.number("Q")
    span = _ArraySpan(reader.position, element_type, count)
    if element_type == STRING_TYPE:
        reader.skip_strings(count)
    elif element_type == ARRAY_TYPE:
        raise UnsupportedModel(
            f"{reader.path}: the key {shown(key)} is an array of arrays",
            "convert the model again with the usual converter",
        )
    else:
        code = _scalar_code(reader, key, element_type)
        reader.skip(count * np.dtype(code).itemsize)
    return span


def _scalar_code(reader: HeaderReader, key: str, value_type: int) -> str:
    code = _SCALAR_CODES.get(value_type)
    if code is None:
        raise UnsupportedModel(
            f"{reader.path}: the key {shown(key)} has the unknown value type {value_type}",
            "convert or download the model again",
        )
    return code
