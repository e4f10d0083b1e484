"""File descriptors from process to process, over Unix sockets whose names and passwords go by the group's exchange.

Names are abstract: no file is made, nothing is left behind, and processes with private folders reach each other. Anybody on the machine can
see an abstract name, so a message counts only with the receiver's password.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from peerlane.errors import DeviceTimeout

PATIENCE_S = 30.0
_TOKEN_BYTES = 16


class Mailbox:
    """A socket at which one descriptor of every other rank arrives."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._socket: socket.socket | None = None

    def open(self, world_size: int) -> str:
        """Lets other ranks send from now on. Returns the password and the name that they need, in hexadecimal digits."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(b"\0peerlane-" + secrets.token_hex(16).encode())
        self._socket.listen(world_size)
        return (self._token + bytes(self._socket.getsockname())).hex()

    def trade(self, addresses: Sequence[str], own: int) -> dict[int, int]:
        """Send the descriptor ``own`` to all other ranks; their descriptors, by rank, which the caller closes. No send waits for anybody.

        Raises OSError, or DeviceTimeout that names the ranks that sent nothing."""
        end = time.monotonic() + PATIENCE_S
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                token, name = bytes.fromhex(address)[:_TOKEN_BYTES], bytes.fromhex(address)[_TOKEN_BYTES:]
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                    peer.settimeout(PATIENCE_S)
                    peer.connect(name)
                    socket.send_fds(peer, [token + struct.pack("<I", self.rank)], [own])
        assert self._socket is not None
        received: dict[int, int] = {}
        wanted = {rank for rank in range(len(addresses)) if rank != self.rank}
        try:
            while wanted - received.keys():
                self._receive(self._socket, end, wanted, received)
        except BaseException:
            for descriptor in received.values():
                os.close(descriptor)
            raise
        return received

    def _receive(self, mailbox: socket.socket, end: float, wanted: set[int], received: dict[int, int]) -> None:
        """Take one message; what is no message of a rank is thrown away."""
        message, descriptors = b"", list[int]()
        try:
            mailbox.settimeout(max(0.001, end - time.monotonic()))
            connection, _ = mailbox.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.settimeout(max(0.001, end - time.monotonic()))
                message, descriptors, _, _ = socket.recv_fds(connection, 256, 1, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError as error:
            missing = sorted(wanted - received.keys())
            raise DeviceTimeout(f"ranks {missing} sent no file descriptor within {PATIENCE_S:g} s") from error
        rank = struct.unpack("<I", message[_TOKEN_BYTES:])[0] if len(message) == _TOKEN_BYTES + 4 else None
        if len(descriptors) == 1 and rank in wanted - received.keys() and secrets.compare_digest(message[:_TOKEN_BYTES], self._token):
            received[rank] = descriptors[0]
            return
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """The name is gone."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
