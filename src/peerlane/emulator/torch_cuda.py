"""``torch.cuda`` and devices named "cuda" on emulated ranks, whose memory is the host's.

Tensors of host code seem to lie on the GPU of its rank, and factories take ``device="cuda"``. All streams of a rank are one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from peerlane.device.host.group import current_group
from peerlane.device.host.roles import SHARED_LIMIT_BYTES
from peerlane.emulator.cuda_graphs import CUDAGraph, capturing, graph, record_operation
from peerlane.emulator.emulated_rank import EmulatedRank
from peerlane.emulator.torch_accesses import OperatorsNoted, note_read
from peerlane.errors import UsageError

_OWN_CODE = ("peerlane.", "torch.")  # reads host memory where tensors lie
_candidate = threading.local()
NOT_EMULATED = "is not on emulated ranks"
"""Part of the message of every error about a name that emulated ranks do not have."""


@contextlib.contextmanager
def candidate_code() -> Iterator[None]:
    """While this lasts, host code of this thread sees a GPU: ``tensor.data_ptr()`` is an address of emulated memory."""
    before, _candidate.runs = runs_candidate(), True
    try:
        with _Devices(), OperatorsNoted():  # type: ignore[no-untyped-call]
            yield
    finally:
        _candidate.runs = before


def runs_candidate() -> bool:
    """Tells whether host code of an emulated rank runs in this thread."""
    return getattr(_candidate, "runs", False)


def _asked_by_own_code(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith(_OWN_CODE)


def _own() -> EmulatedRank:
    group = current_group()
    if not isinstance(group, EmulatedRank):
        raise UsageError("torch.cuda was asked outside of emulated ranks, and there is no GPU")
    return group


def own_device() -> torch.device:
    """Returns the device that the rank's tensors seem to lie on."""
    return torch.device("cuda", _own().member)


def _is_own_gpu(device: Any) -> bool:
    """Tells whether this names the rank's GPU; raises UsageError for the GPU of another."""
    if isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return False
        device = device.index
    elif isinstance(device, bool) or not isinstance(device, int):
        return False
    if device not in (None, 0, _own().member):  # every rank may see its GPU as the only one
        own = _own().member
        raise UsageError(f"device cuda:{device} on rank {own}; an emulated rank has cuda:{own} alone, and symmetric memory of others")
    return True


class _Devices(TorchFunctionMode):
    """Makes functions of torch take the rank's GPU as the CPU, and tensors say that they lie on it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, caller = getattr(function, "__name__", ""), str(sys._getframe(1).f_globals.get("__name__", ""))
        if name == "__get__" and not caller.startswith(_OWN_CODE):
            of = getattr(function, "__self__", None)
            if of is torch.Tensor.is_cuda:
                return True
            if of is torch.Tensor.device:
                return own_device()
        if name == "get_device" and not caller.startswith(_OWN_CODE):
            return _own().member
        if name in ("cuda", "cpu", "to", "pin_memory"):
            return self._moved(name, function, args, kwargs)
        if name == "tolist":
            note_read(args[0], name)
        if "device" in kwargs and _is_own_gpu(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if capturing() and not caller.startswith("peerlane."):
            return record_operation(function, args, kwargs)
        return function(*args, **kwargs)

    @staticmethod
    def _moved(name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Returns a copy, as a move to or from a GPU is; the tensor itself where it shall be in emulated memory, and is there."""
        tensor, *more = args
        places = [
            item for item in (*more, kwargs.get("device")) if isinstance(item, torch.device | str | int) and not isinstance(item, bool)
        ]
        to_gpu = name == "cuda" or (name == "to" and any(map(_is_own_gpu, places)))
        if name == "pin_memory":
            return tensor
        if name == "to" and not places:
            return record_operation(function, args, kwargs) if capturing() else function(*args, **kwargs)
        kinds = [item for item in (*more, kwargs.get("dtype")) if isinstance(item, torch.dtype)]
        copy = kwargs.get("copy", False) or not to_gpu or _own().team.world.space.part_of(tensor) is None
        moved = functools.partial(torch.Tensor.to, tensor, "cpu", *kinds, copy=copy)
        return record_operation(moved, (), {}) if capturing() else moved()


class Generator(torch.Generator):
    """Stands for ``torch.Generator``, of any device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class Stream:
    """Stands for ``cuda.core.Stream`` and ``torch.cuda.Stream``."""

    cuda_stream = handle = stream_id = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    @classmethod
    def from_handle(cls, handle: int) -> Stream:
        return cls()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return

    def nothing(self, *_: Any, **__: Any) -> None:
        """All work of a rank is in order, and over when the host goes on."""

    sync = synchronize = wait = wait_stream = wait_event = close = nothing

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """Stands for ``torch.cuda.Event`` without times."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def nothing(self, *_: Any, **__: Any) -> None:
        """All work of a rank is in order."""

    record = wait = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        raise UsageError(f"Event.elapsed_time {NOT_EMULATED}, which measure no times: time on a GPU")


def _properties(device: Any = None) -> SimpleNamespace:
    """Returns what emulated ranks go by. Other properties are missing."""
    world = _own().team.world
    major, minor = _capability()
    return SimpleNamespace(
        name=_name(),
        major=major,
        minor=minor,
        multi_processor_count=world.sm_count,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=SHARED_LIMIT_BYTES,
        shared_memory_per_multiprocessor=SHARED_LIMIT_BYTES + 1024,
    )


def _name(device: Any = None) -> str:
    return f"emulated NVIDIA {_own().team.world.gpu.name.upper()}"


def _capability(device: Any = None) -> tuple[int, int]:
    number = int(_own().team.world.gpu.arch.removeprefix("sm_").rstrip("a"))
    return number // 10, number % 10


def _set_device(device: Any) -> None:
    _is_own_gpu(device)


def _nothing(*_: Any, **__: Any) -> None:
    return


def _for_candidates(name: str, answer: Any) -> Any:
    """Returns torch.cuda's function of this name, which gives ``answer()`` to host code of emulated ranks."""
    original = getattr(torch.cuda, name)
    return lambda *args, **kwargs: answer() if runs_candidate() and not _asked_by_own_code() else original(*args, **kwargs)


TORCH_CUDA: dict[str, Any] = {
    "is_available": _for_candidates("is_available", lambda: True),
    "device_count": _for_candidates("device_count", lambda: _own().team.world.size),
    "is_initialized": _for_candidates("is_initialized", lambda: True),
    "is_bf16_supported": lambda including_emulation=True: True,
    "can_device_access_peer": lambda device, peer: True,
    "current_device": lambda: _own().member,
    "set_device": _set_device,
    "device": lambda device: contextlib.nullcontext(_is_own_gpu(device)),
    "get_device_properties": _properties,
    "get_device_capability": _capability,
    "get_device_name": _name,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "stream": lambda stream: stream or Stream(),
    "set_stream": _nothing,
    "Stream": Stream,
    "ExternalStream": Stream,
    "Event": Event,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "init": _nothing,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "graph_pool_handle": lambda: (0, 0),
    "is_current_stream_capturing": capturing,
}


def _set_default_device(device: Any) -> None:
    if device is not None and not _is_own_gpu(device):
        raise UsageError(f"torch.set_default_device got {device!r}; emulated ranks have the default device 'cuda' alone")


def _data_ptr(original: Any) -> Any:
    def data_ptr(tensor: torch.Tensor) -> int:
        group = current_group()
        if runs_candidate() and isinstance(group, EmulatedRank) and not _asked_by_own_code():
            return group.address(tensor)
        return int(original(tensor))

    return data_ptr


def torch_stand_ins() -> list[tuple[Any, dict[str, Any]]]:
    """Returns modules and classes of torch with what stands for their members on emulated ranks."""
    members = {"Generator": Generator, "set_default_device": _set_default_device}
    of_tensors = {"data_ptr": _data_ptr(torch.Tensor.data_ptr), "record_stream": _nothing}
    return [(torch.cuda, TORCH_CUDA), (torch, members), (torch.Tensor, of_tensors)]
