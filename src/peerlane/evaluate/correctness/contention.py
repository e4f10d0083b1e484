"""A GPU that a second process keeps busy: what runs there is stopped in the middle.

Processes take turns on a GPU. When the time slice of one ends, its kernels stop wherever they are, and go on with its next slice,
milliseconds later. So beside a trusted rank that keeps the GPU busy a candidate's rank falls behind inside of its kernels, where no wait
before a call could hold it up.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

_device_sleep, _event = torch.cuda._sleep, torch.cuda.Event
_clock = time.monotonic
_PIECE_CYCLES = 1_300_000  # 0.7 ms on an SM
_PIECES_AHEAD = 4  # the GPU need not wait for the host, and has nothing left to do a few milliseconds after the end


def keep_busy(seconds: float) -> None:
    """Enqueues short kernels on the current device for so long, and returns when the last of them has ended. With 0 it does nothing."""
    end = _clock() + seconds
    ahead: deque[Any] = deque()
    while _clock() < end:
        _device_sleep(_PIECE_CYCLES)  # type: ignore[no-untyped-call]
        piece = _event(blocking=True)  # type: ignore[no-untyped-call]  # the host's core is left to the candidate
        piece.record()
        ahead.append(piece)
        if len(ahead) == _PIECES_AHEAD:
            ahead.popleft().synchronize()
    for piece in ahead:
        piece.synchronize()
