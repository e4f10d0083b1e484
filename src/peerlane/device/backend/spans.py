"""Calls of a group as profilers see them. PyTorch records none of a group that is written in Python."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch._C._distributed_c10d import Work

from peerlane.device.backend.ordering import FinishedWork

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def spanned(operation: str, inputs: Sequence[torch.Tensor], start: Callable[[], Work], *, captured: bool) -> Work:
    """Returns ``start()``. A profiler sees two spans, as with NCCL: ``peerlane::launch_OPERATION`` in this thread, with the shapes of
    ``inputs``, and the asynchronous ``peerlane:OPERATION``, from here to the end of the work."""
    span, ended = torch.ops.profiler._record_function_enter_new(f"peerlane:{operation}", None), torch.futures.Future[None]()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(span, ended)
    try:
        with torch._C._profiler._RecordFunctionFast(f"peerlane::launch_{operation}", list(inputs)):
            work = start()
    except BaseException:
        ended.set_result(None)
        raise
    closed = _closer().submit(_close, ended, None if captured else work)
    if isinstance(work, FinishedWork):
        work.span = closed
    if captured or work.is_completed():
        closed.result()
    return work


@cache
def _closer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "peerlane-spans")


os.register_at_fork(after_in_child=_closer.cache_clear)  # a forked process does not have the thread


def _close(ended: torch.futures.Future[None], work: Work | None) -> None:
    with contextlib.suppress(Exception):  # whoever waits for the work is told
        if work is not None:
            getattr(work, "finish", work.wait)()
    ended.set_result(None)
