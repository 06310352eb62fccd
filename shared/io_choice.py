"""`--io`: which engine reads the disk, and whether a drive of a given speed is stood in for."""

import re
from dataclasses import dataclass

ENGINES = ("auto", "liburing", "uring-api", "pread")

_PACED = re.compile(r"paced:(?P<rate>[0-9.]+[MG]B/s)(?::(?P<engine>.+))?")
_RATE = re.compile(r"(?P<number>[0-9.]+)(?P<unit>[MG])B/s")
_UNIT_BYTES = {"M": 1e6, "G": 1e9}


class Rate(float):
    """Bytes a second."""

    def __str__(self) -> str:
        """As it is written on a command line."""
        return f"{self / 1e6:g}MB/s"


@dataclass(frozen=True)
class IoChoice:
    """paced_bytes_per_s: None for the drive's own speed."""

    engine: str = "auto"
    paced_bytes_per_s: Rate | None = None

    def __str__(self) -> str:
        """As it is written on a command line."""
        if self.paced_bytes_per_s is None:
            return self.engine
        return f"paced:{self.paced_bytes_per_s}:{self.engine}"


def parse_io(text: str) -> IoChoice:
    """`ENGINE` or `paced:7GB/s[:ENGINE]`; ValueError for anything else."""
    paced = _PACED.fullmatch(text)
    engine = (paced["engine"] or "auto") if paced else text
    if engine not in ENGINES:
        raise ValueError(f"choose one of {', '.join(ENGINES)}, or paced:7GB/s[:ENGINE]")
    if paced is None:
        return IoChoice(engine)
    return IoChoice(engine, parse_rate(paced["rate"]))


def parse_rate(text: str) -> Rate:
    """`7GB/s` or `500MB/s`; ValueError for anything else."""
    parts = _RATE.fullmatch(text)
    try:
        rate = float(parts["number"]) * _UNIT_BYTES[parts["unit"]] if parts else 0.0
    except ValueError:
        rate = 0.0
    if not 1e6 <= rate <= 1e12:
        raise ValueError("give a rate such as 7GB/s or 500MB/s")
    return Rate(rate)
