"""The machine that evaluations run on: as records describe it, and the isolation that it gives."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from peerlane.errors import UsageError
from peerlane.evaluate.plan import EvaluationPlan
from peerlane.evaluate.processes.sharing import sharing_failure
from peerlane.evaluate.results.identity import NodeClass
from peerlane.evaluate.sandbox.isolation import NO_ISOLATION, Isolation, choose
from peerlane.hardware.ceilings import load_ceilings
from peerlane.hardware.environment import node_class, record
from peerlane.hardware.profiles import HardwareProfile, profile_for
from peerlane.hardware.roofline import Peaks, datasheet_peaks, measured_peaks


@dataclass(frozen=True)
class Node:
    """Where it runs: what every result of a run has in common."""

    run_id: str
    device: Literal["cuda", "cpu"]
    gpus: int
    environment: Mapping[str, Any]
    profile: HardwareProfile | None
    peaks: tuple[Peaks, ...]
    memory_bytes: float
    rules_hash: str = ""
    """of the settings that decide verdicts and speeds"""

    @property
    def node_class(self) -> NodeClass:
        """Which results may be compared with those from here."""
        return NodeClass.of(self.environment, self.device)


def describe_node(plan: EvaluationPlan) -> Node:
    """This machine, as results record it; raises :class:`UsageError` if it has no GPU and one was asked for."""
    device, rules = plan.device, plan.rules_hash
    environment: dict[str, Any] = record()
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cpu":
        return Node(secrets.token_hex(6), device, 0, environment, None, (), 0.0, rules)
    if gpus == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu, or see `peerlane doctor`")
    gpu = environment["gpus"][0]
    profile = profile_for(gpu["name"])
    peaks = []
    if profile is not None:
        peaks.append(datasheet_peaks(profile))
        if (ceilings := load_ceilings(node_class(environment))) is not None:
            peaks.append(measured_peaks(ceilings, profile))
    return Node(secrets.token_hex(6), device, gpus, environment, profile, tuple(peaks), float(gpu["memory_bytes"]), rules)


def choose_isolation(plan: EvaluationPlan) -> Isolation:
    """The tier that the plan asks for, or the best of L0 and L1 that this machine gives; raises :class:`UsageError`."""
    isolation = choose(plan.isolation, plan.device)  # no candidate's file is shown: each is sent to its own ranks
    if plan.device == "cpu" or isolation.tier == "L0":
        return isolation
    if not (failure := sharing_failure(isolation, plan.device, plan.deadlines)):
        return isolation
    if plan.isolation is None:
        return replace(NO_ISOLATION, missing={"GPU memory shared with confined ranks": failure})
    raise UsageError(
        f"isolation {isolation.tier} is not possible here: confined ranks cannot share GPU memory with the trusted ones: {failure}\n"
        "Use another tier with --isolation, and see docs/isolation.md"
    )
