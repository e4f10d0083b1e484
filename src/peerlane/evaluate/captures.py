"""CUDA graphs, captured one behind the other.

Functions used while candidate code is present are bound at import, which happens before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_Graph, _Stream = torch.cuda.CUDAGraph, torch.cuda.Stream
_begin, _end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
_register = getattr(torch.cuda.CUDAGraph, "register_generator_state", lambda *_: None)  # later versions of torch do it themselves
_pool = torch.cuda.graph_pool_handle
_current_stream, _set_stream = torch.cuda.current_stream, torch.cuda.set_stream
_synchronize, _empty_cache = torch.cuda.synchronize, torch.cuda.empty_cache


class Captures:
    """Captures calls into graphs that share memory, on a stream of their own, entered as a context.

    ``torch.cuda.graph`` does so too, but waits for the device and gives memory back to it for every graph, which takes as long as capturing
    a small call; and it stays on its own stream when a broken capture cannot be ended.
    """

    def __enter__(self) -> Captures:
        self._before = _current_stream()
        _synchronize()
        _empty_cache()  # a graph takes memory of its own, not what is kept for later
        self._memory = _pool()
        _set_stream(_Stream())  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        _set_stream(self._before)
        _synchronize()

    @contextlib.contextmanager
    def graph(self, *generators: torch.Generator) -> Iterator[torch.cuda.CUDAGraph]:
        """Captures what is enqueued in here. Of random numbers, those from ``generators`` are drawn anew in every replay.

        Raises what the capture raises, RuntimeError if something in here cannot be captured.
        """
        graph = _Graph()
        for generator in generators:
            _register(graph, generator)
        _begin(graph, pool=self._memory, capture_error_mode="thread_local")  # NCCL's threads go on meanwhile
        try:
            yield graph
        finally:
            _end(graph)
