"""streamd with an address space hardly larger than what its programs take: SPARE_MB beyond."""

import mmap
import os
import resource
import sys
from pathlib import Path

import streamd.daemon  # noqa: F401 - loaded before the limit is set
from streamd.cli import main

if __name__ == "__main__":
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit = used_bytes + (int(os.environ["SPARE_MB"]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.exit(main())
