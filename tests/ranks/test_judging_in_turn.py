"""Ranks that share a GPU judge large answers in turns: each sees the inputs of all, and one at a time holds them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate.ranks.case_state import Snapshot
from peerlane.evaluate.ranks.trusted import TrustedRank
from ranks.pool import RankPool

WIDTH = 512


class Judging(TrustedRank):
    """A rank that takes what it is given for the score, and marks its turn in a folder."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        super().__init__({"world_size": world_size, "device": "cpu"}, rank, -1)
        self.folder, self.alone = folder, True
        self._store = dist.FileStore(str(folder / "meetings"), world_size)  # type: ignore[attr-defined]

    def _arguments_of_all(self, current: Any, snapshot: Snapshot, gathered: list[torch.Tensor]) -> Any:
        return gathered

    def _judge(self, current: Any, snapshot: Snapshot, inputs: Any) -> Any:
        mark = self.folder / f"turn of {self.rank}"
        mark.touch()
        self.alone = len([*self.folder.glob("turn of *")]) == 1
        sizes = [int(item.sum()) for item in inputs]
        mark.unlink()
        return sizes


def judged(rank: int, world_size: int, folder: str, judge: int | None = None) -> tuple[Any, bool, int]:
    """What a rank got of all ranks, whether no other had its turn meanwhile, and how many answers it kept."""
    me = Judging(rank, world_size, Path(folder))
    inputs = torch.full((100 + rank,), rank + 1, dtype=torch.uint8)
    padded = torch.zeros(WIDTH, dtype=torch.uint8)
    padded[: inputs.numel()] = inputs
    snapshot = Snapshot(0, 0, "random", {}, [torch.ones(1)], padded)
    current = SimpleNamespace(
        problem=SimpleNamespace(replicated=("sums",), is_replicated=("sums").__eq__), case=SimpleNamespace(key="case")
    )
    me._output_names["case"] = ["sums"]
    return me._judge_in_turn(current, snapshot, WIDTH, judge), me.alone, len(snapshot.tensors)  # type: ignore[arg-type]


def test_every_rank_sees_the_inputs_of_all_in_its_turn(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected = [(100 + rank) * (rank + 1) for rank in range(4)]
    assert rank_pool(4).run(judged, str(tmp_path)) == [(expected, True, 0)] * 4


def test_the_only_judge_sees_the_inputs_of_all_and_the_others_keep_their_checksums(
    rank_pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    scores, _, kept = zip(*rank_pool(4).run(judged, str(tmp_path), 2), strict=True)
    others = [score.digests for rank, score in enumerate(scores) if rank != 2]
    assert scores[2] == [(100 + rank) * (rank + 1) for rank in range(4)] and kept == (0,) * 4
    assert [name for name, _ in others[0]] == ["sums"] and others.count(others[0]) == 3
