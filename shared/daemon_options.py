"""The daemon's options that `infer` accepts too and hands to a daemon it starts for itself."""

from dataclasses import dataclass, fields
from pathlib import Path

from shared.errors import ConfigError
from shared.io_choice import IoChoice, Rate, parse_io, parse_rate
from shared.options import option, parse_auto_size, parse_count

CPU = "cpu"
# What `--mtp` alone stands for; a file of this name in the working directory is ./model.
OWN_MTP = "model"
CUDA = "cuda:"
MAX_GPUS = 64
AUTO_CHUNK = "auto"


def parse_device(text: str) -> str:
    number = text.removeprefix(CUDA)
    if text in ("auto", CPU):
        return text
    if number != text and number.isdecimal() and int(number) < MAX_GPUS:
        return f"{CUDA}{int(number)}"
    raise ValueError("give auto, cpu or cuda:0, cuda:1, ...")


def parse_chunk(text: str) -> int | None:
    if text == AUTO_CHUNK:
        return None
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"give {AUTO_CHUNK}, or 1 or more tokens")
    return int(text)


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
    vram: int | None = option(
        None,
        "GPU memory that daemon and one client may take together, such as 16G; the slots get what"
        " contexts, resident tensors, KV cache and activations leave (default: auto, what is free)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    gpu_resident: int | None = option(
        None,
        "GPU memory for the resident tensors of layers, such as 6G; the others are copied a layer"
        " ahead for every token (default: auto, what fits beside the slots that are needed)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    gpu_reserve: int | None = option(
        None,
        "GPU memory left to the clients for KV cache and activations (default: auto, by --ctx and"
        " --chunk)",
        parse=parse_auto_size,
        metavar="SIZE",
    )
    ctx: int = option(
        0,
        "tokens of context of a client (default: the model's, at most 4096)",
        parse=parse_count,
        metavar="N",
    )
    chunk: int | None = option(
        None,
        "prompt tokens computed at once (default: auto, as many as memory allows)",
        parse=parse_chunk,
        metavar="N",
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
    upload_pace: Rate = option(
        Rate(0),
        "stand in for a bus of that speed to the GPU, such as 13GB/s (for benchmarks)",
        parse=parse_rate,
        metavar="RATE",
    )

    mtp: str = option(
        "",
        "serve the model's multi-token-prediction block too, which `infer --draft mtp` needs;"
        " FILE if it lies in a GGUF of its own",
        metavar="FILE",
        alone=OWN_MTP,
    )

    def __post_init__(self) -> None:
        for name, size_bytes in (("gpu-cache", self.gpu_cache), ("vram", self.vram)):
            if self.device == CPU and size_bytes:
                raise ConfigError(
                    f"--device cpu leaves no use for --{name}", "leave one of the two out"
                )

    @property
    def absolute_mtp(self) -> str:
        """`mtp`, its file in a form that no change of the working directory touches."""
        return str(Path(self.mtp).absolute()) if self.mtp not in ("", OWN_MTP) else self.mtp

    @property
    def gpu_ordinal(self) -> int:
        """The N of cuda:N; 0 where none is named."""
        return int(self.device.removeprefix(CUDA)) if self.device.startswith(CUDA) else 0

    @property
    def wants_gpu(self) -> bool | None:
        """True: a GPU tier or nothing; None: if there can be one."""
        if self.device == CPU or self.gpu_cache == 0:
            return False
        return True if self.gpu_cache or self.vram or self.device.startswith(CUDA) else None

    def arguments(self) -> list[str]:
        """As a command line, options at their default left out."""
        words: list[str] = []
        for field in fields(DaemonOptions):
            value = getattr(self, field.name)
            if value != field.default:
                words += ["--" + field.name.replace("_", "-"), str(value)]
        return words
