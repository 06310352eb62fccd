"""What the `infer` commands can be told; each option is declared here once."""

from dataclasses import dataclass
from pathlib import Path

from infer.caches.kv_limits import KvLimits, parse_kv_sessions
from shared.daemon_options import OWN_MTP, DaemonOptions
from shared.options import option, parse_count

AUTO_PREFETCH = "auto"
NO_PREFETCH = "off"
LANE_OFF, LANE_ON, LANE_AUTO = "off", "on", "auto"
NO_DRAFT = "none"
MTP_DRAFT = "mtp"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("give a number") from None


def _probability(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise ValueError("give a number from 0 to 1")
    return value


def _temperature(text: str) -> float:
    value = _number(text)
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
    exact: bool = option(False, "float32 activations and KV cache", parse=bool)
    prefetch: str = option(
        AUTO_PREFETCH,
        "guess and fetch the experts of the next layers: auto, off, or always so many"
        " layers ahead, 1 to 3",
        choices=(AUTO_PREFETCH, NO_PREFETCH, "1", "2", "3"),
        metavar="LAYERS",
    )
    compute_lane: str = option(
        LANE_OFF,
        "on a GPU, let the CPU compute experts of the host cache, which need not be uploaded then:"
        f" {LANE_OFF}, {LANE_ON}, or {LANE_AUTO}, if tokens are measured to take less time so; it"
        " changes the last bits",
        choices=(LANE_OFF, LANE_ON, LANE_AUTO),
        metavar="WHEN",
    )
    threads: int = option(
        0, "CPU threads (default: as many as there are processors)", parse=parse_count, metavar="N"
    )

    reconnect_s: int = option(
        30,
        "go on after a daemon has ended, if it is back within so many seconds; 0: do not wait",
        parse=parse_count,
        metavar="SECONDS",
    )
    mtp_indexer: bool = option(
        False,
        "GLM: the MTP block reads what an indexer of its own selects (default: everything)",
        parse=bool,
    )

    @property
    def wanted_mtp(self) -> str:
        """The MTP block that the command needs, as shared.mtp.open_served takes it."""
        return self.absolute_mtp


@dataclass(frozen=True)
class DraftConfig(ModelConfig):
    """How tokens are guessed ahead; they are verified, so that answers are as without."""

    draft: str = option(
        NO_DRAFT,
        f"{MTP_DRAFT}: guess a token ahead with the model's MTP block (default: {NO_DRAFT})",
        choices=(NO_DRAFT, MTP_DRAFT),
        metavar="KIND",
    )

    @property
    def wanted_mtp(self) -> str:
        if self.draft == NO_DRAFT:
            return self.absolute_mtp
        return self.absolute_mtp or OWN_MTP


@dataclass(frozen=True)
class ChatConfig(DraftConfig):
    """How answers are drawn and framed."""

    system: str | None = option(None, "system message", metavar="TEXT")
    temp: float = option(0.7, "temperature; 0 takes the likeliest token", parse=_temperature)
    top_k: int = option(0, "draw from the K likeliest; 0: all", parse=parse_count, metavar="K")
    top_p: float = option(0.95, "draw from the likeliest that make up P", parse=_probability)
    min_p: float = option(0.0, "leave out those below P times the likeliest", parse=_probability)
    seed: int | None = option(None, "for the same draws again", parse=parse_count, metavar="N")
    max_tokens: int = option(
        0, "longest answer; 0: what the context holds (default)", parse=parse_count, metavar="N"
    )
    kv_sessions: KvLimits = option(
        KvLimits(),
        "conversations kept on disk, so that their beginnings need not be computed again: a number,"
        " their size together such as 2G, or off (default: 8, at most 8G)",
        parse=parse_kv_sessions,
        metavar="N",
    )
    think: bool | None = option(
        None, "let the model reason first (default: as its template says)", parse=bool
    )
    effort: str | None = option(
        None, "no_think, low or high, where the template knows it", metavar="EFFORT"
    )
