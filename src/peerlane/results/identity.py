"""The identity of an evaluation: candidate, problem, class of machine, evaluator, rules, and the source of the problem."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import Field

from peerlane.common.place import NodeKind, Place
from peerlane.common.problem_files import OWN_FOLDER, OWN_PACKAGE, ProblemFile, problem_files
from peerlane.hardware.virtual_node import Baseline, Sharing
from peerlane.results.definitions import Packages
from peerlane.results.judged_source import JudgedSource
from peerlane.results.record import Mode, Record
from peerlane.settings import nvls_allowed, torch_multicast_allowed

if TYPE_CHECKING:
    from peerlane.problems.contract.spec import Problem

HASH_CHARACTERS = 16
_SWITCH = {True: "allowed", False: "off", None: "unknown"}


class NodeClass(Record):
    """The class of machine. Only results of one class are compared or ranked with each other."""

    kind: NodeKind = Field(
        description="node: a GPU for every rank; virtual: ranks share GPUs; cpu: gloo ranks; emulated: threads stand in for GPUs"
    )
    gpu: str | None = Field(default=None, description="model; None without GPUs")
    gpus: int = Field(default=0, ge=0, description="visible on the machine")
    link: str | None = Field(default=None, description="how the GPUs are joined: NVLink, PCIe")
    driver: str | None = Field(default=None, description="major version of the GPU driver")
    ranks_per_gpu: int = Field(default=1, ge=1)
    sharing: Sharing | None = Field(default=None, description="how ranks share a GPU of a virtual node")
    baseline: Baseline | None = Field(default=None, description="what serves torch.distributed on a virtual node")
    nodes: int = Field(default=1, ge=1, description="that the ranks are in; several are a virtual cluster on one machine")
    nvls: bool | None = Field(
        default=None,
        description="NCCL might use NVLink multicast (NVLS): its ranks' NCCL_NVLS_ENABLE was not 0. None: unknown, or not a node",
    )
    multicast: bool | None = Field(
        default=None,
        description="symmetric memory might have multicast pointers: TORCH_SYMM_MEM_DISABLE_MULTICAST was not 1. None: as for nvls",
    )

    @classmethod
    def of(cls, environment: Mapping[str, Any], device: str) -> Self:
        """Returns the class of a :func:`peerlane.hardware.environment.record`.

        Its optional key ``virtual_node`` has ``ranks_per_gpu``, ``sharing`` and ``baseline``, and ``virtual_cluster`` has ``nodes``. Ranks
        have the ``variables`` of the record, but on a virtual node, where both kinds of multicast are always off.
        """
        nodes = (environment.get("virtual_cluster") or {}).get("nodes", 1)
        shared = environment.get("virtual_node") or {}
        shared = shared if shared.get("ranks_per_gpu", 1) > 1 else {}
        place = Place.of(device, shared=bool(shared))
        if not place.has_gpus:
            return cls(kind=place.kind, nodes=nodes)
        counts = Counter(gpu["name"] for gpu in environment.get("gpus") or ())
        driver = environment.get("driver")
        variables = None if place.shares_gpus else environment.get("variables")
        return cls(
            kind=place.kind,
            nodes=nodes,
            gpu=" + ".join(sorted(counts)) or None,
            gpus=sum(counts.values()),
            link=environment.get("interconnect"),
            driver=driver.split(".")[0] if driver else None,
            nvls=None if variables is None else nvls_allowed(variables),
            multicast=None if variables is None else torch_multicast_allowed(variables),
            **{name: shared[name] for name in ("ranks_per_gpu", "sharing", "baseline") if name in shared},
        )

    @property
    def place(self) -> Place:
        return Place.of_kind(self.kind).in_nodes(self.nodes)

    @property
    def lacks_multicast(self) -> bool:
        """True if a candidate certainly had no multicast pointers."""
        return self.place.shares_gpus or self.multicast is False

    def __str__(self) -> str:
        cluster = f"virtual cluster of {self.nodes} nodes" if self.nodes > 1 else None
        if not self.place.has_gpus:
            return ", ".join(part for part in (self.place.title, cluster) if part)
        how = {"mps": "MPS", "time_slices": "time slices", None: "unknown means"}[self.sharing]
        shared = f"{self.place.title} of {self.ranks_per_gpu} ranks per GPU by {how}, on {self.baseline or 'an unknown'} baseline"
        parts = [
            cluster,
            shared if self.place.shares_gpus else None,
            f"{self.gpus}x {self.gpu or 'unknown GPU'}",
            self.link,
            f"driver {self.driver or 'unknown'}",
            None if self.nvls is None else f"NVLS {_SWITCH[self.nvls]}",
            None if self.multicast is None else f"multicast {_SWITCH[self.multicast]}",
        ]
        return ", ".join(part for part in parts if part)

    def switches(self) -> list[tuple[str, str]]:
        """Returns names of NCCL's and torch's multicast, each with ``allowed``, ``off`` or ``unknown``; nothing without GPUs."""
        if not self.place.has_gpus:
            return []
        named = {"NVLS of NCCL": self.nvls, "multicast of symmetric memory": self.multicast}
        return [(name, "off" if self.place.shares_gpus else _SWITCH[value]) for name, value in named.items()]


class Identity(NamedTuple):
    """Two results of one identity answer the same question; the newer one replaces the older. The candidate's label is no part of it."""

    sha256: str
    problem: int
    preset: str
    world_size: int
    variant: str
    modes: tuple[Mode, ...]
    cases: str
    track: str
    isolation: str
    node: NodeClass
    evaluator_version: str
    rules_hash: str | None
    source_hash: str | None

    @property
    def digest(self) -> bytes:
        """32 bytes, the same in every process."""
        return hashlib.sha256(repr(self).encode()).digest()


def short_hash(*parts: bytes) -> str:
    """The first digits of the parts' SHA-256."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:HASH_CHARACTERS]


def environment_hash(environment: Mapping[str, Any]) -> str:
    """Names an environment: equal contents, equal hash."""
    return short_hash(json.dumps(environment, sort_keys=True, separators=(",", ":")).encode())


def hash_rules(*rules: Any, version: int | str) -> str:
    """Returns the hash of settings, by their names and values, and of the protocol's version or name; see :mod:`peerlane.settings`."""
    assert all(fields(item) for item in rules)
    found = {"protocol": version, **{type(item).__name__: asdict(item) for item in rules}}
    return short_hash(json.dumps(found, sort_keys=True, default=str).encode())


def source_hash(problem: Problem) -> str:
    """Returns the hash of the code that judges and times the problem, see :mod:`peerlane.results.judged_source`."""
    return _hash_file(problem_files().get(problem.id))


@functools.cache
def _hash_file(file: ProblemFile | None) -> str:
    """Once per process, which imports a problem once; of the contract alone for a problem without a file."""
    if file is None:
        return _sources(OWN_PACKAGE, OWN_FOLDER).hash("")[:HASH_CHARACTERS]
    return _sources(file.package, file.path.parent).hash(f"{file.package}.{file.path.stem}")[:HASH_CHARACTERS]


@functools.cache
def _sources(package: str, folder: Path) -> JudgedSource:
    return JudgedSource(Packages({OWN_PACKAGE: OWN_FOLDER, package: folder}))
