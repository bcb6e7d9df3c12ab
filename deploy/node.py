"""torchrun on one node of a job, for orchestrators, which act on signals and exit codes:

    python deploy/node.py [torchrun's options] train.py --config ...

torchrun itself kills its ranks 30 s after SIGTERM, does not notice it while it waits for other
nodes, and exits with 1 however its ranks ended. Here SIGTERM and SIGUSR1 go to the ranks, which
save and exit, and the exit code is that of the first rank that failed: 2 a mistake in the input, 75
preempted and saved, 128 + N if signal N ended it.
"""

import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def forward(noticed: socket.socket) -> None:
    """Send each signal to all ranks. If there are none, exit."""
    while True:
        number = noticed.recv(1)[0]
        if number not in STOP_SIGNALS:
            continue
        ranks = psutil.Process().children()
        if not ranks:
            os._exit(128 + number)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)


if __name__ == "__main__":
    # A thread, because the main one runs no Python while it waits at the rendezvous. Python's own
    # handler writes the signal's number to the socket at once.
    noticed, notice = socket.socketpair()
    notice.setblocking(False)
    signal.set_wakeup_fd(notice.fileno())
    for stop in STOP_SIGNALS:
        signal.signal(stop, lambda number, frame: None)
    threading.Thread(target=forward, args=(noticed,), daemon=True).start()
    try:
        main(["--signals_to_handle=SIGINT,SIGHUP,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        sys.exit(code if code >= 0 else 128 - code)
