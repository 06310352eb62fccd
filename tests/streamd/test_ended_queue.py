"""What threads have done with, and the bell that tells of it."""

import os
import select
import threading

import pytest

from streamd.ended_queue import EndedQueue


@pytest.fixture
def ended():
    queue = EndedQueue()
    yield queue
    queue.close()


def rings(queue):
    return bool(select.select([queue.fileno()], [], [], 0)[0])


def test_what_is_put_rings_and_is_taken_in_order(ended):
    for item in range(3):
        ended.put(item)
    assert rings(ended)
    assert ended.take() == [0, 1, 2]
    assert not rings(ended)
    assert ended.take() == []


def test_a_look_in_vain_costs_no_system_call(ended, monkeypatch):
    ended.put(1)
    ended.take()
    monkeypatch.setattr(os, "eventfd_read", lambda fd: pytest.fail("the bell is silent"))
    assert ended.take() == []


def test_a_ring_that_comes_after_its_item_was_taken_is_silenced(ended, monkeypatch):
    """The one who puts may be stopped between the two; the loop must not spin for ever after."""
    write = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda fd, count: None)
    ended.put(1)
    monkeypatch.undo()
    assert ended.take() == [1]
    write(ended.fileno(), 1)
    assert rings(ended)
    assert ended.take() == []
    assert not rings(ended)


def test_nothing_is_lost_between_threads(ended):
    count, got = 2000, []
    thread = threading.Thread(target=lambda: [ended.put(item) for item in range(count)])
    thread.start()
    while len(got) < count:
        assert select.select([ended.fileno()], [], [], 10)[0], "an item without a ring"
        got += ended.take()
    thread.join()
    assert got == list(range(count))
    ended.take()
    assert not rings(ended)
