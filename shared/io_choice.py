"""`--io`: which engine reads the disk, and whether a drive of a given speed is stood in for."""

import re
from dataclasses import dataclass

ENGINES = ("auto", "liburing", "uring-api", "pread")

_PACED = re.compile(r"paced:(?P<rate>[0-9.]+)(?P<unit>[MG])B/s(?::(?P<engine>.+))?")
_UNIT_BYTES = {"M": 1e6, "G": 1e9}


@dataclass(frozen=True)
class IoChoice:
    """paced_bytes_per_s: None for the drive's own speed."""

    engine: str = "auto"
    paced_bytes_per_s: float | None = None

    def __str__(self) -> str:
        """As it is written on a command line."""
        if self.paced_bytes_per_s is None:
            return self.engine
        return f"paced:{self.paced_bytes_per_s / 1e6:g}MB/s:{self.engine}"


def parse_io(text: str) -> IoChoice:
    """`ENGINE` or `paced:7GB/s[:ENGINE]`; ValueError for anything else."""
    paced = _PACED.fullmatch(text)
    engine = (paced["engine"] or "auto") if paced else text
    if engine not in ENGINES:
        raise ValueError(f"choose one of {', '.join(ENGINES)}, or paced:7GB/s[:ENGINE]")
    if paced is None:
        return IoChoice(engine)
    try:
        rate = float(paced["rate"]) * _UNIT_BYTES[paced["unit"]]
    except ValueError:
        rate = 0.0
    if not 1e6 <= rate <= 1e12:
        raise ValueError("give a rate such as 7GB/s or 500MB/s")
    return IoChoice(engine, rate)
