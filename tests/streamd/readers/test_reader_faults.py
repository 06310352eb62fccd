"""A disk that fails, falls short, dawdles or loses its file: every slab still ends exactly once."""

import errno
import os
import shutil
import time

import pytest

from shared.errors import ModelChanged, ReadFailed
from streamd.readers.direct import open_file
from streamd.readers.pieces import TRIES_MAX

PIECE = 64 << 10


@pytest.mark.parametrize("cut", [0, 100, 512, 4096, 5000, PIECE - 1])
def test_short_reads_are_continued_aligned(bench, file, content, cut):
    with bench(file, faults={0: cut, 3: cut, 6: cut}) as b:
        slab = b.slab("slab", (777, 7 * PIECE))
        assert b.read(slab)["slab"].error is None
        b.check(slab, content)
        assert b.engine.fault_count >= 2  # the 6th may be a rest shorter than the cut
        assert b.reader.stats().retries == b.engine.fault_count
        align = b.reader.align_bytes
        for read in b.engine.seen:
            assert [number % align for number in read] == [0, 0, 0]


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.EINTR])
def test_what_is_no_error_is_tried_again(bench, file, content, fault):
    with bench(file, faults={0: -fault, 1: -fault, 5: -fault}) as b:
        slab = b.slab("slab", (0, 4 * PIECE))
        assert b.read(slab)["slab"].error is None
        b.check(slab, content)
        assert b.reader.stats().retries == 3


@pytest.mark.parametrize(("result", "word"), [(-errno.EAGAIN, "unavailable"), (0, "short reads")])
def test_what_never_gets_on_fails_after_a_while(bench, file, result, word):
    with bench(file, faults=dict.fromkeys(range(1000), result)) as b:
        error = b.read(b.slab("slab", (4096, 100)))["slab"].error
        assert isinstance(error, ReadFailed)
        assert word in error.message
        assert len(b.engine.seen) == TRIES_MAX


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENODATA, errno.ESTALE, errno.EINVAL])
def test_an_error_names_file_and_place_and_hurts_no_other_slab(bench, file, content, fault):
    with bench(file, faults={1: -fault}) as b:
        slabs = [b.slab(key, (key * 8192 + 5, 5000)) for key in range(6)]
        done = b.read(*slabs)
        error = done.pop(1).error
        assert isinstance(error, ReadFailed)
        for word in (str(file.path), "byte 8192", os.strerror(fault), str(fault)):
            assert word in error.message
        for key, completion in done.items():
            assert completion.error is None
            b.check(slabs[key], content)
        assert b.reader.stats().failed_slabs == 1


def test_a_failed_slab_completes_only_after_its_last_piece_has_landed(bench, file):
    with bench(file, faults={0: -errno.EIO}, held={2}) as b:
        b.reader.submit(b.slab("slab", (0, 8 * PIECE)))
        deadline_s = time.monotonic() + 10
        while b.reader.stats().in_flight_reads > 1:
            assert time.monotonic() < deadline_s
            assert b.poll(1.0) == []
        assert b.poll(0.02) == []
        b.engine.release()
        assert b.finish(1)["slab"].error is not None
        assert len(b.engine.seen) == b.depth, "the rest is not read in vain"


def test_a_file_that_shrank_is_named(engine_name, bench, file, tmp_path):
    path = tmp_path / "shrinking.gguf"
    shutil.copy(file.path, path)
    shrinking = open_file(path)
    try:
        with bench(shrinking) as b:
            os.truncate(path, 3 * PIECE + 100)
            kept = b.slab("kept", (0, PIECE))
            cut = b.slab("cut", (3 * PIECE - 50, 1000))
            gone = b.slab("gone", (5 * PIECE, 1000))
            done = b.read(kept, cut, gone)
    finally:
        shrinking.close()
    for key in ("kept", "cut", "gone"):  # a changed file gives nothing any more, old or new
        error = done[key].error
        assert isinstance(error, ModelChanged)
        assert str(path) in error.message
        assert str(shrinking.size_bytes) in error.message
        assert error.remedy


def test_what_was_read_before_a_rewrite_was_seen_is_not_delivered(
    engine_name, bench, file, tmp_path
):
    path = tmp_path / "rewritten.gguf"
    shutil.copy(file.path, path)
    rewritten = open_file(path)
    try:
        with bench(rewritten, held=[0]) as b:
            b.reader.submit(b.slab("torn", (0, PIECE)))
            with path.open("r+b") as other:
                other.write(b"new bytes")
            b.engine.release()
            error = b.finish(1)["torn"].error
    finally:
        rewritten.close()
    assert isinstance(error, ModelChanged)
    assert "reload" in error.remedy


def test_cancel_forgets_what_was_not_begun(bench, file, content):
    with bench(file, held=range(4)) as b:
        first = b.slab("first", (0, b.depth * PIECE))
        third = b.slab("third", (99, 999))
        b.reader.submit(first)
        b.reader.submit(b.slab("second", (0, 3 * PIECE)))
        b.reader.submit(third)
        assert b.reader.cancel("second") is True
        assert b.reader.cancel("first") is False  # all of it is in flight already
        b.engine.release()
        done = b.finish(2)
        assert [done[key].error for key in ("first", "third")] == [None, None]
        b.check(first, content)
        b.check(third, content)


def test_cancel_of_half_a_slab_completes_it_with_an_error(bench, file):
    with bench(file, held=range(4)) as b:
        b.reader.submit(b.slab("slab", (0, 8 * PIECE)))
        assert b.reader.cancel("slab") is False
        assert b.reader.stats().waiting_reads == 0
        assert b.poll(0.02) == []
        b.engine.release()
        error = b.finish(1)["slab"].error
        assert isinstance(error, ReadFailed)
        assert "cancelled" in error.message
        assert len(b.engine.seen) == b.depth


def test_close_lets_what_is_in_flight_land(bench, file, content):
    with bench(file) as b:
        slab = b.slab("slab", (0, 8 * PIECE))
        b.reader.submit(slab)
        assert b.reader.close() is True
        assert len(b.engine.seen) == b.depth, "what only waited is dropped"
        landed = b.depth * PIECE
        assert slab.extents[0].target[:landed] == content[:landed]


def test_close_does_not_wait_for_ever(bench, file):
    with bench(file, held={0}) as b:
        b.reader.submit(b.slab("slab", (0, 100)))
        begun_s = time.monotonic()
        assert b.reader.close(patience_s=0.1) is False
        assert time.monotonic() - begun_s < 2.0
