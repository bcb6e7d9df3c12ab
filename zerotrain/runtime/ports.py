"""Choose a port of this host."""

import errno
import random
import socket


def free_port() -> int:
    """Return a free port for a rank that listens on it seconds later. It is below 32,768, so Linux
    hands it to no outgoing connection meanwhile.

    Raises:
        OSError: no socket can be opened here.
    """
    while True:
        # SystemRandom, because runs seed `random`, and two runs must not choose alike
        port = random.SystemRandom().randrange(21_000, 29_000)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
