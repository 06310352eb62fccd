"""on_terminal.py PROGRAM WORD...: stdin's terminal becomes the controlling one, then PROGRAM runs.

Only so does the terminal turn Ctrl-C into a signal. This process must lead a session.
"""

import fcntl
import os
import sys
import termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
