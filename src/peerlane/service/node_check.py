"""Is this node fit to judge? The doctor, six known cheats that must be refused, and the reference against itself.

A process of its own: ``python -m peerlane.service.node_check`` with a JSON object on stdin, and the report as JSON on stdout.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from peerlane.errors import PeerlaneError
from peerlane.settings import SELFTEST_RULES

CHEATS = (
    "1_c02_returns_its_input_pytorch", "1_c04_right_on_rank_0_pytorch", "1_c08_mean_of_inputs_pytorch", "1_c09_caches_by_pointer_pytorch",
    "1_c16_computes_when_compared_pytorch", "1_c23_exits_at_import_pytorch",
)  # fmt: skip
"""Six kinds that CPU ranks and GPUs refuse fast: no communication, one right rank, a constant, a cache, a type, an early exit."""
LIMIT_S = 300.0
"""for the whole check"""


@dataclass(frozen=True)
class NodeReport:
    """The outcome of a check. ``faults``: reasons why the node must take no work; none if it is fit.

    Attributes:
        node: the node's class, in words.
        cheats: cheats that were judged.
        offsets: by launch mode, how far the reference is from itself: the median ratio less one. Empty where speed is not measured.
        conditions: what results from here have in common: see :class:`.Conditions`, as JSON.
    """

    node: str
    faults: tuple[str, ...] = ()
    cheats: int = 0
    offsets: tuple[tuple[str, float], ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """See :meth:`to_json`."""
        offsets = tuple((mode, offset) for mode, offset in data["offsets"])
        return cls(data["node"], tuple(data["faults"]), data["cheats"], offsets, data["conditions"])

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        if self.faults:
            return f"{self.node} is left out: {'; '.join(self.faults)}"
        speeds = ", ".join(f"{mode} {offset:+.1%}" for mode, offset in self.offsets) or "speed is not measured here"
        return f"the node passed its check ({self.node}): {self.cheats} cheats refused; the reference against itself: {speeds}"


def check_node(device: str, isolation: str | None = None, cheats: Sequence[str] = CHEATS) -> NodeReport:
    """The report on this node. Takes about ten seconds of CPU; at most :data:`LIMIT_S` where it is run as a process."""
    from peerlane.hardware.doctor import diagnose
    from peerlane.hardware.environment import record
    from peerlane.results.identity import NodeClass

    node = str(NodeClass.of(record(), device))
    device = "cpu" if device == "emulated" else device  # the cheats use torch.distributed, and meet the same processes there
    if broken := [f"{check.name}: {check.detail}" for check in diagnose() if check.status == "fail"]:
        return NodeReport(node, tuple(broken))
    from peerlane.evaluate.selftest.outcome import objection
    from peerlane.evaluate.selftest.run import SelftestPlan, selftest
    from peerlane.evaluate.selftest.table import load

    corpus = load()
    chosen = tuple(entry for entry in corpus.entries if entry.file in cheats or entry.row == "A00")
    # Only the reference stands between the cheats: nothing else of the corpus needs to be judged here.
    corpus = replace(corpus, entries=chosen)
    judged = selftest(SelftestPlan(corpus, chosen, device, isolation=isolation))  # type: ignore[arg-type]
    faults = [f"{entry.file}: {found}" for entry, outcome in judged if (found := objection(entry, outcome)) is not None]
    refused = sum(entry.kind == "cheat" for entry, _ in judged)
    if refused < len(cheats):
        faults.append(f"{refused} of {len(cheats)} cheats were judged")
    against_itself = [outcome for entry, outcome in judged if entry.row == "A00"]
    offsets = {mode: estimate.median - 1.0 for outcome in against_itself for mode, estimate in outcome.speedups.items()}
    for mode, offset in offsets.items():
        if abs(offset) > (limit := SELFTEST_RULES.slowdown_limit[mode]):
            faults.append(f"the reference differs from itself by {offset:+.1%} in {mode} mode: expected at most {limit:.0%}")
    return NodeReport(node, tuple(faults), refused, tuple(sorted(offsets.items())))


def conditions_of(device: str, isolation: str | None, world_sizes: Sequence[int], ranks_per_gpu: int) -> dict[str, Any]:
    """Returns as JSON what results from this node have in common."""
    from peerlane.common.version import __version__
    from peerlane.evaluate.evaluator import Evaluator

    evaluator = Evaluator(world_sizes[0], device, isolation=isolation, ranks_per_gpu=ranks_per_gpu)
    classes = {str(size): evaluator.node_of(size).node_class.model_dump() for size in world_sizes}
    rules = evaluator.node_of(world_sizes[0]).rules_hash
    return {"classes": classes, "isolation": evaluator.isolation.tier, "rules_hash": rules, "evaluator_version": __version__}


def command() -> list[str]:
    """The command of the process that checks."""
    return [sys.executable, "-P", "-m", "peerlane.service.node_check"]


def read_report(status: int, out: bytes, err: bytes) -> NodeReport:
    """The report that the process printed; of a process that printed none, a report that says so."""
    try:
        return NodeReport.from_json(json.loads(out))
    except (ValueError, KeyError, TypeError):
        told = (err.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
        return NodeReport("this node", (f"the check ended with status {status}: {told[:300]}",))


def main() -> int:
    """The process: nothing but the report goes to stdout."""
    import os

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    try:
        report = check_node(asked["device"], asked.get("isolation"))
        if world_sizes := asked.get("world_sizes"):
            found = conditions_of(asked["device"], asked.get("isolation"), world_sizes, asked.get("ranks_per_gpu", 0))
            report = replace(report, conditions=found)
    except PeerlaneError as error:
        report = NodeReport(str(Path("/proc/sys/kernel/hostname").read_text().strip()), (str(error),))
    print(json.dumps(report.to_json()), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
