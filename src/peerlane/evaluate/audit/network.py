"""Bytes that ranks of different nodes send each other, read from the counters that the kernel keeps for every TCP connection.

In a virtual cluster NCCL, gloo and whatever else a candidate uses send what they send between nodes through sockets. The counters see all
of it: data, and what the library adds. They miss connections that are closed within a call.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
from collections.abc import Sequence

from peerlane.cluster import Cluster
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.results.result import NetworkBytes

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


def bytes_between(
    cluster: Cluster, before: Sequence[Sequence[wire.Connection]], after: Sequence[Sequence[wire.Connection]]
) -> list[tuple[int, int]]:
    """Returns by rank the bytes that it sent to ranks of other nodes and received from them, from all ranks' connections at two times."""
    owner = {connection.local: rank for rank, connections in enumerate(after) for connection in connections}
    egress, ingress = [0] * cluster.world_size, [0] * cluster.world_size
    for rank, connections in enumerate(after):
        known = {(item.local, item.peer): item.received for item in before[rank]}
        for item in connections:
            peer = owner.get(item.peer)
            if peer is not None and cluster.spans_nodes(rank, peer):
                received = max(0, item.received - known.get((item.local, item.peer), 0))
                ingress[rank] += received
                egress[peer] += received
    return list(zip(egress, ingress, strict=True))


def count_network_bytes(runner: CaseRunner, cluster: Cluster) -> NetworkBytes:
    """Makes one call of the candidate on new contents; returns the bytes that it sent between nodes, beside those that it had to.

    Raises Rejected if its outputs are wrong. The case is open.
    """
    runner.refresh_inputs(1)
    before = [answer.connections for answer in runner.candidate.list_connections()]
    runner.check("audit", runner.session.deadlines.first_call, [0])
    after = [answer.connections for answer in runner.candidate.list_connections()]
    counted = bytes_between(cluster, before, after)
    costs = [runner.problem.cost(runner.case, rank) for rank in range(cluster.world_size)]
    return NetworkBytes(
        egress=max(egress for egress, _ in counted),
        ingress=max(ingress for _, ingress in counted),
        least_egress=max(cost.network_egress_bytes for cost in costs),
        least_ingress=max(cost.network_ingress_bytes for cost in costs),
    )
