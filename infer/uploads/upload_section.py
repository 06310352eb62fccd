"""What a section of a client with slots of its own is, while something is uploaded for it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from infer.daemon.sections import Section


@dataclass(eq=False)
class Uploads:
    """What a section lacks. host: the same experts' section there; by place in that: `places` in
    the section it is for, and own slots as `targets`. ready: places that are queued and untold."""

    host: Section
    places: npt.NDArray[np.intp]
    targets: npt.NDArray[np.int32]
    ready: list[int] = field(default_factory=list)


@dataclass
class UploadSection(Section):
    """slots: of missing ones too, as soon as they have been asked for."""

    uploads: Uploads | None = None
