"""Whole solutions on emulated ranks: right ones are right and clean, and a bug in host or device code is found."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from device.judged import cases, judge, judge_case, require_correct
from device.runs import run_calls
from device.twins import write_solution
from peerlane import problems, solutions
from peerlane.device import U32, Buffer, DeclaredKernel, Epochs, Flags, Pointer, communicator, group_of
from peerlane.results.verdict import WrongResult

EXAMPLES = Path(__file__).parents[2] / "examples" / "cuda"
FILES = {**solutions.files(), "1_allreduce": EXAMPLES / "1_allreduce_cuda.py", "13_gemm_allreduce": EXAMPLES / "13_gemm_allreduce_cuda.py"}
QUICK = (1, 8, 16, "1_allreduce")
LONG = (39, 54, 55, 56)
"""Solutions with attention, which take seconds a case: two of them, and more in tests of their own."""


def number_of(path: Path) -> int:
    match = re.match(r"p?(\d+)_", path.name)
    assert match
    return int(match[1])


@pytest.mark.parametrize("name", QUICK)
def test_a_solution_is_right_and_clean(name: int | str) -> None:
    number = number_of(FILES[name])
    require_correct(judge(FILES[name], number, cases(problems.get(number), 2)[0]))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", FILES)
def test_a_solution_is_right_in_every_small_case(name: int | str, world_size: int) -> None:
    number = number_of(FILES[name])
    tried = cases(problems.get(number), world_size)
    for case in tried if number not in LONG else tried[: 2 if world_size == 2 else 0]:
        require_correct(judge(FILES[name], number, case))


def test_a_bug_in_host_code_is_a_wrong_result(tmp_path: Path) -> None:
    path = write_solution(tmp_path, 2, "all_gather(tensor)", "all_gather(tensor).flip(0)")
    judged = judge(path, 2, cases(problems.get(2), 2)[0])
    assert judged.outcome.failure is None and isinstance(judged.wrong, WrongResult) and judged.wrong.wrong_ranks == (0, 1)
    assert re.search(r"^wrong result: gathered is wrong on rank 0 .*at \[.*\]: got .*, expected ", str(judged))


def test_results_that_do_not_last_are_said_to(tmp_path: Path) -> None:
    path = write_solution(tmp_path, 43, "The next call overwrites the results, which lie in the arena.", "")
    judged = judge_case(43, "fp32", schedules=1, file=path)
    assert judged.correct and judged.outcome.aliased
    with pytest.raises(AssertionError, match="memory that its next call overwrites, and does not say so"):
        require_correct(judged)


def test_an_argument_that_a_call_changes_is_told(tmp_path: Path) -> None:
    path = write_solution(
        tmp_path,
        2,
        "return communicator().all_gather(tensor)",
        "out = communicator().all_gather(tensor)\n    tensor.zero_()\n    return out",
    )
    judged = judge(path, 2, cases(problems.get(2), 2)[0])
    assert "argument `tensor` was changed, which the problem does not allow (rank 0" in str(judged)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "    received = torch",
            "    if communicator().member.rank == 1:\n        return tensor\n    received = torch",
            "rank 0: a launch of exchange_packets for .*; rank 1: the end of call 0",
        ),
        (
            "communicator().all_to_all",
            "communicator().arena.group.exchange(0) if communicator().member.rank else 0\n    communicator().all_to_all",
            "rank 0: a launch of exchange_packets for .*; rank 1: an exchange",
        ),
    ],
    ids=["returns_early", "exchanges_alone"],
)
def test_ranks_that_do_different_things_are_told(tmp_path: Path, old: str, new: str, says: str) -> None:
    judged = judge_case(8, "block_bf16", file=write_solution(tmp_path, 8, old, new))
    assert judged.outcome.failure is not None and re.search(says, str(judged.outcome.failure[1]))


def test_a_rank_that_another_group_s_ranks_wait_for_is_told() -> None:
    def stop() -> None:
        if group_of().rank == 0:
            raise SystemExit
        group_of().exchange(1)

    assert isinstance(run_calls(lambda rank: stop, [[(), ()]]).failure, SystemExit)


def test_ranks_whose_tensors_differ_in_shape_are_told() -> None:
    failure = run_calls(lambda rank: lambda x: communicator().all_reduce(x), [[(torch.ones(4),), (torch.ones(6),)]]).failure
    assert re.search(r"rank 0: .* for all_reduce of 16 bytes, torch.float32.*; rank 1: .* for all_reduce of 24 bytes", str(failure))


BLOCKS = """
#include <peerlane/comm.cuh>
using namespace peerlane;

extern "C" __global__ void blocks_meet(const __grid_constant__ Arena arena, const __grid_constant__ BlocksMeet args) {
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    peers.signal_all(blockIdx.x, epoch);
    for (int rank = 0; rank < WORLD_SIZE; ++rank)
        if (rank != arena.rank) peers.wait(rank, blockIdx.x, epoch);
}
"""
MEET = DeclaredKernel("blocks_meet", BLOCKS, epochs=Epochs(), flags=Flags(), unused=U32)


@pytest.mark.parametrize("grid", [32, 97])
def test_a_grid_that_two_sms_do_not_hold_is_a_deadlock(grid: int) -> None:
    """Two SMs hold 32 blocks of 128 threads. The others start later, in any order, and their twins may wait for them."""
    run = run_calls(lambda rank: MEET.bind(group_of(), grid=grid, block=128, sizes={"flags": grid}, unused=0), [[(), ()]], schedules=4)
    if grid == 32:
        run.clean()
    else:
        said = f"{run.failure} {run.findings}"
        assert "deadlock" in said and "have not started: only 32 are resident" in said


WRITTEN_BY_HOSTS = """
#include <peerlane/comm.cuh>
using namespace peerlane;

extern "C" __global__ void read_next(const __grid_constant__ Arena arena, const __grid_constant__ ReadNext args) {
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    peers.barrier(0, 2 * epoch);
    args.out[threadIdx.x] = reinterpret_cast<const float*>(arena.peer((arena.rank + 1) % WORLD_SIZE, args.words))[threadIdx.x];
    BEHIND
}
"""


@pytest.mark.parametrize("behind", ["peers.barrier(0, 2 * epoch + 1);", ""])
def test_what_hosts_write_into_an_arena_takes_part_in_races(behind: str) -> None:
    source = WRITTEN_BY_HOSTS.replace("BEHIND", behind)
    kernel = DeclaredKernel("read_next", source, epochs=Epochs(), flags=Flags(), words=Buffer(), out=Pointer("float*"))

    def make(rank: int) -> Callable[..., torch.Tensor]:
        launch = kernel.bind(group_of(), grid=1, block=32, sizes={"flags": 1, "words": 128})

        def call(tensor: torch.Tensor) -> torch.Tensor:
            out = torch.empty(32)
            launch.tensor("words", (32,), torch.float32).copy_(tensor)
            launch(out=out)
            return out

        return call

    run = run_calls(make, [[(torch.full((32,), 2.0 * call + rank),) for rank in range(2)] for call in range(3)], schedules=4)
    assert run.failure is None and [[float(out[0]) for out in outs] for outs in run.outputs] == [[1, 0], [3, 2], [5, 4]]
    assert run.kinds == (set() if behind else {"race", "wrong_result"})
    assert behind or "copy_ of host code: test_emulated_ranks.py:" in str(run.findings[0])
