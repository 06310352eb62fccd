"""streamd with the grace period switched off: slots are reused while clients may read them."""

import sys

from shared.residency import NONE_EPOCH
from shared.slots import ClassSlots
from streamd.cli import main

_reclaim = ClassSlots.reclaim


def _reclaim_at_once(slots: ClassSlots, _oldest_epoch: int) -> None:
    """As if no client were in a section."""
    _reclaim(slots, NONE_EPOCH)


if __name__ == "__main__":
    ClassSlots.reclaim = _reclaim_at_once
    sys.exit(main())
