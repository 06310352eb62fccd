"""streamd on a machine whose free memory is what the file AVAILABLE says, in bytes.

Where that is plenty it takes back what it gave up at once, and not after a while.
"""

import os
import sys
from pathlib import Path

from streamd.cli import main
from streamd.tiers import governor, host_governor

if __name__ == "__main__":
    told = Path(os.environ["AVAILABLE"])
    host_governor.available_memory_bytes = lambda: int(told.read_text())
    host_governor.INTERVAL_S = governor.CALM_S = 0.05
    sys.exit(main())
