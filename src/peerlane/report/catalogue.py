"""A problem as plain data: what ``peerlane list --json`` and ``peerlane show --json`` print and the documentation pages are made from."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from peerlane.common.cluster import CLUSTERS, Cluster
from peerlane.errors import UsageError
from peerlane.hardware.profiles import H200_SXM, PROFILES, HardwareProfile
from peerlane.hardware.roofline import datasheet_peaks, roofline
from peerlane.problems import Case, CaseSpec, Cost, Draw, Preset, Problem, Tolerance
from peerlane.problems.contract.tree import Description, describe, dtype_name
from peerlane.problems.contract.wrong_answers import case_names, known_wrong_answers

Entry = dict[str, Any]

PAGE_WORLD_SIZE = 4
SMALL_ENOUGH = ("small", "pkb")
"""Presets whose arguments may be drawn for real, on the CPU, to learn their shapes; others may not fit this machine's memory."""


def problem_entry(problem: Problem) -> Entry:
    return {
        "id": problem.id,
        "slug": problem.slug,
        "title": problem.title,
        "category": problem.category,
        "parallelism": list(problem.parallelism),
        "world_sizes": list(problem.world_sizes),
        "nodes": list(problem.nodes),
        "modes": list(problem.modes),
        "presets": [preset.name for preset in problem.presets],
        "variants": list(problem.variants),
        "signature": problem.signature,
    }


def index(suite: Sequence[Problem]) -> str:
    """Returns the text of the index of the suite, see :mod:`peerlane.common.problem_files`."""
    return "[\n" + ",\n".join(json.dumps(problem_entry(problem), ensure_ascii=False) for problem in suite) + "\n]\n"


def find_profile(name: str) -> HardwareProfile:
    """Finds the hardware profile of this name, or whose name starts with the word (case aside): ``h200``; raises UsageError."""
    wanted = name.strip().casefold()
    for profile in PROFILES:
        if wanted in (profile.name.casefold(), profile.name.casefold().split()[0]):
            return profile
    known = ", ".join(profile.name for profile in PROFILES)
    raise UsageError(f"there is no hardware profile {name!r}; there are: {known}")


def page_world_size(problem: Problem) -> int:
    """Returns four ranks, or the largest number below that the problem runs on, or else the smallest."""
    return max((size for size in problem.world_sizes if size <= PAGE_WORLD_SIZE), default=min(problem.world_sizes))


def problem_detail(
    problem: Problem,
    *,
    world_size: int,
    nodes: int | None = None,
    presets: Sequence[str] | None = None,
    profile: HardwareProfile = H200_SXM,
) -> Entry:
    """Returns everything about one problem, with its presets (all but the sweep's, or those named, families too) as they are on
    ``world_size`` ranks in ``nodes`` nodes (by default the first number that fits).

    ``profile``: whose datasheet the rooflines are computed from. Raises UnknownPreset, and UsageError if the problem does not run on that
    many ranks or nodes.
    """
    if presets is None:
        selected = [item for item in problem.presets if item.family != "sweep"]
    else:
        selected = [item for name in presets for item in problem.family(name) or (problem.preset(name),)]
    return {
        **problem_entry(problem),
        "origin": problem.origin,
        "summary": problem.summary,
        "notes": list(problem.notes),
        "speed_note": problem.speed_note,
        "graph_reason": problem.graph_reason,
        "replicated": problem.replicated if isinstance(problem.replicated, bool) else list(problem.replicated),
        "updates": list(problem.updates),
        "integer_exact": problem.integer_exact,
        "mutates": sorted(problem.mutates),
        "comparison": inspect.getdoc(problem.compare) if problem.compare else None,
        "error_model": inspect.getdoc(problem.tolerance),
        "known_wrong_answers": [
            {"name": item.name, "why": item.why, "cases": case_names(problem, item)} for item in known_wrong_answers(problem)
        ],
        "excused": dict(problem.excused),
        "world_size": world_size,
        "profile": profile.name,
        "attainable": _attainable(problem, world_size, nodes),
        "presets": [_preset_detail(problem, preset, world_size, nodes, profile) for preset in selected],
        "clusters": [
            _cluster_detail(problem, cluster, preset, profile)
            for preset in selected
            if preset.family != "small"
            for cluster in clusters_of(problem)
        ],
        "sweep": [{"name": item.name, "size": item.about} for item in problem.family("sweep")],
    }


def _attainable(problem: Problem, world_size: int, nodes: int | None) -> Entry | None:
    """Returns the problem's algorithm with its steps at the first size of a real model, or why there is none; None if neither is told."""
    if isinstance(algorithm := problem.attainable, str):
        return {"reason": algorithm} if algorithm else None
    known: Entry = {"name": algorithm.name, "source": algorithm.source, "reason": "", "preset": None, "steps": []}
    if case := next(
        (case for preset in problem.family("production") for case in problem.cases(preset.name, world_size, nodes=nodes)), None
    ):
        ranks = zip(*(algorithm.steps(case, rank) for rank in range(world_size)), strict=True)
        steps = [{"name": same[0].name, "barriers": same[0].barriers, "cost": _cost([step.cost for step in same])} for same in ranks]
        known |= {"preset": case.preset, "steps": steps}
    return known


def clusters_of(problem: Problem) -> tuple[Cluster, ...]:
    """Returns the profiles of several nodes that the problem runs on."""
    return tuple(cluster for cluster in CLUSTERS if cluster.nodes in problem.nodes and cluster.world_size in problem.world_sizes)


def _cluster_detail(problem: Problem, cluster: Cluster, preset: Preset, profile: HardwareProfile) -> Entry:
    """Returns what a preset's timed case must move on each tier of a cluster, and how long that takes; Nones without such a case."""
    case = next(iter(problem.cases(preset.name, cluster.world_size, nodes=cluster.nodes)), None)
    costs = [] if case is None else [problem.cost(case, rank) for rank in range(cluster.world_size)]
    return {
        "cluster": str(cluster),
        "preset": preset.name,
        "cost": _cost(costs) if costs else None,
        "roofline": _roofline(costs, profile) if costs else None,
    }


def _preset_detail(problem: Problem, preset: Preset, world_size: int, nodes: int | None, profile: HardwareProfile) -> Entry:
    cases = {case.label: case for variant in problem.variants for case in problem.cases(preset.name, world_size, variant, nodes)}
    return {
        "name": preset.name,
        "about": preset.about,
        "cases": [_case_detail(problem, spec, cases.get(spec.label), profile) for spec in preset.cases],
    }


def timed_case(preset: Entry) -> Entry | None:
    """Returns the case of a preset that is timed at this world size, as :func:`problem_detail` describes it."""
    return next((case for case in preset["cases"] if case["cost"] is not None), None)


def _case_detail(problem: Problem, spec: CaseSpec, case: Case | None, profile: HardwareProfile) -> Entry:
    entry: Entry = {
        "label": spec.label,
        "dtype": dtype_name(spec.dtype),
        "variant": spec.variant,
        "world_sizes": list(spec.world_sizes or problem.world_sizes),
        "params": plain(spec.params),
        "arguments": None,
        "tolerance": None,
        "cost": None,
        "roofline": None,
        "process_groups": None,
    }
    if case is None:
        return entry
    entry["tolerance"] = {name: _tolerance(item) for name, item in problem.tolerance(case).items()}
    costs = [problem.cost(case, rank) for rank in range(case.world_size)]
    entry["cost"] = _cost(costs)
    entry["roofline"] = _roofline(costs, profile)
    entry["process_groups"] = plain(problem.process_groups(case))
    entry["arguments"] = _arguments(problem, case)
    return entry


def _arguments(problem: Problem, case: Case) -> list[Entry] | None:
    """Returns rank 0's arguments. Shapes come from the case and the public layout, so any secret shows the same ones.

    Those of `small` are drawn for real, the others without memory; where that fails because contents decide something, they are drawn for
    real too; None if that takes too much.
    """

    def drawn(draw: type[Draw], device: str) -> list[Entry]:
        values = problem.inputs(case, 0, draw(secret="catalogue", case_key=case.key, slot=0, block=0, rank=0, device=device))
        return [{"name": name, "value": argument_text(describe(value))} for name, value in zip(problem.parameters, values, strict=False)]

    if case.preset == "small":
        return drawn(Draw, "cpu")
    try:
        return drawn(_Shapes, "meta")
    except RuntimeError:  # something asked a tensor without memory for its contents
        return drawn(Draw, "cpu") if case.preset in SMALL_ENOUGH else None


class _Shapes(Draw):
    """A draw of shapes alone, which saves time on the meta device: torch spends milliseconds there on a distribution of nothing."""

    def normal(self, shape: Sequence[int], dtype: torch.dtype, *, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, *, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def argument_text(description: Description) -> str:
    """Returns an argument in words: ``bfloat16[4, 8]``, ``list of 3: bfloat16[4, 8]``, ``process group tp``, ``0.5``."""
    kind = description["kind"]
    if kind == "tensor":
        return f"{description['dtype']}{description['shape']}"
    if kind == "group":
        return f"process group {description['name']}"
    if kind == "value":
        return repr(description["value"])
    if kind == "size":
        return f"torch.Size({description['value']})"
    if kind == "other":
        return str(description["type"])
    items = [argument_text(item) for item in description["items"]]
    if kind == "linear":
        return f"Linear({', '.join(items)})"
    if kind == "sparse":
        return f"sparse COO {description['shape']} ({', '.join(items)})"
    if kind == "dict":
        return f"dict: {', '.join(f'{key}={item}' for key, item in zip(description['keys'], items, strict=True))}"
    inside = items[0] if len(set(items)) == 1 else ", ".join(items)
    return f"{kind} of {len(items)}{': ' if items else ''}{inside if items else ''}"


def _tolerance(tolerance: Tolerance) -> Entry:
    return {
        "relative": tolerance.relative,
        "magnitude": tolerance.magnitude,
        "rms": tolerance.rms,
        "normwise": tolerance.normwise,
        "rowwise": tolerance.rowwise,
        "size": tolerance.size if tolerance.magnitude else "",
        "words": tolerance.words,
    }


def _cost(costs: Sequence[Cost]) -> Entry:
    """Returns the largest cost over the ranks, item by item."""
    units = sorted({unit for cost in costs for unit in cost.flops})
    return {
        "flops": {unit: float(max(cost.flops.get(unit, 0.0) for cost in costs)) for unit in units},
        "hbm_bytes": float(max(cost.hbm_bytes for cost in costs)),
        "egress_bytes": float(max(cost.egress_bytes for cost in costs)),
        "ingress_bytes": float(max(cost.ingress_bytes for cost in costs)),
        "network_egress_bytes": float(max(cost.network_egress_bytes for cost in costs)),
        "network_ingress_bytes": float(max(cost.network_ingress_bytes for cost in costs)),
    }


def _roofline(costs: Sequence[Cost], profile: HardwareProfile) -> Entry:
    """Computes the roofline from the datasheet; nothing is measured."""
    bound = roofline(costs, datasheet_peaks(profile))
    return {
        "bound_us": float(bound.bound_us),
        "bound_by": bound.bound_by,
        "times_us": {name: float(time) for name, time in bound.times_us.items()},
    }


def plain(value: Any) -> Any:
    """Returns the value in a form that JSON can hold: dtypes by name, infinities as text, anything unknown as its text."""
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return str(value)
