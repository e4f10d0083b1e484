"""The mechanisms by which a candidate moves data between ranks, each with what speaks for it. Never one label, never a verdict.

An instruction in a kernel that ran need not have been executed, and its address need not have been a peer's; what is said is what was
found. A kernel that was loaded and did not run in any audited call is said to be that, and no more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from peerlane.evaluate import wire
from peerlane.evaluate.audit.activity import Activity, kernel_kind
from peerlane.results.result import Confidence, Mechanism, MechanismName

_ORDER: tuple[Confidence, ...] = get_args(Confidence)
_OWN = ("own", "triton")


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel whose code a rank found loaded; ``name`` as the profiler would write it."""

    name: str
    origin: str
    mechanisms: frozenset[str]


def loaded_kernels(found: Iterable[wire.LoadedKernel]) -> list[LoadedKernel]:
    """The kernels that a rank reports, without mechanisms that nobody knows."""
    return [LoadedKernel(item.name, item.origin, frozenset(get_args(MechanismName)) & {*item.mechanisms}) for item in found]


def mechanisms(spans: Iterable[Activity], loaded: Sequence[LoadedKernel]) -> tuple[Mechanism, ...]:
    """Returns what audited spans and loaded code show, in a fixed order; each mechanism once, with its best evidence."""
    spans = list(spans)
    found = [*_from_activity(spans), *_from_code(spans, loaded)]
    best = {item.name: item for item in sorted(found, key=lambda item: _ORDER.index(item.confidence), reverse=True)}
    return tuple(best[name] for name in get_args(MechanismName) if name in best)


def _from_activity(spans: Sequence[Activity]) -> list[Mechanism]:
    found = []
    for item in spans:
        for name in item.forbidden():
            if name.startswith("gloo:"):
                found.append(Mechanism(name="gloo", confidence="seen", evidence=_short(name)))
            elif name.startswith("nccl:") or kernel_kind(name) == "nccl":
                found.append(Mechanism(name="nccl", confidence="seen", evidence=_short(name)))
        if item.copies["peer"]:
            found.append(Mechanism(name="copy_engine", confidence="seen", evidence="copies between GPUs"))
        elif item.copies["same_gpu"]:
            evidence = "copies on one GPU, as which a copy to mapped memory of a peer may be recorded"
            found.append(Mechanism(name="copy_engine", confidence="possible", evidence=evidence))
    return found


def _from_code(spans: Sequence[Activity], loaded: Sequence[LoadedKernel]) -> list[Mechanism]:
    ran = {name for item in spans for name in item.kernels}
    triton = {kernel.name for kernel in loaded if kernel.origin == "triton"}
    found = []
    for kernel in loaded:
        for name in kernel.mechanisms:
            # System scope is what talking to the host takes as well: a kernel that ran with it is a hint only.
            seen: Confidence = "possible" if name == "sm_load_store" else "seen"
            confidence = seen if kernel.name in ran else "loaded"
            evidence = f"instructions in {kernel.origin} kernel {_short(kernel.name)}" + (
                "" if kernel.name in ran else ", which did not run"
            )
            found.append(Mechanism(name=name, confidence=confidence, evidence=evidence))  # type: ignore[arg-type]
    for name in sorted(ran - {kernel.name for kernel in loaded}):
        if kernel_kind(name, triton) in _OWN:
            evidence = f"kernel {_short(name)} ran, and its code was not found"
            found.append(Mechanism(name="sm_load_store", confidence="possible", evidence=evidence))
    return found


def _short(name: str) -> str:
    return name if len(name) <= 100 else f"{name[:97]}..."
