"""Ring attention on emulated ranks: right numbers, nothing unordered, and twins with one thing wrong are caught."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from device.judged import judge_case, require_correct
from device.runs import Run, run_calls
from device.test_attention import BF16, expected
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.device.attention import forward, ring
from peerlane.device.attention.forward import TILINGS, AttentionTiling
from peerlane.device.attention.ring import RingAttention, RingPlan, Shape
from peerlane.device.attention.shards import PARCEL_BYTES, PARCELS
from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import BlockNeeds
from representatives import first


def run(world_size: int, length: int, *, heads: int = 1, causal: bool, balanced: bool = False, calls: int = 3) -> tuple[Run, float]:
    """What came of it, and the largest error of a result or a logarithm."""
    generator = torch.Generator().manual_seed(length)
    arguments = [
        [tuple(torch.randn(1, length, h, 32, generator=generator).to(BF16) for h in (heads, 1, 1)) for _ in range(world_size)]
        for _ in range(calls)
    ]
    return call(arguments, causal=causal, balanced=balanced)


def call(arguments: Sequence[Sequence[tuple[torch.Tensor, ...]]], *, causal: bool, balanced: bool = False) -> tuple[Run, float]:
    """The same for these arguments, by call and rank."""

    def make(rank: int) -> Callable[..., Any]:
        shape = Shape.of(*arguments[0][rank], causal)
        return RingAttention(shape, group_of(), balanced=balanced, tiling=AttentionTiling(1, 32, 64, 3, 1))

    found, worst = run_calls(make, arguments), 0.0
    for given, got in zip(arguments, found.outputs, strict=False):
        q, k, v = (torch.cat([own[i] for own in given], 1) for i in range(3))
        wanted, logarithms = expected(q, k, v, None, causal)
        out, sums = torch.cat([own[0] for own in got], 1), torch.cat([own[1] for own in got], 2)
        worst = max(worst, float((out - wanted).norm() / wanted.norm()), float((sums - logarithms).abs().max()))
    return found, worst


@pytest.mark.parametrize("label", ["narrow_values_bf16", "scaled_full_fp32"])
def test_the_solution_is_right(label: str) -> None:
    require_correct(judge_case(54, label, schedules=1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "world_size", "label"),
    [(54, 4, "nan_last_bf16"), (54, 4, "interleaved_groups_bf16"), (55, 4, "context_inner_bf16"), (56, 4, "chain_bf16")],
)
def test_solutions_are_right_on_more_ranks(number: int, world_size: int, label: str) -> None:
    require_correct(judge_case(number, label, world_size, schedules=1))


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "length"), [(2, 130), (3, 130)])
def test_ranks_that_compute_for_others_are_right(world_size: int, length: int) -> None:
    found, worst = run(world_size, length, causal=True, balanced=True, calls=2)
    found.clean(worst < 3e-3)


def test_tensors_at_one_address_are_told_apart_by_their_layout() -> None:
    generator = torch.Generator().manual_seed(5)
    memory = [[torch.randn(1, 2, 5, 32, generator=generator).to(BF16) for _ in range(3)] for _ in range(2)]
    plain = [tuple(tensor.view(1, 5, 2, 32) for tensor in own) for own in memory]
    transposed = [tuple(tensor.transpose(1, 2) for tensor in own) for own in memory]
    found, worst = call([plain, transposed], causal=False)
    found.clean(worst < 3e-3)


# Whether ranks compute each other's tiles, a line, and what stands there instead.
TWINS = {
    "no wait for a piece": (True, "peers.wait_leading(flag != no_flag, step.source, flag, epoch);", "warp_threads;"),
    "results told of to nobody": (True, "        peers(storer).signal(tile.owner, result_flag(tile, group), epoch);\n", ""),
    "pushed before the other has begun": (False, "if (targets >> q & 1) told.wait(q, begun, epoch - 1);", ""),
    "one buffer for all calls": (False, "((epoch & 1) * W + source)", "source"),
    "told of with the first parcel": (False, "token + step < end ? Signal{signal.ranks} : signal;", "signal;"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    balanced, line, instead = TWINS[name]
    headers = (f"attention/{header}.cuh" for header in ("ring_attention", "shards", "attention", "parcels"))
    use_twin(monkeypatch, ring, "RING_ATTENTION", line, instead, *headers)
    found, worst = run(2, 130, causal=True, balanced=balanced)
    assert found.faults(worst <= 0.01)


@pytest.mark.parametrize("tiling", first((item for item in TILINGS if item.groups == 2 and item.keys != 176), 3), ids=str)
def test_kernels_keep_to_their_registers_and_their_shared_memory(tiling: AttentionTiling) -> None:
    shared = replace(tiling, output_slots=1).shared_bytes + PARCELS * PARCEL_BYTES
    layout = f"static_assert(sizeof(RoleMemory<Roles>) == {shared});\n"
    report = compiler_report(
        ring.RING_ATTENTION.source + layout, defines={"SHAPE": replace(tiling, output_slots=1).define(BF16), "WORLD_SIZE": 4}
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "Potential Performance Loss" not in report
    registers = int(report.split("Used ")[1].split()[0])
    assert BlockNeeds(tiling.threads, registers, shared).per_sm() >= 1


@pytest.mark.parametrize("world_size", range(2, 9))
def test_balanced_shares_are_even_and_complete(world_size: int) -> None:
    shape = Shape(1, 4096, 32, 32, 128, 128, BF16, causal=True)
    plan = RingPlan.of(shape, world_size)
    blocks, shard = plan.tiling.tiles(4096), 4096 // plan.tiling.keys
    taken, costs = [], []
    for rank, share in enumerate(plan.shares):
        tiles = [(rank, block) for block in range(share.own)] + [(share.owner, share.first + i) for i in range(share.count)]
        taken += tiles
        costs.append(sum(owner * shard + block + 1 for owner, block in tiles))
    assert sorted(taken) == [(rank, block) for rank in range(world_size) for block in range(blocks)]
    assert max(costs) < 1.05 * sum(costs) / world_size
    assert plan.targets(0) == 2**world_size - 2 and plan.needed(0) == world_size - 1


def test_partial_results_merge() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, length, 3, 16) for length in (4, 9, 9))
    parts = [forward.wide_attention(q, k[:, part], v[:, part], scale=0.25, causal=False) for part in (slice(0, 2), slice(2, 9))]
    parts.append((torch.zeros(2, 4, 3, 16), torch.full((2, 3, 4), -torch.inf)))
    out, logarithms = forward.merge(parts)
    wanted, wanted_logarithms = expected(q, k, v, 0.25, False)
    torch.testing.assert_close(out, wanted.float())
    torch.testing.assert_close(logarithms, wanted_logarithms.float())
