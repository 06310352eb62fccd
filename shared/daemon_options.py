"""The daemon's options that `infer` accepts too and hands to a daemon it starts for itself."""

from dataclasses import dataclass, fields

from shared.options import option, parse_auto_size

IO_ENGINES = ("auto", "liburing", "uring-api", "pread")


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
    io: str = option(
        "auto",
        "how the disk is read: auto, liburing, uring-api or pread",
        choices=IO_ENGINES,
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
