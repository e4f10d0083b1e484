"""Shards of several tiles on emulated ranks, which the cases of problem 85 are too small for: sorted and merged, broken twins refused."""

import pytest
import torch

from device.twins import twin
from peerlane.emulator.ranks import EmulatedRanks, RankFailure
from peerlane.emulator.sequence import findings
from peerlane.solutions import p085_distributed_sample_sort as sort


def sorts(world_size: int, dtype: torch.dtype) -> bool:
    """Whether two calls return everybody's keys in order, with no finding of the emulator."""
    ranks, generator = EmulatedRanks(world_size, schedules=2), torch.Generator().manual_seed(85)
    try:
        ranks.load(lambda rank: sort.solution)
        for _ in range(2):
            shards = [torch.randn(4300 + 7 * rank, generator=generator, dtype=torch.float64).to(dtype) for rank in range(world_size)]
            parts = ranks.call([(shard.clone(),) for shard in shards], lambda rank, part: part.clone())
            if not torch.equal(torch.cat(parts), torch.cat(shards).sort().values):
                return False
    except RankFailure:
        return False
    return not findings(ranks.reports())


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.float64), (4, torch.bfloat16)])
def test_shards_of_several_tiles_are_sorted(world_size: int, dtype: torch.dtype) -> None:
    assert sorts(world_size, dtype)


@pytest.mark.slow
def test_the_merge_of_unsorted_shards_stays_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort whose wait has ended early leaves such shards."""

    def copy_shard(sorter: sort.Sorter, shard: torch.Tensor) -> None:
        sorter.merge.tensor("sorted", shard.shape, torch.int32).copy_(shard.view(torch.int32))

    monkeypatch.setattr(sort.Sorter, "sort_shard", copy_shard)
    ranks, generator = EmulatedRanks(3, schedules=1), torch.Generator().manual_seed(85)
    ranks.load(lambda rank: sort.solution)
    # Bits of a NaN are the key behind all keys, which ends runs.
    shards = [torch.randint(-1, 9, (40000,), generator=generator, dtype=torch.int32).view(torch.float32) for _ in range(3)]
    ranks.call([(shard,) for shard in shards], lambda rank, part: part.clone())
    assert not findings(ranks.reports())


TWINS = {
    "the first tile tells its own keys alone": ("SORT_DIGIT", "if (tile > 0) ptx::store", "ptx::store"),
    "only one tile is looked back at": ("SORT_DIGIT", "tile = state[k] & of_all ? 0 : tile - 1;", "tile = 0;"),
    "equal keys in no order": ("SORT_DIGIT", "u16>(found + lower);", "u16>(found + __popc(same) - 1 - lower);"),
    "a tile is written before all have read it": ("MERGE_SHARDS", "__syncthreads();  // all have read", ""),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_of_the_sort_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new = TWINS[name]
    monkeypatch.setattr(sort, kernel, twin(getattr(sort, kernel), old, new))
    assert not sorts(2, torch.float32)
