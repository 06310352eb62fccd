"""What the `infer` commands can be told; each option is declared here once."""

from dataclasses import dataclass
from pathlib import Path

from shared.daemon_options import DaemonOptions
from shared.errors import ConfigError
from shared.options import option, parse_count

DEFAULT_CONTEXT = 4096


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("give a number from 0 to 1")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:
        raise ValueError("give a number from 0 to 100")
    return value


@dataclass(frozen=True)
class ModelConfig(DaemonOptions):
    """Which model, and how it is computed."""

    model: Path | None = option(
        None, "the GGUF file (default: what the running daemon serves)", parse=Path
    )
    name: str | None = option(
        None, "the daemon to attach to (default: the one that serves the model)"
    )
    ctx: int = option(
        0, "tokens of context (default: the model's, at most 4096)", parse=parse_count, metavar="N"
    )
    chunk: int = option(256, "prompt tokens computed at once", parse=parse_count, metavar="N")
    exact: bool = option(False, "float32 activations and KV cache", parse=bool)
    threads: int = option(
        0, "CPU threads (default: as many as there are processors)", parse=parse_count, metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk == 0:
            raise ConfigError("--chunk is 0", "give 1 or more")


@dataclass(frozen=True)
class ChatConfig(ModelConfig):
    """How answers are drawn and framed."""

    system: str | None = option(None, "system message", metavar="TEXT")
    temp: float = option(0.7, "temperature; 0 takes the likeliest token", parse=_temperature)
    top_k: int = option(0, "draw from the K likeliest; 0: all", parse=parse_count, metavar="K")
    top_p: float = option(0.95, "draw from the likeliest that make up P", parse=_probability)
    min_p: float = option(0.0, "leave out those below P times the likeliest", parse=_probability)
    seed: int | None = option(None, "for the same draws again", parse=parse_count, metavar="N")
    max_tokens: int = option(
        0, "longest answer (default: what the context holds)", parse=parse_count, metavar="N"
    )
    think: bool | None = option(
        None, "let the model reason first (default: as its template says)", parse=bool
    )
    effort: str | None = option(
        None, "no_think, low or high, where the template knows it", metavar="EFFORT"
    )
