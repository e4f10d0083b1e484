"""Ranks in nodes: who is where, which groups there are, and what cannot be divided so."""

from typing import get_args

import pytest

from peerlane import problems
from peerlane.common.cluster import CLUSTERS, Cluster
from peerlane.common.place import CPU, EMULATED, GPUS, VIRTUAL, Device, NodeKind, Place
from peerlane.errors import UsageError
from peerlane.results.identity import NodeClass


def test_groups_of_nodes_and_rails() -> None:
    cluster = Cluster(2, 8)
    assert cluster.node_groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and cluster.rail_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [(cluster.node_of(rank), cluster.local_rank(rank)) for rank in (0, 3, 4, 7)] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert cluster.spans_nodes(3, 4) and not cluster.spans_nodes(4, 5, 7) and not Cluster(1, 8).spans_nodes(0, 7)
    assert [str(item) for item in CLUSTERS] == ["2x2", "2x4", "2x8", "4x8"]


@pytest.mark.parametrize(("nodes", "world_size"), [(2, 5), (2, 2), (4, 4), (2, 18), (0, 4)])
def test_ranks_that_cannot_be_divided_are_refused(nodes: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=f"{world_size} ranks on {nodes} nodes: expected the same number on every node, 2 to 8"):
        Cluster(nodes, world_size)
    assert not Cluster.fits(nodes, world_size)


def test_one_node_has_any_number_of_ranks() -> None:
    assert Cluster(1, 1).ranks_per_node == 1 and Cluster(1, 3).node_groups == ((0, 1, 2),)


def test_problems_of_one_node_refuse_several() -> None:
    with pytest.raises(UsageError, match="problem 1 does not run on 2 nodes: use --nodes 1"):
        problems.get(1).cases("small", 4, nodes=2)
    assert all(problem.nodes == (1,) for problem in problems.suite())


@pytest.mark.parametrize("place", [CPU, GPUS, VIRTUAL, EMULATED], ids=lambda place: place.kind)
def test_a_virtual_cluster_is_not_timed(place: object) -> None:
    assert place.in_nodes(1) is place  # type: ignore[attr-defined]
    assert place.in_nodes(2).untimed.startswith("virtual cluster") and place.in_nodes(2).groups == 1  # type: ignore[attr-defined]


def test_results_of_clusters_are_a_class_of_their_own() -> None:
    environment = {"gpus": [{"name": "NVIDIA H200"}]}
    for device in ("cpu", "cuda"):
        one = NodeClass.of(environment, device)
        two = NodeClass.of({**environment, "virtual_cluster": {"nodes": 2}}, device)
        assert one != two and two.place.untimed and "virtual cluster of 2 nodes" in str(two) and "cluster" not in str(one)


def test_every_device_and_every_class_of_machine_is_a_place() -> None:
    assert [Place.of(device) for device in get_args(Device)] == [GPUS, CPU, EMULATED]
    assert [Place.of_kind(kind) for kind in get_args(NodeKind)] == [GPUS, VIRTUAL, CPU, EMULATED]
    assert [Place.of(device, shared=True) for device in get_args(Device)] == [VIRTUAL, CPU, EMULATED], "only GPUs are shared"


def test_speed_is_measured_where_there_are_gpus_and_nowhere_else() -> None:
    for place in (CPU, GPUS, VIRTUAL, EMULATED):
        assert bool(place.untimed) == (not place.has_gpus)
        assert place.groups == (2 if place.has_gpus else 1), "a second group is for timing"


@pytest.mark.parametrize(
    ("device", "shared", "place"),
    [
        ("cuda", {}, GPUS),
        ("cuda", {"ranks_per_gpu": 1}, GPUS),
        ("cuda", {"ranks_per_gpu": 2, "sharing": "mps", "baseline": "peerlane"}, VIRTUAL),
        ("cpu", {}, CPU),
        ("emulated", {}, EMULATED),
    ],
)
def test_a_class_of_machine_knows_its_place(device: Device, shared: dict[str, object], place: Place) -> None:
    found = NodeClass.of({"gpus": [{"name": "NVIDIA H200"}], "virtual_node": shared}, device)
    assert found.place is place and found.kind == place.kind
    if not place.has_gpus:
        assert str(found) == place.title
