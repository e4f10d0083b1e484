"""Calls of a group as profilers see them. PyTorch records none of a group that is written in Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from peerlane.device.backend.ordering import FinishedWork

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def spanned(operation: str, inputs: Sequence[torch.Tensor], start: Callable[[], Work], *, captured: bool) -> Work:
    """Returns ``start()``. A profiler sees ``peerlane:OPERATION``, from here to the end of the work, with the shapes of ``inputs``.

    Another thread closes the span. So the profiler knows it as asynchronous, and the caller does not wait for the device."""
    span = torch._C._profiler._RecordFunctionFast(f"peerlane:{operation}", list(inputs))
    span.__enter__()
    try:
        work = start()
    except BaseException:
        span.__exit__(None, None, None)
        raise
    closed = _closer().submit(_close, span, None if captured else work)
    if isinstance(work, FinishedWork):
        work.span = closed
    if captured or work.is_completed():
        closed.result()
    return work


@cache
def _closer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "peerlane-spans")


def _close(span: Any, work: Work | None) -> None:
    with contextlib.suppress(Exception):  # whoever waits for the work is told
        if work is not None:
            getattr(work, "finish", work.wait)()
    span.__exit__(None, None, None)
