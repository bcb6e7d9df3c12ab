"""The rendezvous: the store through which the ranks of a job find each other, and who may use it.

Without a secret, any process that reaches the port of the store can take the place of a rank. What
it sends is never executed: messages between ranks are tensors and JSON (runtime/agreement.py).
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from runtime.errors import UserError
from runtime.rank_env import SECRET

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.1


class SignedStore(dist.Store):
    """A store whose values carry an HMAC of key and value, made with a secret. A process without
    the secret can still read values, delete them and count: it can stop a job, but not join it.

    Torch keeps only the C++ half of such a store: whoever makes one has to hold it.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        super().__init__()
        self._store, self._secret = store, secret
        self._clones: list[SignedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        value = value.encode() if isinstance(value, str) else value
        self._store.set(key, self._sign(key, value) + value)

    def get(self, key: str) -> bytes:
        """Wait for a value with a valid signature.

        Raises:
            UserError: there is only another one within the timeout of the store.
        """
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while time.monotonic() < deadline:
            content = self._store.get(key)
            value = content[hashlib.sha256().digest_size :]
            if hmac.compare_digest(content, self._sign(key, value) + value):
                return value
            time.sleep(POLL_SECONDS)  # the rank may overwrite it with its own
        raise UserError(
            f"a process that does not belong to this job has written {key} at the rendezvous, "
            f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}: start again"
        )

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or self._store.timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def clone(self) -> "SignedStore":
        """Another connection to the same store, for threads of NCCL."""
        self._clones.append(SignedStore(self._store.clone(), self._secret))
        return self._clones[-1]

    def _sign(self, key: str, value: bytes) -> bytes:
        message = len(key).to_bytes(8, "big") + key.encode() + value
        return hmac.digest(self._secret, message, "sha256")


def open_store(timeout_seconds: float) -> dist.Store:
    """The store of this job: served by rank 0, or by torchrun's agent, at MASTER_ADDR and
    MASTER_PORT. Takes the job's secret out of the environment, which subprocesses inherit.

    A job on one machine uses the loopback interface alone, also for gloo's connections.

    Raises:
        UserError: MASTER_ADDR or MASTER_PORT is not set, or rank 0 cannot listen there.
    """
    rank, world_size, neighbours = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    secret = os.environ.pop(SECRET, None)
    is_one_machine = world_size == neighbours
    if is_one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size == 1:
        return dist.HashStore()  # in this process
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise UserError(
            "MASTER_ADDR and MASTER_PORT are not set, or the port is not a number: launchers set "
            "them; otherwise give all ranks the address of rank 0's host and one free port there"
        ) from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        listener = None
    else:
        address = LOOPBACK if is_one_machine or address == "localhost" else address
        listener = _listen(address, port) if rank == 0 else None
    if address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(
        address,
        port,
        is_master=listener is not None,
        wait_for_workers=False,  # gloo and NCCL wait for all ranks
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener and listener.detach(),
    )
    return store if secret is None else SignedStore(store, secret.encode())


def _listen(address: str, port: int) -> socket.socket:
    """Listen on `address` if it is one of this machine, otherwise on all: a name may resolve to
    another address on each host, and an address may belong to a gateway.

    Raises:
        UserError: the port cannot be used.
    """
    places = [("::", socket.AF_INET6), ("0.0.0.0", socket.AF_INET)]
    with suppress(ValueError):
        version = ipaddress.ip_address(address).version
        places.insert(0, (address, socket.AF_INET6 if version == 6 else socket.AF_INET))
    for place, family in places:
        try:
            return socket.create_server(
                (place, port), family=family, backlog=2048, dualstack_ipv6=place == "::"
            )
        except OSError as error:
            why = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    raise UserError(
        f"MASTER_PORT {port}: rank 0 cannot listen on it ({why.strerror}); if another run uses it, "
        "choose another one, with the launcher's --master_port"
    )
