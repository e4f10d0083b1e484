"""The TCP connections of a rank, with the counters that the kernel keeps for each."""

import os
import resource
import socket
import stat
import struct

from peerlane.evaluate import wire

# Bound before any candidate code is loaded.
_fstat, _is_socket, _Socket, _duplicate = os.fstat, stat.S_ISSOCK, socket.socket, os.dup
_TCP_INFO_BYTES = 144
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received of struct tcp_info, linux/tcp.h: 8 bytes, 24 words, then the third long word
_MOST_DESCRIPTORS = 8192


def tcp_connections() -> list[wire.Connection]:
    """Returns this process's TCP connections, each with the bytes that it has received. Reads nothing under /proc: ranks may not."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    for descriptor in range(min(limit, _MOST_DESCRIPTORS) if limit > 0 else _MOST_DESCRIPTORS):
        try:
            if not _is_socket(_fstat(descriptor).st_mode):
                continue
            with _Socket(fileno=_duplicate(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                local, peer = _name(connection.getsockname()), _name(connection.getpeername())
                (received,) = _RECEIVED.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES))
        except (OSError, struct.error):  # closed, listening, or another kernel's
            continue
        found.append(wire.Connection(local, peer, received))
    return found


def _name(address: tuple[object, ...]) -> str:
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"
