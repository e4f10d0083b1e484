"""The node that a prompt describes: this machine, a node of a known GPU, or what a file says."""

import json
import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from peerlane.errors import UsageError
from peerlane.hardware.environment import software_versions
from peerlane.hardware.profiles import PROFILES, HardwareProfile, profile_for
from peerlane.hardware.topology import Topology, discover
from peerlane.results.record import first_fault

USUAL_NODE = "h200x4"
"""Described where this machine has no GPU and no other node is named."""


class Machine(BaseModel):
    """One node with GPUs, as prompts describe it; also the format of ``--hardware FILE``. None: not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str = Field(min_length=1, description="as the driver names it")
    count: int = Field(ge=1)
    compute_capability: str | None = None
    arch_flags: str | None = Field(default=None, description="what nvcc and NVRTC compile for, such as sm_90a")
    sm_count: int | None = None
    memory_gb: float | None = None
    memory_tbps: float | None = None
    l2_mib: float | None = None
    tensor_tflops: dict[str, float] = Field(default_factory=dict, description="dense peaks by dtype")
    links: str = "unknown"
    link_gbps: float | None = Field(default=None, description="10^9 bytes per second and GPU, in one direction")
    nvswitch: bool | None = None
    multicast: bool = Field(default=False, description="whether NVLink multicast may be used")
    peer_access: bool | None = None
    software: dict[str, str] = Field(default_factory=dict)

    @property
    def block_shared_kib(self) -> int | None:
        """Shared memory that a block may have, in KiB, where peerlane knows it. An SM has 1 KiB more."""
        return 227 if (self.compute_capability or "").partition(".")[0] in ("9", "10") else None

    @property
    def profile(self) -> HardwareProfile | None:
        """The datasheet figures that belong to the GPU, if peerlane has them."""
        return profile_for(self.gpu)

    @classmethod
    def from_profile(cls, profile: HardwareProfile, count: int, software: dict[str, str]) -> Self:
        """Returns a node of ``count`` such GPUs, each joined to every other by NVLink and NVSwitch."""
        major, minor = profile.compute_capability
        return cls(
            gpu=profile.device_names[0],
            count=count,
            compute_capability=f"{major}.{minor}",
            arch_flags=f"sm_{major}{minor}a",
            sm_count=profile.sm_count,
            memory_gb=profile.hbm_gb,
            memory_tbps=profile.hbm_tbps,
            l2_mib=profile.l2_mib,
            tensor_tflops=dict(profile.tensor_tflops),
            links="NVLink",
            link_gbps=profile.nvlink_gbps,
            nvswitch=True,
            peer_access=True,
            software=software,
        )

    @classmethod
    def from_topology(cls, topology: Topology) -> Self:
        """Describes this machine: its GPUs, their links and the installed software."""
        first = topology.gpus[0]
        versions = {name: version for name, version in software_versions().items() if version is not None and name != "peerlane"}
        if topology.driver_version:
            versions["driver"] = topology.driver_version
        nvlink = topology.interconnect == "NVLink"
        profile = profile_for(first.name)
        if profile is not None:
            known = cls.from_profile(profile, len(topology.gpus), versions)
            changes = {"gpu": first.name, "links": topology.interconnect or "none", "peer_access": True if nvlink else None}
            return known.model_copy(update=changes if nvlink else {**changes, "link_gbps": None, "nvswitch": None})
        return cls(
            gpu=first.name,
            count=len(topology.gpus),
            memory_gb=round(first.memory_bytes / 1e9),
            links=topology.interconnect or "none",
            peer_access=True if nvlink else None,
            software=versions,
        )


def choose_machine(wanted: str = "auto") -> Machine:
    """Returns the node that ``--hardware`` means: ``auto`` (this machine, or the usual node without GPUs), ``h200x8``, or a JSON file.

    Raises UsageError for a node that is unknown and no file, and for a file that is no :class:`Machine`.
    """
    if wanted == "auto":
        topology = discover()
        return Machine.from_topology(topology) if topology.gpus else choose_machine(USUAL_NODE)
    named = re.fullmatch(r"(\w+)x(\d+)", wanted.casefold())
    for profile in PROFILES:
        if named and named[1] == profile.name.casefold().split()[0] and int(named[2]) >= 1:
            return Machine.from_profile(profile, int(named[2]), {"torch": "2.9 or newer", "CUDA": "13", "Python": "3.11 or newer"})
    path = Path(wanted)
    try:
        return Machine.model_validate(json.loads(path.read_text()))
    except OSError as error:
        nodes = ", ".join(f"{profile.name.casefold().split()[0]}x4" for profile in PROFILES)
        reason = error.strerror or error
        raise UsageError(f"--hardware got {wanted!r}: expected auto, a node such as {nodes}, or a JSON file ({reason})") from None
    except ValueError as error:
        details = first_fault(error) if isinstance(error, ValidationError) else f"not JSON: {error}"
        raise UsageError(f"--hardware {path}: {details}; `peerlane prompt 1 --json` prints the fields of a node under `hardware`") from None
