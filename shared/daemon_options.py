"""The daemon's options that `infer` accepts too and hands to a daemon it starts for itself."""

from dataclasses import dataclass, fields

from shared.errors import ConfigError
from shared.io_choice import IoChoice, parse_io
from shared.options import option, parse_auto_size, parse_size

CPU = "cpu"
CUDA = "cuda:"
MAX_GPUS = 64


def parse_device(text: str) -> str:
    number = text.removeprefix(CUDA)
    if text in ("auto", CPU):
        return text
    if number != text and number.isdecimal() and int(number) < MAX_GPUS:
        return f"{CUDA}{int(number)}"
    raise ValueError("give auto, cpu or cuda:0, cuda:1, ...")


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
    gpu_reserve: int = option(
        1 << 30,
        "GPU memory left to the clients for KV cache and activations (default: 1G)",
        parse=parse_size,
        metavar="SIZE",
    )
    device: str = option(
        "auto", "auto, cpu or cuda:N: where the model runs", parse=parse_device, metavar="DEVICE"
    )
    io: IoChoice = option(
        IoChoice(),
        "how the disk is read: auto, liburing, uring-api or pread;"
        " paced:7GB/s[:ENGINE] stands in for a drive of that speed",
        parse=parse_io,
        metavar="ENGINE",
    )

    def __post_init__(self) -> None:
        if self.device == CPU and self.gpu_cache:
            raise ConfigError(
                "--device cpu leaves no use for --gpu-cache", "leave one of the two out"
            )

    @property
    def gpu_ordinal(self) -> int:
        """The N of cuda:N; 0 where none is named."""
        return int(self.device.removeprefix(CUDA)) if self.device.startswith(CUDA) else 0

    @property
    def wants_gpu(self) -> bool | None:
        """True: a GPU tier or nothing; None: if there can be one."""
        if self.device == CPU or self.gpu_cache == 0:
            return False
        return True if self.gpu_cache or self.device.startswith(CUDA) else None

    def arguments(self) -> list[str]:
        """As a command line, options at their default left out."""
        words: list[str] = []
        for field in fields(DaemonOptions):
            value = getattr(self, field.name)
            if value != field.default:
                words += ["--" + field.name.replace("_", "-"), str(value)]
        return words
