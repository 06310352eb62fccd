"""The barrier that lets clients go without fences (membarrier(2)).

After `barrier()` returns, every registered process has passed a full memory barrier since it was
called. See docs/protocol.md for what hangs on it.
"""

import ctypes
import os
from collections.abc import Callable

from shared.errors import ConfigError

_SYS_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
_NUMBER = _SYS_MEMBARRIER.get(os.uname().machine)
_QUERY = 0
_GLOBAL = 1 << 0
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2

_libc = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> int:
    if _NUMBER is None:
        raise ConfigError(
            f"membarrier(2) is not known on {os.uname().machine}",
            "run on x86-64 or arm64 Linux",
        )
    result: int = _libc.syscall(_NUMBER, command, 0, 0)
    if result < 0:
        error = ctypes.get_errno()
        raise ConfigError(
            f"membarrier(2) is refused: {os.strerror(error)}",
            "a kernel of 4.16 or newer and a seccomp profile that allows membarrier are needed",
        )
    return result


def register() -> None:
    """Make this process answer the daemon's expedited barriers; once, before it reads slots."""
    if _membarrier(_QUERY) & _REGISTER_GLOBAL_EXPEDITED:
        _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def choose_barrier() -> Callable[[], None]:
    """The daemon's barrier: expedited (microseconds) where there is one, else the slow one (ms)."""
    command = _GLOBAL_EXPEDITED if _membarrier(_QUERY) & _GLOBAL_EXPEDITED else _GLOBAL
    _membarrier(command)

    def barrier() -> None:
        _membarrier(command)

    return barrier
