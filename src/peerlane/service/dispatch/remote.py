"""A plan on a service: many requests at a time, which wait in the service's queue."""

from concurrent.futures import ThreadPoolExecutor, as_completed

from peerlane.common.version import __version__
from peerlane.errors import HarnessError, UsageError
from peerlane.evaluate.evaluator import Progress
from peerlane.evaluate.plan import EvaluationPlan, Job, make_jobs
from peerlane.results.identity import NodeClass
from peerlane.results.result import Result
from peerlane.service.client import Client
from peerlane.service.dispatch.collect import Collector, Conditions

_REQUESTS = 32


class Remote:
    """``peerlane serve`` somewhere, by its URL; the token as :class:`.Client` finds it."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    def world_sizes(self) -> tuple[int, ...]:
        """The number of ranks that the service judges on."""
        return (int(self._client.node()["world_size"]),)

    def run(self, plan: EvaluationPlan, progress: Progress) -> list[Result]:
        jobs = make_jobs(plan, progress.note)
        if any(job.candidate.is_reference for job in jobs):
            raise UsageError("the reference cannot be sent to a service: evaluate it on the node itself")
        with self._client as client:
            node = client.node()
            _require_same(node, plan)
            node_class = NodeClass.model_validate(node["node"])
            progress.note(f"{client.url}: {node['description']}, isolation {node['isolation']}, {node['condition']}")
            conditions = Conditions({node["world_size"]: node_class}, node["isolation"], node["rules_hash"])
            collector = Collector(plan, jobs, conditions, progress)
            faults: list[str] = []
            with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="peerlane-dispatch") as threads:
                asked = {threads.submit(self._judge, job, plan.rerun): job for job in collector.due}
                try:
                    for future in as_completed(asked):
                        try:
                            collector.keep(asked[future], future.result())
                        except HarnessError as error:
                            faults.append(str(error))
                            progress.note(str(error))
                except BaseException:
                    client.stop()
                    threads.shutdown(wait=False, cancel_futures=True)
                    raise
        return collector.results(faults[-1] if faults else "")

    def _judge(self, job: Job, rerun: bool) -> Result:
        return self._client.evaluate(
            job.problem.id,
            candidate=job.candidate,
            presets=(job.preset,),
            modes=job.modes,
            cases=job.cases,
            track=job.track,
            variant=job.variant,
            world_size=job.world_size,
            timeout=job.timeout,
            rerun=rerun,
        )


def _require_same(node: dict[str, object], plan: EvaluationPlan) -> None:
    """Raises UsageError for a plan that the service would not judge as it says."""
    if node["evaluator_version"] != __version__:
        raise UsageError(f"the service runs peerlane {node['evaluator_version']}, this is {__version__}: use the same on both sides")
    if plan.world_sizes != (node["world_size"],):
        asked = ",".join(map(str, plan.world_sizes))
        raise UsageError(f"--world-size got {asked}: the service judges on {node['world_size']} ranks")
    if plan.protocol != "peerlane":
        raise UsageError(f"--protocol got {plan.protocol}: a service times by its own protocol; leave out --on, or give ray or slurm")
    if plan.isolation is not None and plan.isolation != node["isolation"]:
        raise UsageError(f"--isolation got {plan.isolation}: the service judges in {node['isolation']}")
