"""streamd as it may be after an upgrade: it speaks the next version of the protocol."""

import sys

import shared.wire
from streamd.cli import main

if __name__ == "__main__":
    shared.wire.PROTOCOL_VERSION += 1
    sys.exit(main())
