"""Bytes between nodes, from the kernel's counters of connections."""

import socket

import pytest

from peerlane.common.cluster import Cluster
from peerlane.evaluate.audit.network import bytes_between
from peerlane.evaluate.ranks.connections import tcp_connections
from peerlane.evaluate.wire import Connection
from peerlane.results.result import NetworkBytes

Ends = list[list[Connection]]


def connections(*received: tuple[int, int, int]) -> Ends:
    """Connections of four ranks: (receiver, sender, bytes that the receiver has got)."""
    found: Ends = [[] for _ in range(4)]
    for one, other, size in received:
        found[one].append(Connection(f"lo:{one}{other}", f"lo:{other}{one}", size))
    return found


def test_bytes_of_other_nodes_are_counted_at_both_ends() -> None:
    before = connections((0, 2, 100), (2, 0, 50), (0, 1, 7), (1, 0, 7))
    after = connections((0, 2, 160), (2, 0, 50), (0, 1, 900), (1, 0, 800), (3, 0, 5), (0, 3, 0))
    assert bytes_between(Cluster(2, 4), before, after) == [(5, 60), (0, 0), (60, 0), (0, 5)]


def test_a_peer_that_is_no_rank_does_not_count() -> None:
    before: Ends = [[] for _ in range(4)]
    after = [[Connection("lo:1", "lo:99", 1000)], *before[1:]]
    assert bytes_between(Cluster(2, 4), before, after) == [(0, 0)] * 4


def test_the_kernel_counts_what_a_connection_received() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            name = "{}:{}".format(*receiver.getsockname()), "{}:{}".format(*receiver.getpeername())
            sender.sendall(bytes(1234))
            assert len(receiver.recv(1234, socket.MSG_WAITALL)) == 1234
            found = {(item.local, item.peer): item.received for item in tcp_connections()}
            assert found[name] == 1234 and found[name[::-1]] == 0
            sender.sendall(b"x")
            assert receiver.recv(1) == b"x", "the connection goes on"


@pytest.mark.parametrize(
    ("counted", "least", "over"), [((100, 110), (100.0, 100.0), 1.1), ((0, 300), (0.0, 100.0), 3.0), ((5, 5), (0.0, 0.0), None)]
)
def test_the_ratio_is_that_of_the_worse_direction(counted: tuple[int, int], least: tuple[float, float], over: float | None) -> None:
    found = NetworkBytes(egress=counted[0], ingress=counted[1], least_egress=least[0], least_ingress=least[1])
    assert found.over_least == (over if over is None else pytest.approx(over))
    assert not found.is_below_bound(typical=False)


def test_bytes_that_went_another_way_are_missed() -> None:
    found = NetworkBytes(egress=100, ingress=60, least_egress=100.0, least_ingress=100.0)
    assert found.is_below_bound(typical=False) and not found.is_below_bound(typical=True)
    assert NetworkBytes(egress=0, ingress=0, least_egress=100.0, least_ingress=0.0).is_below_bound(typical=True)
