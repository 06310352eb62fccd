"""streamd where io_uring_setup is denied, as containers and hardened kernels do it.

The environment's DENIED_WITH names the error: EPERM or ENOSYS.
"""

import ctypes
import errno
import os
import struct
import sys

from streamd.cli import main

# linux/seccomp.h and linux/bpf_common.h; io_uring_setup is call 425 everywhere
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
IO_URING_SETUP = 425
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def deny_io_uring(number: int) -> None:
    steps = [
        (LOAD_WORD, 0, 0, 0),
        (JUMP_EQUAL, 0, 1, IO_URING_SETUP),
        (RETURN, 0, 0, ERRNO | number),
        (RETURN, 0, 0, ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program))
    prctl = ctypes.CDLL(None).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header):
        sys.exit("cannot set the filter")


if __name__ == "__main__":
    deny_io_uring(getattr(errno, os.environ["DENIED_WITH"]))
    sys.exit(main())
