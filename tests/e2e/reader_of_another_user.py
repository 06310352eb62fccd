"""Reads some slabs as another user: reader_of_another_user.py UID GID MODEL NAME

Prints how many, and how many of them were not what the file holds; or why it was kept out.
Everything is imported before: that user may not be allowed to read the interpreter's files.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from slab_reader import SlabReader

from shared.errors import StreamError

SECTION_COUNT = 40


def main(model: Path, name: str) -> None:
    reader = SlabReader(model, name)
    for at in range(SECTION_COUNT):
        layer = reader.layers[at % len(reader.layers)]
        reader.read(layer, np.arange(at, at + reader.experts.top_k) % reader.experts.n_experts)
    reader.close()
    print(json.dumps({"slabs": reader.slab_count, "torn": reader.torn_count}))


if __name__ == "__main__":
    uid, gid = map(int, sys.argv[1:3])
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    try:
        main(Path(sys.argv[3]), sys.argv[4])
    except StreamError as error:
        sys.exit(f"{type(error).__name__}: {error}")
