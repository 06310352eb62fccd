"""Requests over ZeroMQ: each is bounded and answered, and nothing ends the daemon."""

import os
import random
import resource
import select
import time

import msgpack
import pytest
import zmq
from control_bench import PATIENCE_MS, TICKET, a_message

from shared.errors import RequestError
from shared.wire import Attach, Fetch, Hint, Refused, Stats, StatsRequest, Stop, decode, encode
from streamd.control import SELECTABLE_COUNT

POLL_MS = 10  # where the last requests may have been taken already


@pytest.fixture
def dealer(control, endpoints):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoints.zmq_url)
        yield dealer


def ask(control, dealer, *frames):
    dealer.send_multipart(frames)
    control.poll(PATIENCE_MS)
    assert dealer.poll(PATIENCE_MS)
    return decode(dealer.recv())


def test_a_question_is_answered(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({"hits": 3})
    assert ask(control, dealer, encode(StatsRequest())) == Stats({"hits": 3})


def test_a_refusal_is_an_answer(control, daemon, dealer):
    daemon.answers[Stop] = RequestError("not now", "ask later")
    assert ask(control, dealer, encode(Stop())) == Refused("request", "not now", "ask later")


@pytest.mark.parametrize(
    "message", [a_message(Attach, pid=1), Fetch(TICKET, 1, 2, [3]), Hint(TICKET, 1, 2, [3], 1)]
)
def test_what_belongs_to_an_attachment_is_not_taken_from_anybody(control, daemon, dealer, message):
    """ZeroMQ does not say who sends it."""
    answer = ask(control, dealer, encode(message))
    assert answer.code == "protocol"
    assert daemon.heard == []


def test_garbage_is_refused_and_does_no_harm(control, daemon, dealer):
    rng = random.Random(3)
    frames = [b"", b"\xc1", encode(Stop())[:-1], msgpack.packb([99, "Stop", {}])]
    frames += [rng.randbytes(rng.randint(1, 80)) for _ in range(100)]
    for frame in frames:
        answer = ask(control, dealer, frame)
        assert isinstance(answer, Refused)
        assert answer.code == "protocol"
    assert daemon.heard == []


def test_messages_of_more_frames_are_passed_over(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({})
    dealer.send_multipart([b"", encode(StatsRequest())])
    dealer.send_multipart([encode(StatsRequest())] * 3)
    assert ask(control, dealer, encode(StatsRequest())) == Stats({})
    assert len(daemon.heard) == 1


def test_many_requests_at_once_are_all_answered(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({})
    for _ in range(600):
        dealer.send(encode(StatsRequest()))
    answer_count = 0
    while answer_count < 600:
        control.poll(POLL_MS)
        while dealer.poll(0):
            dealer.recv()
            answer_count += 1
    assert len(daemon.heard) == 600


def test_other_descriptors_are_watched(control):
    bell, reactions = os.eventfd(0), []
    control.watch(bell, lambda: reactions.append(os.eventfd_read(bell)))
    os.eventfd_write(bell, 5)
    control.poll(PATIENCE_MS)
    assert reactions == [5]
    control.unwatch(bell)
    os.eventfd_write(bell, 1)
    control.poll(0)
    assert reactions == [5]
    os.close(bell)


def test_a_nap_with_more_descriptors_than_select_knows(control):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= SELECTABLE_COUNT:
        pytest.skip("the limit on descriptors is low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SELECTABLE_COUNT + 1), hard))
    try:
        high = os.dup2(control._descriptors.fileno(), SELECTABLE_COUNT)
        control._descriptors.close()
        control._descriptors = select.epoll.fromfd(high)
        control._poller.register(high, zmq.POLLIN)
        bell, reactions = os.eventfd(0), []
        control.watch(bell, lambda: reactions.append(os.eventfd_read(bell)))
        control.nap(1e-4)
        assert reactions == []
        os.eventfd_write(bell, 5)
        control.nap(1e-4)
        assert reactions == [5]
        control.unwatch(bell)
        os.close(bell)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_nap_ends_when_something_happens(control):
    bell, reactions = os.eventfd(0), []
    control.watch(bell, lambda: reactions.append(os.eventfd_read(bell)))
    control.nap(1e-4)
    assert reactions == []
    os.eventfd_write(bell, 5)
    began_s = time.monotonic()
    control.nap(5.0)
    assert reactions == [5]
    assert time.monotonic() - began_s < 4
    control.unwatch(bell)
    os.eventfd_write(bell, 5)
    control.nap(1e-4)
    assert reactions == [5]


def test_requests_are_answered_between_naps(control, daemon, dealer):
    daemon.answers[StatsRequest] = Stats({})
    dealer.send(encode(StatsRequest()))
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not dealer.poll(0) and time.monotonic() < deadline_s:
        control.nap(1e-3)
    assert decode(dealer.recv(zmq.NOBLOCK)) == Stats({})
