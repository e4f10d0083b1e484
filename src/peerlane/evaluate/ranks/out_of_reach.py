"""What a submitted candidate cannot use: peerlane's own answers, and in the custom track the kit's ready collectives and fused kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from peerlane.errors import TrackForbids
from peerlane.evaluate.sandbox.answers import PACKAGES

_LIBRARY = (
    ("peerlane.device.collectives", "Communicator"),
    ("peerlane.device.all_gather_gemm", "AllGatherGemm"),
    ("peerlane.device.gemm_all_gather", "GemmAllGather"),
    ("peerlane.device.moe_layer", "ExpertLayer"),
    ("peerlane.device.owner_sum", "OwnerSum"),
)


def _is_answer(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in PACKAGES)


class _Refuse(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if _is_answer(fullname):
            raise ImportError(
                f"{fullname} is out of a candidate's reach: it holds answers. The kit's primitives in peerlane.device may be used"
            )
        return None


def refuse_answers() -> None:
    """From now on this process imports none of peerlane's answers, nor keeps any that it has."""
    for name in [name for name in sys.modules if _is_answer(name)]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Refuse())


def refuse_library() -> None:
    """From now on this process makes none of the kit's ready collectives and fused kernels: whoever tries gets TrackForbids."""
    for home, name in _LIBRARY:
        setattr(getattr(importlib.import_module(home), name), "__init__", _forbid)  # noqa: B010
    ready = importlib.import_module("peerlane.device.collectives").communicator
    for module in [module for name, module in sys.modules.items() if name.startswith("peerlane.device")]:
        if getattr(module, "communicator", None) is ready:
            setattr(module, "communicator", _forbid)  # noqa: B010


def _forbid(*_: Any, **__: Any) -> NoReturn:
    raise TrackForbids(
        "the kit's ready collectives and fused kernels are a library; in the custom track communication must be the candidate's own"
    )
