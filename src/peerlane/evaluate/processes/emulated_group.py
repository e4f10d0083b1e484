"""Emulated ranks as the supervisor sees them: a rank group all of whose ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peerlane.evaluate.processes.protocol import Message
from peerlane.evaluate.processes.rank_group import GroupFailure, RankGroup


class EmulatedRankGroup(RankGroup):
    """Takes one request for each rank, or one for all, as other groups do. The process gets those of all ranks in one message."""

    emulated_ranks = 0
    """how many ranks the process has; set when it is started"""

    def begin(self, requests: Message | Sequence[Message], phase: str, deadline_s: float) -> None:
        if not isinstance(requests, dict):
            requests = {**requests[0], "ranks": [dict(request) for request in requests]}
        super().begin(requests, phase, deadline_s)

    def finish(self) -> list[Message]:
        try:
            answers = super().finish()
        except GroupFailure as failure:
            if failure.kind == "hang":
                failure.ranks = tuple(range(self.emulated_ranks))
            raise
        each = answers[0].get("ranks", [answers[0]] * self.emulated_ranks)
        if not isinstance(each, list) or len(each) != self.emulated_ranks or not all(isinstance(item, dict) for item in each):
            raise GroupFailure("garbage", "correctness", "an answer without a part for every rank", rank=0)
        return each

    def _rank_of(self, process: int, report: dict[str, Any]) -> int:
        rank = report.get("rank")
        return rank if isinstance(rank, int) and 0 <= rank < self.emulated_ranks else 0
