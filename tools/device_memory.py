"""How much of a GPU's memory is in use, by the driver's own tool: asking in this process would take
memory there."""

import shutil
import subprocess
import tempfile
from typing import IO

SAMPLE_PERIOD_MS = 20


def used_mib(ordinal: int) -> int | None:
    """By everybody, at present; None where there is no GPU, or nobody says."""
    command = _command(ordinal)
    if not command:
        return None
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return next(iter(_numbers(done.stdout)), None)


class DeviceMemory:
    """The most memory that came into use on a GPU meanwhile, by anybody; None where there is no
    GPU, or nobody says."""

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal
        self._before_mib = 0
        self._samples: IO[str] | None = None  # no pipe: nobody would empty it for minutes
        self.peak_bytes: int | None = None

    def __enter__(self) -> "DeviceMemory":
        if self._ordinal is not None and (before_mib := used_mib(self._ordinal)) is not None:
            self._before_mib = before_mib
            self._samples = tempfile.TemporaryFile("w+")
            watching = [*_command(self._ordinal), f"-lms={SAMPLE_PERIOD_MS}"]
            self._watcher = subprocess.Popen(watching, stdout=self._samples)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._samples is None:
            return
        with self._samples:
            self._watcher.terminate()
            self._watcher.wait()
            self._samples.seek(0)
            most_mib = max(_numbers(self._samples.read()), default=self._before_mib)
        self.peak_bytes = (most_mib - self._before_mib) << 20


def _command(ordinal: int) -> list[str]:
    tool = shutil.which("nvidia-smi")
    what = (f"--id={ordinal}", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return [tool, *what] if tool else []


def _numbers(lines: str) -> list[int]:
    """Where the driver does not know, it says so in words."""
    return [int(word) for word in lines.split() if word.isdecimal()]
