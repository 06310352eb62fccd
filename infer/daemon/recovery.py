"""When the daemon goes in the middle of something: until it is there again, and for how long."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from shared.errors import DaemonLost, ModelChanged
from shared.runtime_dir import running_daemons, same_model

POLL_PAUSE_S = 0.1


def tell_on_stderr(text: str) -> None:
    print(f"infer: {text}", file=sys.stderr)


class Recovery:
    """Of a client of the daemon `name`, which serves `model`.

    deadline_s: how long a daemon may be away. restart: starts one of our own again, which is done
    once; None for a daemon that others start. tell: says in a line what is waited for.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        deadline_s: float,
        restart: Callable[[], None] | None = None,
        tell: Callable[[str], None] = tell_on_stderr,
    ) -> None:
        self.tell = tell
        self._name = name
        self._model = model
        self._deadline_s = deadline_s
        self._restart = restart
        self._is_own = restart is not None

    def wait(self, lost: DaemonLost, lost_at_s: float) -> None:
        """Until a daemon of that name runs; it may be loading its model yet.

        lost_at_s: when it was missed first (time.monotonic). Raises `lost` when it has been away
        for too long, ModelChanged if it serves another model now.
        """
        if self._is_own:
            self._start_again(lost)
            return
        end_s = lost_at_s + self._deadline_s
        self.tell(f"{lost.message}; waiting up to {self._deadline_s:g} s for it to come back")
        while (served := self._served()) is None:
            if time.monotonic() > end_s:
                raise lost
            time.sleep(POLL_PAUSE_S)
        if time.monotonic() > end_s:  # it runs, but does not answer
            raise lost
        if not same_model(served, self._model):
            raise ModelChanged(
                f"the daemon {self._name!r} serves {served} now, not {self._model}",
                "start this again, with the --name or --model that you mean",
            )

    def _start_again(self, lost: DaemonLost) -> None:
        restart, self._restart = self._restart, None
        if restart is None:
            raise lost
        self.tell(f"{lost.message}; starting it again")
        restart()

    def _served(self) -> str | None:
        """The model of the daemon of our name."""
        models = (record.model for record in running_daemons() if record.name == self._name)
        return next(models, None)
