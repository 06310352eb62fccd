"""Sizes as people read and write them: MB and GB are powers of 1000, as drives are sold.

What a user gives may be in powers of 1024: 24G and 24GiB are 24 x 2^30 bytes, 24GB is 24 x 10^9.
"""

import math
import re

_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)(?:([KMGT])(i?B)?)?", re.IGNORECASE | re.ASCII)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_MAX_BYTES = 1 << 62


def size_text(size_bytes: float) -> str:
    """Three digits and a unit: `12.6 MB`, `1.23 GB`."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size_bytes /= 1000
        if size_bytes < 999.5:
            return f"{three_digits(size_bytes)} {unit}"
    return f"{three_digits(size_bytes / 1000)} TB"


def three_digits(value: float) -> str:
    """A positive value to three digits, never with an exponent: `0.0829`, `12.6`, `5,760`."""
    rounded = float(f"{value:.2e}")
    digits = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{rounded:,.{digits}f}"


def mb(size_bytes: float) -> str:
    """To compare with another one: `0.6 MB`, `12,590 MB`."""
    return f"{size_bytes / 1e6:,.{1 if size_bytes < 1e8 else 0}f} MB"


def at_least(size_bytes: int) -> str:
    """The smallest whole number of MB that holds so much, as an option takes it."""
    return f"{-(-size_bytes // 10**6)}MB"


def at_most(size_bytes: int) -> str:
    """The largest whole number of MB within so much, as an option takes it."""
    return f"{max(0, size_bytes) // 10**6}MB"


def parse_size(text: str) -> int:
    """Bytes from '24G', '24GB', '1.5TiB', '4096'; ValueError for anything else."""
    match = _SIZE.fullmatch(text)
    size_bytes = -1
    if match:
        number, prefix, unit = match.groups()
        base = 1000 if (unit or "").upper() == "B" else 1024
        factor = base ** _POWERS[prefix.upper()] if prefix else 1
        size_bytes = int(float(number) * factor) if "." in number else int(number) * factor
    if not 0 <= size_bytes < _MAX_BYTES:
        raise ValueError("give a size such as 24G, 24GB, 512M or a number of bytes")
    return size_bytes
