"""Sockets between the processes of a run: bytes go from rank to rank outside of torch's memory.

Every pair of ranks has one connection. A thread per peer reads it and puts each message where it is waited
for, so that sending never waits for the receiver's own turn: two ranks may send to each other at once. A
message has a key; both sides make the same keys, by counting what they exchange.

What arrives is in numpy's memory, and no thread ever holds a tensor: torch's profiler sees none of it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_HEADER = struct.Struct("!IQ")
"""Bytes of the key, bytes of the message."""
_GREETING = struct.Struct("!I32s")
"""Who connects, and the word that only the processes of this run know."""
_POLL_SECONDS = 5.0
"""How often somebody who waits looks whether the time is up."""


class RankGone(RuntimeError):
    """Another process of the run has ended, or did not send in time what this one waits for."""


class RankLinks:
    """The connections of one process to all others."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        """Connect all ranks; `store` is shared by them, and `seconds` is how long to wait for another one."""
        self.rank, self.size, self._seconds = rank, size, seconds
        self._arrived: dict[tuple[int, str], Bytes] = {}
        self._gone: set[int] = set()
        self._news = threading.Condition()
        self._sockets: dict[int, socket.socket] = {}
        self._turns = {peer: threading.Lock() for peer in range(size)}
        if size > 1:
            self._connect(store)

    def _connect(self, store: Any) -> None:
        """Let lower ranks accept, higher ones call; a word in the store keeps strangers out."""
        secret = secrets.token_bytes(16).hex().encode()
        address = _own_address()
        with socket.create_server((address, 0), backlog=self.size) as server:
            server.settimeout(self._seconds)
            port = server.getsockname()[1]
            store.set(f"links/{self.rank}", f"{address} {port} {secret.decode()}")
            for peer in range(self.rank):
                host, place, word = store.get(f"links/{peer}").decode().split()
                link = socket.create_connection((host, int(place)), timeout=self._seconds)
                link.sendall(_GREETING.pack(self.rank, word.encode()))
                self._sockets[peer] = link
            while len(self._sockets) < self.size - 1:
                link, _ = server.accept()
                link.settimeout(self._seconds)
                peer, word = _GREETING.unpack(bytes(_read(link, _GREETING.size)))
                if not hmac.compare_digest(word, secret) or peer in self._sockets:
                    link.close()
                    continue
                self._sockets[peer] = link
        for peer, link in self._sockets.items():
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._read_all, args=(peer, link), daemon=True).start()

    def _read_all(self, peer: int, link: socket.socket) -> None:
        try:
            while True:
                key_size, size = _HEADER.unpack(bytes(_read(link, _HEADER.size)))
                key = bytes(_read(link, key_size)).decode()
                message = _read(link, size)
                with self._news:
                    self._arrived[peer, key] = message
                    self._news.notify_all()
        except OSError:
            with self._news:
                self._gone.add(peer)
                self._news.notify_all()

    def send(self, peer: int, key: str, message: Bytes) -> None:
        """Send bytes to a rank, to oneself too; when this returns, their memory may be used again."""
        if peer == self.rank:
            with self._news:
                self._arrived[peer, key] = message.copy()
                self._news.notify_all()
            return
        name = key.encode()
        try:
            with self._turns[peer]:
                self._sockets[peer].sendall(_HEADER.pack(len(name), message.nbytes) + name)
                self._sockets[peer].sendall(message.data)
        except OSError as error:
            raise RankGone(f"rank {peer} has ended while rank {self.rank} was sending to it.") from error

    def has(self, peer: int, key: str) -> bool:
        """Return whether a message has arrived."""
        with self._news:
            return (peer, key) in self._arrived

    def receive(self, peer: int, key: str) -> Bytes:
        """Wait for a message and take it."""
        return self.receive_any({peer: key})[1]

    def receive_any(self, keys: dict[int, str]) -> tuple[int, Bytes]:
        """Wait for one of several messages, by the rank that sends it; take the first that is there."""
        with self._news:
            found: list[int] = []

            def one_is_there() -> bool:
                found[:] = [peer for peer, key in keys.items() if (peer, key) in self._arrived]
                return bool(found) or self._gone.issuperset(keys)

            self._wait(one_is_there, keys)
            if not found:
                gone = " and ".join(map(str, keys))
                raise RankGone(f"rank {gone} has ended while rank {self.rank} was waiting for it.")
            return found[0], self._arrived.pop((found[0], keys[found[0]]))

    def _wait(self, done: Callable[[], bool], peers: dict[int, str]) -> None:
        end = time.monotonic() + self._seconds
        while not self._news.wait_for(done, _POLL_SECONDS):
            if time.monotonic() > end:
                raise RankGone(
                    f"rank {self.rank} has waited {self._seconds:.0f} seconds for rank "
                    f"{' or '.join(map(str, peers))}: do all ranks make the same exchanges in the same order?"
                )

    def close(self) -> None:
        """End the connections, and with them their threads."""
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # the other side was first
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def _read(link: socket.socket, size: int) -> Bytes:
    """Read exactly so many bytes; raises OSError when the connection ends before."""
    message = np.empty(size, dtype=np.uint8)
    view, place = message.data, 0
    while place < size:
        count = link.recv_into(view[place:])
        if count == 0:
            raise ConnectionError("the connection has ended")
        place += count
    return message


def _own_address() -> str:
    """Return the address by which the first rank is reached from here: others reach this process there."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))  # nothing is sent: it only chooses the interface
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
