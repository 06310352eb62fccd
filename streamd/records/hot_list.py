"""What was hot, kept for the next start: heat of every expert, in each tier.

One .npz a model in $STATE_DIRECTORY (systemd), else $XDG_STATE_HOME/streamd (~/.local/state):

    shards  int64 [n_shards, 2]    size in bytes and mtime in ns of each file: another file, another
                                   list; device and inode may be others after a restart
    host    float32 [n_layers, n_experts]
    gpu     the same

One that is missing, damaged or of another model counts as empty. It is written beside and renamed,
so that a crash leaves the old one.
"""

import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared import user_files
from shared.fingerprint import Fingerprint
from shared.user_files import replacing
from shared.wire import GPU_TIER, HOST_TIER

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
# Of models that are used no more, the lists written longest ago go.
MAX_LISTS = 32
TIERS = (HOST_TIER, GPU_TIER)

Heats = Mapping[str, npt.NDArray[np.float32]]


def state_dir() -> Path:
    if service_dir := os.environ.get("STATE_DIRECTORY"):
        return Path(service_dir.split(":", maxsplit=1)[0])
    return user_files.state_dir()


class HotList:
    """shape: [n_layers, n_experts]."""

    def __init__(
        self, model: Path, fingerprints: Sequence[Fingerprint], shape: tuple[int, int]
    ) -> None:
        self._shards = np.array([(f.size_bytes, f.mtime_ns) for f in fingerprints], np.int64)
        self._shape = shape
        digest = hashlib.sha256(self._shards.tobytes()).hexdigest()[:16]
        self.path = state_dir() / f"hot-{model.stem[:64]}-{digest}.npz"

    def load(self) -> Heats:
        """By tier, float32 [n_layers, n_experts]; empty where there is nothing to be had."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES)
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                if not np.array_equal(arrays["shards"], self._shards):
                    return {}
                heats = {tier: arrays[tier] for tier in TIERS}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("the hot list %s cannot be read: %s", self.path, error)
            return {}
        return heats if all(map(self._is_sound, heats.values())) else {}

    def save(self, heats: Heats) -> None:
        """Tiers that are not there count as cold. What keeps it from being written is logged."""
        cold = np.zeros(self._shape, np.float32)
        host, gpu = (heats.get(tier, cold).reshape(self._shape) for tier in TIERS)
        content = io.BytesIO()
        np.savez(content, shards=self._shards, host=host, gpu=gpu)
        try:
            self._write(content.getvalue())
        except OSError as error:
            log.warning("the hot list %s cannot be kept: %s", self.path, error)

    def _write(self, content: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.write(content)
        lists = [(path.stat().st_mtime_ns, path) for path in self.path.parent.glob("hot-*.npz")]
        for _, path in sorted(lists)[:-MAX_LISTS]:
            path.unlink(missing_ok=True)

    def _is_sound(self, heat: npt.NDArray[np.float32]) -> bool:
        return (
            heat.dtype == np.float32
            and heat.shape == self._shape
            and bool(np.isfinite(heat).all() and (heat >= 0).all())
        )
