"""Ports of this host."""

import errno
import random
import socket


def free_port() -> int:
    """A free port for a rank that listens on it seconds later. It is below 32,768, from where on
    Linux gives ports to connections, so that none gets it until then.

    Raises:
        OSError: no socket can be opened here.
    """
    while True:
        port = random.SystemRandom().randrange(21_000, 29_000)  # runs seed `random`
        try:
            with socket.create_server(("", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
