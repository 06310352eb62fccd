"""The barrier: the kernel's where there is one, and a clear word where there is none."""

import ctypes
import errno
import os

import pytest

from shared import membarrier
from shared.errors import ConfigError

GLOBAL, GLOBAL_EXPEDITED, REGISTER = 1, 2, 4


class FakeLibc:
    """A kernel that knows the commands of `supported`; `calls` are those it was given."""

    def __init__(self, supported=0, refusal=0):
        self._supported = supported
        self._refusal = refusal
        self.calls = []

    def syscall(self, number, command, flags, cpu):
        self.calls.append(command)
        if self._refusal:
            ctypes.set_errno(self._refusal)
            return -1
        return self._supported if command == 0 else 0


@pytest.fixture
def kernel(monkeypatch):
    def install(**traits):
        libc = FakeLibc(**traits)
        monkeypatch.setattr(membarrier, "_libc", libc)
        return libc

    return install


def test_on_this_machine():
    membarrier.register()
    barrier = membarrier.choose_barrier()
    for _ in range(10):
        barrier()


def test_the_expedited_barrier_is_chosen_where_there_is_one(kernel):
    libc = kernel(supported=GLOBAL | GLOBAL_EXPEDITED | REGISTER)
    barrier = membarrier.choose_barrier()
    del libc.calls[:]
    barrier()
    assert libc.calls == [GLOBAL_EXPEDITED]
    membarrier.register()
    assert libc.calls[-1] == REGISTER


def test_older_kernels_have_the_slow_one(kernel):
    libc = kernel(supported=GLOBAL)
    membarrier.register()
    assert REGISTER not in libc.calls
    membarrier.choose_barrier()()
    assert libc.calls[-1] == GLOBAL


@pytest.mark.parametrize("use", [membarrier.register, membarrier.choose_barrier])
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_or_container_that_refuses_it(kernel, use, code):
    kernel(refusal=code)
    with pytest.raises(ConfigError, match="is refused") as refusal:
        use()
    assert os.strerror(code) in refusal.value.message
    assert "seccomp" in refusal.value.remedy


def test_an_unknown_machine(monkeypatch):
    uname = os.uname()
    monkeypatch.setattr(membarrier.os, "uname", lambda: os.uname_result([*uname[:4], "quantum"]))
    monkeypatch.setattr(membarrier, "_NUMBER", None)
    with pytest.raises(ConfigError, match="not known on quantum"):
        membarrier.choose_barrier()
