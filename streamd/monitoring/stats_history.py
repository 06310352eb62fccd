"""Rates from a row of answers to `stats`: how much a counter grew over a window of time."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

WINDOWS_S = (1.0, 60.0)
# A pause is never exact: what is nearly as old as the window will do.
SLACK_S = 0.1
# The longest window at the shortest pause that `--watch` takes, and one answer before it.
MAX_SAMPLES = 601


def value_at(values: dict[str, Any], path: str) -> float:
    """The number at `tiers.host.hits`; 0 where there is none, as at the daemon's start."""
    found: Any = values
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else 0.0


class History:
    """The last answers, `now` the newest. A daemon that was started anew begins a new one."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._samples: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_SAMPLES)

    def add(self, values: dict[str, Any]) -> None:
        if self._samples and values["uptime_s"] < self.now["uptime_s"]:
            self._samples.clear()
        self._samples.append((self._now_s(), values))

    @property
    def now(self) -> dict[str, Any]:
        return self._samples[-1][1]

    @property
    def earlier(self) -> dict[str, Any] | None:
        """The answer before the newest; None where there is none."""
        return self._samples[-2][1] if len(self._samples) > 1 else None

    def before(self, window_s: float | None) -> tuple[float, dict[str, Any]]:
        """(seconds ago, answer) of the youngest that is `window_s` old; None: the daemon's start.

        Of a shorter history the oldest: a single answer has not grown yet.
        """
        if window_s is None:
            return self.now["uptime_s"], {}
        newest_s = self._samples[-1][0]
        oldest_s, oldest = self._samples[0]
        for at_s, values in reversed(self._samples):
            if newest_s - at_s >= window_s - SLACK_S:
                return newest_s - at_s, values
        return newest_s - oldest_s, oldest

    def growth(self, path: str, window_s: float | None) -> float:
        return value_at(self.now, path) - value_at(self.before(window_s)[1], path)

    def rate(self, path: str, window_s: float | None) -> float:
        """Of a counter, a second."""
        seconds, _ = self.before(window_s)
        return self.growth(path, window_s) / max(seconds, 1e-9)

    def hit_share(self, tier: str, window_s: float | None) -> float | None:
        """0 to 1; None where nothing was looked up."""
        hits = self.growth(f"tiers.{tier}.hits", window_s)
        lookups = hits + self.growth(f"tiers.{tier}.misses", window_s)
        return hits / lookups if lookups > 0 else None

    def layer_growth(self, tier: str, window_s: float | None) -> list[int]:
        """Misses of each layer over a window."""
        after = self.now["tiers"][tier]["layer_misses"]
        before = self.before(window_s)[1].get("tiers", {}).get(tier, {}).get("layer_misses", [])
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]

    def client_rate(self, client: dict[str, Any], window_s: float | None) -> float:
        """Tokens a second of one of the clients attached now."""
        seconds, values = self.before(window_s)
        ago = (c for c in values.get("clients", []) if c["pid"] == client["pid"])
        earlier = next((c["tokens"] for c in ago if c["client"] == client["client"]), 0)
        return float(max(0, client["tokens"] - earlier) / max(seconds, 1e-9))
