"""Ports of this host."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that is free, for a rank that listens on it seconds later. It is below those that
    Linux assigns itself, from 32,768 on, which others may be given until then.
    """
    while True:
        port = random.SystemRandom().randrange(21_000, 29_000)  # runs seed `random`
        with suppress(OSError), socket.create_server(("", port)):
            return port
