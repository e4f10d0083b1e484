"""Shards of several tiles on emulated ranks, which the cases of problem 85 are too small for: sorted and merged, broken twins refused."""

import pytest
import torch

from device.runs import run_call, run_calls
from device.twins import use_twin
from peerlane.solutions import p085_distributed_sample_sort as sort


def faults(world_size: int, dtype: torch.dtype) -> set[str]:
    """The kinds of the emulator's findings in two calls, and ``wrong_result`` if they do not return everybody's keys in order."""
    generator, calls = torch.Generator().manual_seed(85), []
    for _ in range(2):
        shards = [torch.randn(4300 + 7 * rank, generator=generator, dtype=torch.float64).to(dtype) for rank in range(world_size)]
        calls.append([(shard,) for shard in shards])
    run = run_calls(lambda rank: sort.solution, calls, schedules=2)
    wanted = [torch.cat([shard for (shard,) in shards]).sort().values for shards in calls]
    return run.faults(all(torch.equal(torch.cat(parts), keys) for parts, keys in zip(run.outputs, wanted, strict=False)))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.float64), (4, torch.bfloat16)])
def test_shards_of_several_tiles_are_sorted(world_size: int, dtype: torch.dtype) -> None:
    assert not faults(world_size, dtype)


@pytest.mark.slow
def test_the_merge_of_unsorted_shards_stays_within_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort whose wait has ended early leaves such shards."""

    def copy_shard(sorter: sort.Sorter, shard: torch.Tensor) -> None:
        sorter.merge.tensor("sorted", shard.shape, torch.int32).copy_(shard.view(torch.int32))

    monkeypatch.setattr(sort.Sorter, "sort_shard", copy_shard)
    generator = torch.Generator().manual_seed(85)
    # Bits of a NaN are the key behind all keys, which ends runs.
    shards = [torch.randint(-1, 9, (40000,), generator=generator, dtype=torch.int32).view(torch.float32) for _ in range(3)]
    run_call(sort.solution, [(shard,) for shard in shards])


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
    use_twin(monkeypatch, sort, kernel, old, new)
    assert faults(2, torch.float32)
