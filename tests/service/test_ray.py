"""A Ray cluster of a head and three nodes on loopback: a killed worker, a lost node, a batch that hangs."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.runs import Heard, wait_for
from peerlane.service.dispatch.by_ray import RayDispatcher
from service.test_dispatch import judged, plan_of, stand_in


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Lost nodes are noticed after three seconds."""
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_health_check_period_ms", "1000"),
        ("RAY_health_check_failure_threshold", "3"),
        ("RAY_health_check_initial_delay_ms", "1000"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ):
        monkeypatch.setenv(name, value)
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        made.nodes_of_test = [made.add_node(resources={"peerlane_node": 1}, **small) for _ in range(3)]
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of ray
def test_a_cluster_that_loses_things_gives_all_results(cluster: Any, tmp_path: Path) -> None:
    sources = ["# kills", "# hangs", *["# sleeps 0.3"] * 8, *["# wrong"] * 2, "# sleeps 1.5", "# sleeps 1.5"]
    plan, marks = plan_of(sources, tmp_path / "out", timeout=4.0), tmp_path / "marks"
    settings = stand_in(marks, plan, batch=1, grace_s=8.0)
    heard = Heard()

    def lose_a_node() -> None:
        wait_for(lambda: sum(judged(marks).values()) >= 3, 60, "work on the nodes")
        cluster.remove_node(cluster.nodes_of_test[0], allow_graceful=False)

    thread = threading.Thread(target=lose_a_node)
    thread.start()
    results = RayDispatcher(cluster.address, settings).run(plan, heard)
    thread.join(30)
    assert [item.correct for item in results] == ["# wrong" not in source for source in sources], heard.notes
    told = " ".join(heard.notes)
    assert (marks / "killed").exists() and (marks / "hung").exists() and "c0 is tried again" in told and "c1 is tried again" in told
    before, begin = judged(marks), time.monotonic()
    assert [item.candidate.name for item in RayDispatcher(cluster.address, settings).run(plan, heard)] == [
        f"c{n}" for n in range(len(sources))
    ]
    assert judged(marks) == before and time.monotonic() - begin < 5
