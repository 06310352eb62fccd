"""One question to a running daemon, and its answer."""

import time
from typing import Any

import zmq

from shared.errors import DaemonLost
from shared.runtime_dir import DaemonRecord, Endpoints, running_daemons
from shared.wire import Message, Refused, Stats, StatsRequest, decode, encode

ANSWER_DEADLINE_MS = 5000
EXIT_DEADLINE_S = 10.0
POLL_PAUSE_S = 0.02
# How often somebody who waits for an answer looks whether the daemon still lives.
LIFE_PAUSE_S = 0.25


def ask(name: str, question: Message, deadline_ms: int = ANSWER_DEADLINE_MS) -> Message:
    """The daemon's answer; raises its refusal, or DaemonLost when it has ended or is too late."""
    deadline_s = time.monotonic() + deadline_ms / 1000
    while not Endpoints.find(name).zmq_path.exists():
        # It has its name before it has its sockets: it loads the model in between.
        check_alive(name)
        if time.monotonic() > deadline_s:
            raise DaemonLost(
                f"the daemon {name!r} is still loading its model", "try again in a moment"
            )
        time.sleep(POLL_PAUSE_S)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(Endpoints.find(name).zmq_url)
        socket.send(encode(question))
        deadline_s = time.monotonic() + deadline_ms / 1000
        while not socket.poll(min(deadline_ms, round(1000 * LIFE_PAUSE_S))):
            check_alive(name)
            if time.monotonic() > deadline_s:
                raise DaemonLost(
                    f"the daemon {name!r} has not answered for {deadline_ms / 1000:g} s",
                    "see its log; kill it if it hangs",
                )
        answer = decode(socket.recv())
    if isinstance(answer, Refused):
        raise answer.error()
    return answer


def check_alive(name: str) -> None:
    """DaemonLost unless a daemon of that name runs."""
    if all(record.name != name for record in running_daemons()):
        raise DaemonLost(f"the daemon {name!r} has ended", "see its log if nobody stopped it")


def ask_stats(
    name: str, watching: bool = False, deadline_ms: int = ANSWER_DEADLINE_MS
) -> dict[str, Any]:
    """What the daemon tells about itself: see streamd.monitoring.stats."""
    answer = ask(name, StatsRequest(watching), deadline_ms)
    assert isinstance(answer, Stats)
    return answer.values


def wait_until_gone(record: DaemonRecord) -> None:
    """Until the daemon has let go of its name; DaemonLost when it does not."""
    deadline_s = time.monotonic() + EXIT_DEADLINE_S
    while record in running_daemons():
        if time.monotonic() > deadline_s:
            raise DaemonLost(
                f"the daemon {record.name!r} (pid {record.pid}) is still running",
                f"see its log; kill {record.pid} if it hangs",
            )
        time.sleep(POLL_PAUSE_S)
