"""A stream beside the caller's, for exchanges that run while the caller's stream computes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from peerlane.device.host.group import Group, per_group


class Side:
    """A stream of high priority; on a CPU there is one order alone."""

    def __init__(self, cuda: bool) -> None:
        self.stream = torch.cuda.Stream(priority=-1) if cuda else None  # type: ignore[no-untyped-call, unused-ignore]

    def __call__(self) -> AbstractContextManager[object]:
        """Makes it the current stream for a while."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def follow(self) -> None:
        """Makes it wait for what the caller's current stream has so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def behind(self) -> Callable[[], None]:
        """Returns what makes the caller's current stream wait for what this one has so far."""
        return (lambda: None) if self.stream is None else self.stream.record_event().wait


@per_group
def side_stream(group: Group, cuda: bool) -> Side:
    return Side(cuda)
