"""How often experts came to the caches while a prompt was computed: at most once a chunk each."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from infer.engine import Engine
from shared.stats_view import counted


@dataclass(frozen=True)
class PromptReads:
    """Of one prompt, or of several together.

    chunks: it was computed in; experts: that its chunks touched, each counted once a layer and
    chunk; absent: those of them that had to be waited for. slabs, read_bytes: that the drive read
    meanwhile, for whomever; uploads, uploaded_bytes: that went to the GPU.
    """

    chunks: int
    experts: int
    absent: int
    slabs: int
    read_bytes: int
    uploads: int
    uploaded_bytes: int

    @classmethod
    def together(cls, reads: Sequence["PromptReads"]) -> "PromptReads":
        return cls(*map(sum, zip(*map(astuple, reads), strict=True)))

    @property
    def reads_per_expert(self) -> float:
        """And chunk: 1 if each expert touched was read, once."""
        return self.slabs / max(1, self.experts)

    @property
    def uploads_per_expert(self) -> float:
        return self.uploads / max(1, self.experts)

    def values(self) -> dict[str, float]:
        """For `infer bench --json`."""
        return {**vars(self), "reads_per_expert": self.reads_per_expert}

    def describe(self) -> str:
        """A row of `infer bench`: the number ends where those of the rows above do."""
        number, noun = counted(self.slabs, "slab").split()
        return (
            f"{number:>9} {noun} read for {counted(self.experts, 'expert')} touched in"
            f" {counted(self.chunks, 'chunk')}: {self.reads_per_expert:.2f} for each"
        )


class PromptWatch:
    """Looks at the daemon's counters before a prompt and behind it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._counts()

    def reads(self, token_count: int) -> PromptReads:
        """Since this was made; `token_count` tokens have been computed in one go."""
        grown = [now - then for now, then in zip(self._counts(), self._before, strict=True)]
        hits, misses, *rest = grown
        chunk_count = -(-token_count // self._engine.chunk)
        return PromptReads(chunk_count, hits + misses, misses, *rest)

    def _counts(self) -> tuple[int, ...]:
        client = self._engine.client
        stats = client.stats()
        disk = stats["io"]["slabs"], stats["io"]["bytes_read"]
        return (*client.lookups, *disk, *client.uploads(stats))
