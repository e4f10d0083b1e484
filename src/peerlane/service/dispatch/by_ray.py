"""A farm on Ray: every node with the resource ``peerlane_node`` does one batch at a time. The extra ``ray``."""

import importlib.util
import os
import time
from collections.abc import Iterable
from typing import Any

from peerlane.errors import MissingDependency, UsageError
from peerlane.evaluate.evaluator import Progress
from peerlane.evaluate.plan import EvaluationPlan
from peerlane.results.result import Result
from peerlane.service.dispatch.farm import Farm, FarmSettings
from peerlane.service.dispatch.launch import BatchTask, CheckTask, run_batch, run_check

RESOURCE = "peerlane_node"
INSTALL = "pip install 'peerlane[ray]'"


class RayDispatcher:
    """An existing cluster: the one at ``address``, else that of RAY_ADDRESS or of this machine."""

    def __init__(self, address: str | None = None, settings: FarmSettings | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(f"--on ray needs the package ray, which is not installed: {INSTALL}")
        self._address, self._settings = address, settings

    def world_sizes(self) -> tuple[int, ...]:
        raise UsageError("--on ray: expected --world-size, for this machine cannot tell how many GPUs the nodes have")

    def run(self, plan: EvaluationPlan, progress: Progress) -> list[Result]:
        cluster = RayCluster(self._address or "auto")
        try:
            return Farm(cluster, plan, progress, self._settings).run()
        finally:
            cluster.close()


class RayCluster:
    """See :class:`.Cluster`. Ray's workers never touch CUDA: they start a process for each batch, and end after it."""

    def __init__(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._affinity = ray, NodeAffinitySchedulingStrategy
        self._mine = not ray.is_initialized()
        try:
            if self._mine:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except ConnectionError as error:
            raise UsageError(f"--on ray: no cluster at {address}: {error}; start one with `ray start --head`") from None
        # max_calls: a new worker for every batch. max_retries: what failed is tried again by the farm, on a node that it chooses.
        task = ray.remote(num_cpus=0, resources={RESOURCE: 1}, max_calls=1, max_retries=0)
        self._judge, self._check = task(run_batch), task(run_check)

    def close(self) -> None:
        """Leaves the cluster."""
        if self._mine:
            self._ray.shutdown()

    def nodes(self) -> set[str]:
        return {item["NodeID"] for item in self._ray.nodes() if item["Alive"] and item["Resources"].get(RESOURCE, 0) >= 1}

    def judge(self, node: str, task: BatchTask) -> object:
        return self._on(self._judge, node).remote(task)

    def check(self, node: str, task: CheckTask) -> object:
        return self._on(self._check, node).remote(task)

    def _on(self, task: Any, node: str) -> Any:
        return task.options(scheduling_strategy=self._affinity(node, soft=False))

    def finished(self, handles: Iterable[object], seconds: float) -> list[tuple[object, Any, str | None]]:
        waiting = list(handles)
        if not waiting:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=seconds)
        return [(handle, *self._outcome(handle)) for handle in ready]

    def _outcome(self, handle: object) -> tuple[Any, str | None]:
        try:
            return self._ray.get(handle), None
        except self._ray.exceptions.RayTaskError as error:
            return None, str(error.cause)
        except self._ray.exceptions.RayError as error:  # the worker died, the node was lost, or it was cancelled
            return None, type(error).__name__

    def cancel(self, handle: object) -> None:
        self._ray.cancel(handle, force=True)
