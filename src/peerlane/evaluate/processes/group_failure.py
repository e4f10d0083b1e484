"""The failure of a rank group, and which of several is the cause."""

from collections.abc import Sequence

_EXPIRED = ") waited for rank "


class GroupFailure(Exception):
    """A rank group did not do what it was asked. The group must be killed.

    Attributes:
        kind: ``hang`` (the candidate's code did not return), ``no_answer`` (the evaluator's own code in the rank did not), ``exit``,
            ``garbage``, ``machine`` (no rank is to blame), or the kind a rank reported (``runtime_error``, ``cuda_error``, ...).
        phase: what was being done.
        rank: the first rank that failed, if one can be named.
        ranks: for ``hang`` and ``no_answer``, the ranks that had not answered.
        message: the rank's traceback or a sentence.
        deadline_s: for ``hang`` and ``no_answer``, how long was waited.
        stuck: for ``hang``, True if the ranks made no progress meanwhile: a longer wait would change nothing.
    """

    def __init__(
        self,
        kind: str,
        phase: str,
        message: str,
        *,
        rank: int | None = None,
        ranks: Sequence[int] = (),
        deadline_s: float = 0.0,
        stuck: bool = False,
    ) -> None:
        super().__init__(f"{kind} in {phase}: {message}")
        self.kind, self.phase, self.message = kind, phase, message
        self.rank, self.ranks, self.deadline_s, self.stuck = rank, tuple(ranks), deadline_s, stuck


def root_cause(first: GroupFailure | None, second: GroupFailure) -> GroupFailure:
    """Returns the root cause of two failures, in the order of their arrival: a rank raises when another that it waits for has ended."""
    if first is None or (first.kind == "runtime_error" and second.kind == "exit"):
        return second
    if first.kind == second.kind == "cuda_error" and _EXPIRED not in first.message and _EXPIRED in second.message:
        return second  # where ranks share a GPU, all lose it with one; that one's kernel says what it waited for
    return first
