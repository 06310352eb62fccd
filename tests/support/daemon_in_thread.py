"""A daemon in a thread of this process."""

import threading
from contextlib import contextmanager

from shared.wire import Stop
from streamd.ask import ask


@contextmanager
def running_in_thread(daemon, name):
    """`daemon`, entered here, until the block ends."""
    with daemon:
        thread = threading.Thread(target=daemon.run)
        thread.start()
        try:
            yield daemon
        finally:
            ask(name, Stop())
            thread.join()
