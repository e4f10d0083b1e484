"""The machine that evaluations run on: as records describe it, where its ranks are, and the isolation that it gives."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.common.place import Device, Place
from peerlane.common.words import counted
from peerlane.emulator import build
from peerlane.errors import UsageError
from peerlane.evaluate.plan import EvaluationPlan
from peerlane.evaluate.processes.sharing import sharing_failure
from peerlane.hardware.ceilings import load_ceilings
from peerlane.hardware.environment import node_class, record
from peerlane.hardware.profiles import HardwareProfile, profile_for
from peerlane.hardware.roofline import Peaks, datasheet_peaks, measured_peaks
from peerlane.hardware.virtual_node import Sharing, VirtualNode, share_gpus
from peerlane.results.identity import NodeClass
from peerlane.sandbox.isolation import NO_ISOLATION, Isolation, choose
from peerlane.settings import multicast_environment


class TooFewGpus(Exception):
    """The ranks have no place on this machine."""


@dataclass(frozen=True)
class Node:
    """The machine of a run, as all its results record it."""

    run_id: str
    device: Device
    gpus: int
    environment: Mapping[str, Any]
    profile: HardwareProfile | None
    peaks: tuple[Peaks, ...]
    memory_bytes: float
    rules_hash: str = ""
    """The hash of the settings that decide verdicts and speeds."""

    def shared_by(self, virtual: VirtualNode | None) -> "Node":
        """This machine where its ranks share GPUs as they do on ``virtual``: a rank has a part of the memory, and no link to a peer."""
        if virtual is None:
            return self
        environment = {**self.environment, "virtual_node": virtual.describe()}
        part = self.memory_bytes / virtual.ranks_per_gpu
        return replace(self, environment=environment, profile=None, peaks=(), memory_bytes=part)

    @property
    def place(self) -> Place:
        return self.node_class.place

    @property
    def node_class(self) -> NodeClass:
        """Returns the class of nodes whose results may be compared with those from here."""
        return NodeClass.of(self.environment, self.device)


def describe_node(plan: EvaluationPlan) -> Node:
    """This machine, as results record it; raises :class:`UsageError` if it has no GPU and one was asked for."""
    rules = plan.rules_hash
    environment: dict[str, Any] = record(environ=os.environ | multicast_environment())
    if plan.nodes > 1:
        environment["virtual_cluster"] = {"nodes": plan.nodes}
    if plan.place.emulated:
        build.runtime()  # every candidate needs it, and nobody else can put it where all find it
    if not plan.place.has_gpus:
        return Node(secrets.token_hex(6), plan.device, 0, environment, None, (), 0.0, rules)
    if (gpus := torch.cuda.device_count()) == 0:
        raise UsageError("--device cuda: no GPU is visible here; use --device cpu, or see `peerlane doctor`")
    gpu = environment["gpus"][0]
    profile = profile_for(gpu["name"])
    peaks = []
    if profile is not None:
        peaks.append(datasheet_peaks(profile))
        if (ceilings := load_ceilings(node_class(environment))) is not None:
            peaks.append(measured_peaks(ceilings, profile))
    return Node(secrets.token_hex(6), plan.device, gpus, environment, profile, tuple(peaks), float(gpu["memory_bytes"]), rules)


def place_ranks(plan: EvaluationPlan, world_size: int, gpus: int) -> VirtualNode | None:
    """The virtual node that so many ranks are on; None where each has a GPU, or a CPU. Raises :class:`TooFewGpus`."""
    if not plan.place.has_gpus:
        return None
    sharing: Sharing | None = "time_slices" if plan.isolation == "L2" else None  # MPS does not reach into the sandbox's namespaces
    node = share_gpus(world_size, gpus, plan.ranks_per_gpu or None, sharing)
    if node is None:
        allowed = f", {counted(plan.ranks_per_gpu, 'rank')} on each" if plan.ranks_per_gpu > 1 else ""
        raise TooFewGpus(f"{counted(world_size, 'rank')} on {counted(gpus, 'GPU')}{allowed}: use --ranks-per-gpu auto, or fewer ranks")
    if node.ranks_per_gpu > 1:
        return replace(node, baseline=plan.baseline or "peerlane")
    if plan.baseline == "peerlane":
        raise UsageError("--baseline peerlane: where every rank has a GPU, references run on NCCL; see --ranks-per-gpu")
    return None


def _uses_mps(plan: EvaluationPlan) -> bool:
    gpus = torch.cuda.device_count()
    nodes = [share_gpus(size, gpus, plan.ranks_per_gpu or None) for size in plan.world_sizes]
    return any(node.ranks_per_gpu > 1 and node.sharing == "mps" for node in nodes if node) and plan.isolation != "L2"


def choose_isolation(plan: EvaluationPlan) -> Isolation:
    """The tier that the plan asks for, or the best of L0 and L1 that this machine gives; raises :class:`UsageError`."""
    isolation = choose(plan.isolation, plan.device)  # no candidate's file is shown: each is sent to its own ranks
    if not plan.place.has_gpus or isolation.tier == "L0":
        return isolation
    if not (failure := sharing_failure(isolation, plan.device, plan.deadlines, _uses_mps(plan))):
        return isolation
    if plan.isolation is None:
        return replace(NO_ISOLATION, missing={"GPU memory shared with confined ranks": failure})
    raise UsageError(
        f"isolation {isolation.tier} is not possible here: confined ranks cannot share GPU memory with the trusted ones: {failure}\n"
        "Use another tier with --isolation, and see docs/isolation.md"
    )
