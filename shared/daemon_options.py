"""The daemon's options that `infer` accepts too and hands to a daemon it starts for itself."""

from dataclasses import dataclass, fields

from shared.io_choice import IoChoice, parse_io
from shared.options import option, parse_auto_size


@dataclass(frozen=True)
class DaemonOptions:
    host_cache: int | None = option(
        None,
        "memory for expert slots in RAM, such as 24G (default: auto, what is free)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    gpu_cache: int | None = option(
        None,
        "memory for expert slots on the GPU (default: auto)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    device: str = option(
        "auto", "auto or cpu: where the model runs", choices=("auto", "cpu"), metavar="DEVICE"
    )
    io: IoChoice = option(
        IoChoice(),
        "how the disk is read: auto, liburing, uring-api or pread;"
        " paced:7GB/s[:ENGINE] stands in for a drive of that speed",
        parse=parse_io,
        metavar="ENGINE",
    )

    def arguments(self) -> list[str]:
        """As a command line, options at their default left out."""
        words: list[str] = []
        for field in fields(DaemonOptions):
            value = getattr(self, field.name)
            if value != field.default:
                words += ["--" + field.name.replace("_", "-"), str(value)]
        return words
