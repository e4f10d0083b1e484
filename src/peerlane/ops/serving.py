"""The kit in the place of an inference engine's own custom all-reduce: docs/serving.md switches it on in vLLM and in SGLang.

The engines make one communicator for a tensor-parallel group, ask it for each tensor whether it serves that, and capture it in graphs.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device import communicator
from peerlane.device.collectives.communicator import Communicator
from peerlane.device.collectives.reductions import refusal
from peerlane.device.host.group import current_group
from peerlane.errors import UsageError
from peerlane.ops.groups import existing, group_name, joined_or_reason

_log = logging.getLogger(__name__)


class CustomAllReduce:
    """The interface of a custom all-reduce of vLLM and SGLang, on the kit: out of place, of any dense tensor, with no buffer registered.

    Creating one is collective. ``disabled`` and ``reason`` say whether and why the engine has to use another way; both are the same on all
    ranks. ``max_size``: bytes above which it declines; None for no limit. Further options of the engines are accepted and have no effect.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | int | str, max_size: int | None = None, **_ignored: Any
    ) -> None:
        self.group, self.max_size = group, max_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        emulated = current_group()
        kit, self.reason = (emulated, "") if emulated is not None else self._join(group)
        if kit is not None and kit.world_size == 1:
            kit = None
        self.reason = self.reason or ("" if kit is not None else "the group has one rank")
        self.disabled = kit is None
        self._kit: Communicator | None = None if kit is None else communicator(kit)
        if self._kit is not None:
            self.rank, self.world_size = self._kit.member.rank, self._kit.member.world_size
            self.device = self._kit.arena.device
        else:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            _log.warning("peerlane's all-reduce is disabled: %s", self.reason)

    def _join(self, group: dist.ProcessGroup | None) -> tuple[Any, str]:
        """Collective: returns the kit's group of these ranks, or None and a reason, alike on all ranks."""
        if self.device.type != "cuda":
            return None, f"the device is {self.device}; the kit serves CUDA devices"
        with torch.cuda.device(self.device) if torch.cuda.is_available() else contextlib.nullcontext():
            return joined_or_reason(existing(group_name(group)))

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Tells whether ``custom_all_reduce`` serves a tensor: by its size, dtype, layout and device, which are the same on all ranks."""
        if self.disabled or inp.device != self.device or inp.layout is not torch.strided or not inp.numel():
            return False
        return not refusal("sum", inp.dtype) and (self.max_size is None or inp.nbytes <= self.max_size)

    def all_reduce(self, inp: torch.Tensor, *, out: torch.Tensor | None = None, registered: bool = False) -> torch.Tensor:
        """Returns the sum of all ranks' ``inp``, in ``out`` if that is given. ``registered`` has no effect: nothing needs to be."""
        if self._kit is None:
            raise UsageError(
                f"a custom all-reduce that is disabled was called: {self.reason}; expected should_custom_ar to be asked before"
            )
        inp = inp.contiguous()
        out = torch.empty_like(inp) if out is None else out
        self._kit.all_reduce(inp, out)
        return out

    def custom_all_reduce(self, input: torch.Tensor, *_ignored: Any, **_options: Any) -> torch.Tensor | None:
        """Returns the sum of all ranks' ``input``; None where ``should_custom_ar`` says no."""
        return self.all_reduce(input) if self.should_custom_ar(input) else None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Does nothing: calls inside a captured graph need no registration. Each shape runs once before, which engines do to warm up."""
        yield

    def register_graph_buffers(self) -> None:
        """Does nothing: there are none."""

    def finalize_p2p(self) -> None:
        """Does nothing: the ranks have shown each other their memory when the communicator was made."""

    def close(self) -> None:
        """Stops serving. The memory belongs to the group, whose operators may go on; ``ops.close`` gives it back."""
        self.disabled, self._kit, self.reason = True, None, "it was closed"
