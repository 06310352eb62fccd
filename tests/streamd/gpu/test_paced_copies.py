"""A paced bus tells of a copy when a bus of that speed would have done it, never before it is."""

from shared.device_copies import Copy
from shared.errors import GpuError
from streamd.gpu.paced_copies import PacedCopies


class InstantCopies:
    """Copies are done when `done` says so."""

    def __init__(self) -> None:
        self.queued, self.done, self.drained = [], [], False

    @property
    def copying(self) -> bool:
        return bool(self.queued)

    def submit(self, token, copies) -> None:
        if token < 0:
            raise GpuError("refused", "none")
        self.queued.append(token)

    def reap(self):
        ended, self.done = self.done, []
        for token, _ in ended:
            self.queued.remove(token)
        return ended

    def drain(self) -> None:
        self.drained = True


class World:
    def __init__(self) -> None:
        self.inner, self.now_s = InstantCopies(), 100.0
        self.paced = PacedCopies(self.inner, 1e9, lambda: self.now_s)

    def submit(self, token: int, size_bytes: int) -> None:
        half = size_bytes // 2
        self.paced.submit(token, [Copy(0, 0, half), Copy(0, 0, size_bytes - half)])
        self.inner.done.append((token, None))

    def tokens_at(self, now_s: float) -> list[int]:
        self.now_s = now_s
        return [token for token, _ in self.paced.reap()]


def test_copies_share_the_line():
    world = World()
    world.submit(1, 10**9)
    world.submit(2, 5 * 10**8)
    assert world.tokens_at(100.999) == []
    assert world.paced.copying
    assert world.tokens_at(101.001) == [1]
    assert world.tokens_at(101.499) == []
    assert world.tokens_at(101.501) == [2]
    assert not world.paced.copying


def test_an_idle_line_saves_nothing_up():
    world = World()
    world.submit(1, 10**9)
    assert world.tokens_at(110) == [1]
    world.submit(2, 10**9)
    assert world.tokens_at(110.9) == []
    assert world.tokens_at(111.1) == [2]


def test_never_before_the_copy_is_done():
    world = World()
    world.paced.submit(1, [Copy(0, 0, 1000)])
    assert world.tokens_at(200) == []
    assert world.paced.copying
    error = GpuError("lost", "none")
    world.inner.done.append((1, error))
    assert world.paced.reap() == [(1, error)]


def test_what_is_refused_takes_no_time():
    world = World()
    try:
        world.paced.submit(-1, [Copy(0, 0, 10**9)])
    except GpuError:
        world.submit(2, 10**9)
    assert world.tokens_at(101.001) == [2]


def test_drain_waits_for_the_copies_alone():
    world = World()
    world.submit(1, 10**12)
    world.paced.drain()
    assert world.inner.drained
