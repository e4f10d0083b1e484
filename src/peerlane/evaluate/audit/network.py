"""Bytes that ranks of different nodes send each other, from the counters of their TCP connections.

In a virtual cluster NCCL, gloo and whatever else a candidate uses send what they send between nodes through sockets. The counters see all
of it: data, and what the library adds. They miss connections that are closed within a call.
"""

from collections.abc import Sequence

from peerlane.common.cluster import Cluster
from peerlane.evaluate import wire
from peerlane.evaluate.correctness.case_runner import CaseRunner
from peerlane.results.result import NetworkBytes


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
    before = runner.candidate.list_connections()
    runner.check("audit", runner.session.deadlines.first_call, [0])
    after = runner.candidate.list_connections()
    counted = bytes_between(cluster, before, after)
    costs = [runner.problem.cost(runner.case, rank) for rank in range(cluster.world_size)]
    return NetworkBytes(
        egress=max(egress for egress, _ in counted),
        ingress=max(ingress for _, ingress in counted),
        least_egress=max(cost.network_egress_bytes for cost in costs),
        least_ingress=max(cost.network_ingress_bytes for cost in costs),
    )
