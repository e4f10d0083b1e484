"""Solutions on emulated ranks: right as they are, and refused with one thing broken."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from device.judged import judge_case, require_correct
from device.runs import run_call
from device.twins import use_twin, write_solution
from peerlane.device import group_of
from peerlane.device.collectives import counts
from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.jit import Cubin, compile_cubin
from peerlane.emulator import sequence
from peerlane.emulator.build import Program
from peerlane.solutions.families import clipping, convolution, delta_rule, fourier, fp8_history, gated_convolution, nucleus, training_step

QUICK = {23: "idle_bf16", 43: "bf16", 73: "special_fp32"}
"""One case of solutions whose kernels are small."""
TWINS = [
    (9, "ragged_bf16", "if (!last_block(", "if (blockIdx.x % groups != groups - 1 || !last_block("),
    (10, "uniform_bf16", "    peers.barrier(2 * gridDim.x + blockIdx.x, epoch);", "    __syncthreads();"),
    (17, "grouped_bf16", "peers.wait_all(0, epoch);", ""),
    (19, "ragged_bf16", "peers.barrier(1 + blockIdx.x, epoch);", ""),
    (20, "fp8", "buffer = (epoch & 1) * WORLD_SIZE", "buffer = 0"),
    (21, "ragged", "args.sums, epoch,", "args.sums, 2,"),
    (22, "grid", "args.expert_weight[q] * of_rank[q].expert", "of_rank[q].expert * (q == arena.rank)"),
    (23, "ragged_fp32", "sums.push(0, loss * tokens)", "sums.push(0, loss)"),
    (24, "plain_fp32", "loss = exchange.pull(0, loss, [](float a, float b) { return a + b; });", ""),
    (25, "silent_rank_fp32", "part = block_reduce(part, join, scratch);", ""),
    (26, "skewed_int64", "counts.receive_from(source,", "counts.receive_from(arena.rank,"),
    (30, "odd_bf16", "kit.all_reduce(packed)", "packed.mul_(2)"),
    (32, "rank_one_bf16", "multiply(gemm.aligned(b), gemm.aligned(a), residual=weight)", "weight"),
    (48, "saturated_bf16", "args.rows + at) * 2 + up) * bytes", "args.rows + at) * 2 + !up) * bytes"),
    (58, "fp32", "column + e == args.first + row", "column + e == row"),
    (61, "two_cameras", "    meet_ranks(peers, arena, gridDim.x, epoch);", "    __syncthreads();"),
    (62, "all_polar", "q * args.share[0] + row", "row"),
    (63, "uneven", "meet_blocks(peers, arena, 0, epoch);", "__syncthreads();"),
    (33, "same_axis_bf16", "cut=scatter).reshape", "cut=scatter).flip(scatter + 1).reshape"),
    (34, "ragged_bf16", "all_gather(x)", "all_gather(x * (communicator(group).member.rank > 0))"),
    (35, "one_empty_bf16", "Peers<WORLD_SIZE>(arena, args.flags).barrier(0, epoch);", ""),
    (40, "bf16", "EXCHANGES && q != arena.rank", "EXCHANGES && q == arena.rank"),
    (41, "bf16", "peers.barrier(blockIdx.x, 2 * epoch);", "peers.signal_all(blockIdx.x, 2 * epoch);"),
    (42, "bf16", "if (GATHER) peers.barrier(blockIdx.x, 2 * epoch + 1);", ""),
    (43, "fp32", "peers.wait_all(0, epoch);", ""),
    (44, "ragged_fp32", "peers.barrier(blockIdx.x, 2 * epoch);", "__syncthreads();"),
    (45, "ragged_bf16", "for (int k = 1; k < WORLD_SIZE; ++k)", "for (int k = 1; k < WORLD_SIZE - 1; ++k)"),
    (46, "tokens_bf16", "if (k < WORLD_SIZE)", "if (k < WORLD_SIZE - 1)"),
    (47, "bf16", "g[e] /= WORLD_SIZE;", ""),
    (52, "history_4_bf16", "barrier(blockIdx.x, epoch)", "signal_all(blockIdx.x, epoch)"),
    (53, "history_4_bf16", "of_source = scale_of(q)", "of_source = scale"),
    (82, "both_bf16", "args.target[token] / args.columns", "args.target[token] % WORLD_SIZE"),
    (83, "partial_chunk_bf16", "(blockIdx.x * TEAMS + number) * round_packets", "number * round_packets"),
    (84, "top_k_bf16", "arena.rank) * args.columns", "arena.rank) * (args.columns - 1)"),
    (59, "plain", "(POINTS - point) % POINTS", "point"),
    (60, "plain", "p > 0 && 2 * p", "2 * p"),
    (64, "two_hops", "    meet_blocks(peers, arena, 6 * gridDim.x, number);", "    __syncthreads();"),
    (65, "uneven_bf16", "for counts in (counts_received, counts_sent)", "for counts in (counts_sent, counts_received)"),
    (66, "uneven", "parts(counts, ranks.rank)", "parts(counts, 0)"),
    (67, "uneven_bf16", "pairs_before(arena.rank, threadIdx.x)", "0"),
    (70, "unequal_batches", "peers.barrier(blockIdx.x, epoch);", "peers.signal_all(blockIdx.x, epoch);"),
    (71, "four_taps_bf16", "edge && after >= 0", "edge && after > 1"),
    (81, "single_bf16", "peers.signal(arena.rank, blockIdx.x, epoch);", "peers.signal(arena.rank, 0, epoch);"),
    (72, "short_bf16", "2 * WORLD_SIZE - 1 - rank", "WORLD_SIZE + rank"),
    (68, "uneven_bf16", "id < end ?", "id <= end ?"),
    (69, "ragged_bf16", "peers.barrier(blockIdx.x, epoch);", ""),
    (76, "plain_bf16", "communicator(group).all_reduce(result)", "pass"),
    (
        78,
        "two_tiles_bf16",
        "char* const to = arena.peer(rank_after<WORLD_SIZE>(arena.rank, k), plane_of(arena.rank, plane));",
        "char* const to = arena.local(plane_of(arena.rank, plane));",
    ),
    (79, "clustered_bf16", "barrier(blockIdx.x, epoch)", "signal_all(blockIdx.x, epoch)"),
    (80, "ragged_fp32", "            kit.all_reduce(v)\n", ""),
    (87, "three_bf16", "(0, side), (0, side)", "(side, side), (0, side)"),
    (85, "uneven_fp32", "args.first + min((begin", "min((begin"),
    (74, "plain_fp32", "if (epoch > first_epoch) peers.wait(rank + 1, items + item, epoch - 1);", ""),
    (75, "four_value_heads_fp32", "+ (epoch & 1) * WORLD_SIZE * args.parameter_bytes", ""),
    (86, "quintic_fp32", "kit.all_reduce(gram)", "step or kit.all_reduce(gram)"),
    (86, "quintic_bf16", "kit.all_reduce(norm)", "norm.mul_(ranks.world_size)"),
    (77, "padded_own_bf16", "keys[:, :, first:end]", "keys[:, :, : end - first]"),
    (73, "scaled_fp32", "target / args.columns == q", "target / args.columns == arena.rank"),
]
"""Of a solution and a case: what stands in its kernel, and what a careless author would write."""
SHARED = {
    **dict.fromkeys((21, 22), clipping), 35: counts, **dict.fromkeys((40, 41, 42, 47), training_step),
    **dict.fromkeys((52, 53), fp8_history), **dict.fromkeys((59, 60), fourier), 72: gated_convolution,
    **dict.fromkeys((74, 75), delta_rule), **dict.fromkeys((82, 83, 84), nucleus),
}  # fmt: skip


@pytest.mark.parametrize("number", QUICK)
def test_solutions_are_right(number: int) -> None:
    require_correct(judge_case(number, QUICK[number], schedules=2))


@pytest.mark.parametrize("filters", [(3, 0.8), (0, 0.8), (0, 1.0)], ids=["list", "search", "all"])
def test_a_token_of_which_a_logit_is_nan_has_no_log_probability(filters: tuple[int, float]) -> None:
    """The NaN is on one rank, the target on the other one."""
    logits = [torch.linspace(rank, 1 - rank, 16).view(2, 8).clone() for rank in range(2)]
    logits[1][0, 5] = float("nan")
    target, weight = torch.tensor([0, 0]), torch.ones(2)
    for gradient in (None, weight):
        given = [(shard.clone(), target.clone(), None if gradient is None else gradient.clone()) for shard in logits]
        for found in run_call(lambda *own: nucleus.filtered_logits(group_of(), *own[:2], filters, own[2]), given):
            assert found[0].isnan().all() and not found[1].isnan().any()


@pytest.mark.parametrize(
    ("number", "label", "sizes"),
    [
        (71, "three_taps_fp32", {"chunk": 40}),
        (71, "whole_chunk_bf16", {"chunk": 272}),
        (76, "plain_bf16", {"local": 64, "outputs": 72, "size": (4, 5, 10)}),
        (76, "groups_bf16", {"local": 64, "outputs": 8, "size": (3, 4, 10), "groups": 1, "padding": 0}),
        (87, "three_bf16", {"channels": 64, "outputs": 72, "rows": 3, "columns": 16}),
        (87, "five_bf16", {"channels": 64, "outputs": 8, "rows": 3, "columns": 8}),
        (78, "no_overlap_bf16", {"z": (1, 4, 2, 6, 8), "tile": (2, 4, 4), "overlaps": (0.25, 0.5), "upsample": (8, 2)}),
    ],
)
def test_rows_of_whole_vectors_are_right(number: int, label: str, sizes: Mapping[str, object]) -> None:
    require_correct(judge_case(number, label, schedules=1, **sizes))


@pytest.mark.parametrize(("number", "label"), [(67, "uneven_bf16")])
def test_solutions_make_room_and_launch_again(number: int, label: str, tmp_path: Path) -> None:
    require_correct(judge_case(number, label, schedules=2, file=write_solution(tmp_path, number, "return [1024]", "return [1]")))


@pytest.mark.parametrize(
    ("number", "sizes"),
    [
        (76, {"local": 64, "outputs": 8, "size": (3, 4, 10)}),
        (87, {"channels": 64, "outputs": 8, "rows": 3, "columns": 8}),
    ],
)
@pytest.mark.parametrize("broken", ["line", "bias"])
def test_convolutions_with_one_thing_wrong_are_refused(
    number: int, sizes: Mapping[str, object], broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "line":
        windows = convolution.Windows
        monkeypatch.setattr(convolution, "Windows", lambda *fields: windows(*fields[:3], fields[3] + 1, fields[4]))
    else:
        use_twin(monkeypatch, convolution, "TURNED_RESULT", "value[0] += bias, value[1] += bias;", "value[0] += bias;")
    assert not judge_case(number, "plain_bf16" if number == 76 else "three_bf16", schedules=1, **sizes).correct


def test_turned_rows_in_a_wrong_place_are_refused(tmp_path: Path) -> None:
    old, new = "turn_rows(0, args.padding, before, args.padding + args.rows);", "turn_rows(0, args.padding, before, args.rows);"
    file = write_solution(tmp_path, 87, old, new)
    assert not judge_case(87, "three_bf16", schedules=1, file=file, channels=64, outputs=8, rows=3, columns=8).correct


@pytest.mark.long
@pytest.mark.parametrize(("number", "world_size"), [(40, 2), (41, 2), (47, 2), (47, 4)])
def test_training_steps_copy_beside_products(number: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "COPIED_BYTES", 0)
    require_correct(judge_case(number, "bf16", world_size, schedules=2))
    monkeypatch.setattr(training_step.Step, "copy", lambda *_: True)
    assert not judge_case(number, "bf16", world_size, schedules=1).correct


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Cubin]:
    """What NVRTC makes of every kernel that the emulator runs."""
    emulated, found = sequence.compile_program, []

    def both(source: str | Path, *, defines: Mapping[str, str | int]) -> Program:
        found.append(compile_cubin(source, arch="sm_90a", defines=defines))
        return emulated(source, defines=defines)

    monkeypatch.setattr(sequence, "compile_program", both)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("number", "label"), {number: label for number, label, _, _ in TWINS}.items())
def test_all_solutions_are_right_on_four_ranks_and_compile(number: int, label: str, compiled: list[Cubin]) -> None:
    require_correct(judge_case(number, label, 4, schedules=1))
    assert compiled


@pytest.mark.long
@pytest.mark.parametrize(("number", "label", "old", "new"), TWINS)
def test_a_broken_twin_is_refused(number: int, label: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = None
    if (module := SHARED.get(number)) is not None:
        use_twin(monkeypatch, module, next(name for name, value in vars(module).items() if isinstance(value, DeclaredKernel)), old, new)
    else:
        file = write_solution(tmp_path, number, old, new)
    assert not judge_case(number, label, schedules=3, file=file).correct
