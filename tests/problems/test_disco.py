"""Problem 62 beyond the contract: the oracle against the whole sphere, the split rule, the supports, costs against published figures."""

import math
from typing import Any

import pytest
import torch

from peerlane import problems
from peerlane.problems import Case
from peerlane.problems.families import sphere
from problem_cases import costs, drawing, drawn, oracles

FP64 = torch.float64
PROBLEM = problems.get(62)


def whole_sphere(case: Case, inputs: list[tuple[Any, ...]]) -> torch.Tensor:
    """The definition on one rank, with dense filters: (B, C_out, nlat_out, nlon_out) in float64."""
    azimuths, polars = sphere.grid_of(case)
    grid = [[inputs[p * azimuths + a] for a in range(azimuths)] for p in range(polars)]
    x = torch.cat([torch.cat([args[0] for args in row], 3) for row in grid], 2).to(FP64)
    nlon_in, nlon_out = case["nlon_in"], case["nlon_out"]
    bands = [row[0][1].to_dense().unflatten(2, (-1, nlon_in)) for row in grid]
    psi = torch.cat(bands, 2).to(FP64)
    weight, groups, bias = inputs[0][2].to(FP64), inputs[0][3], inputs[0][8]
    output = torch.zeros(x.shape[0], weight.shape[0], case["nlat_out"], nlon_out, dtype=FP64)
    per_group, inner = weight.shape[0] // groups, x.shape[1] // groups
    turned = torch.stack([x.roll(-q * (nlon_in // nlon_out), 3) for q in range(nlon_out)])
    y = torch.einsum("khij,qbcij->bckhq", psi, turned)
    for o in range(weight.shape[0]):
        first = o // per_group * inner
        output[:, o] = torch.einsum("bckhq,ck->bhq", y[:, first : first + inner], weight[o])
    return output if bias is None else output + bias.to(FP64).view(-1, 1, 1)


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("label", [spec.label for spec in PROBLEM.preset("small").cases])
def test_oracles_make_up_the_convolution_of_the_whole_sphere(label: str, world: int) -> None:
    case, inputs = drawn(62, label, world)
    parts = [expected.value for expected in oracles(case, inputs)]
    azimuths, _ = sphere.grid_of(case)
    rows = [torch.cat(parts[first : first + azimuths], 3) for first in range(0, world, azimuths)]
    torch.testing.assert_close(torch.cat(rows, 2), whole_sphere(case, inputs), rtol=1e-10, atol=1e-10)


def test_filters_are_equal_in_an_azimuth_group_alone() -> None:
    _, inputs = drawn(62, "uneven")
    first, beside, below = (inputs[rank][1].to_dense() for rank in (0, 1, 2))
    assert torch.equal(first, beside)
    assert first.shape != below.shape or not torch.equal(first, below)


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [(7, 2, [4, 3]), (9, 4, [2, 2, 2, 3]), (5, 4, [1, 1, 1, 2]), (721, 4, [181, 181, 181, 178]), (128, 4, [32] * 4), (10, 1, [10])],
)
def test_the_last_rank_takes_what_is_left(size: int, count: int, expected: list[int]) -> None:
    assert sphere.shares(size, count) == expected


@pytest.mark.parametrize(("nlat_out", "nlat_in", "nlon", "cutoff"), [(9, 9, 12, 1.5), (7, 13, 16, 2.2), (10, 19, 36, 3.0)])
def test_disks_hold_the_points_within_their_radius(nlat_out: int, nlat_in: int, nlon: int, cutoff: float) -> None:
    """By the chord between unit vectors, where the problem uses the law of cosines."""

    def points(rows: int) -> torch.Tensor:
        theta, phi = torch.linspace(0, math.pi, rows, dtype=FP64).unsqueeze(1), torch.arange(nlon, dtype=FP64) * 2 * math.pi / nlon
        return torch.stack(torch.broadcast_tensors(theta.sin() * phi.cos(), theta.sin() * phi.sin(), theta.cos()), -1)

    chord = (points(nlat_out)[:, :1, None] - points(nlat_in)[None]).norm(dim=-1)
    angle = 2 * (chord / 2).clamp(max=1).asin()
    radius = cutoff * math.pi / (nlat_in - 1)
    counted = torch.zeros_like(angle)
    h, row, offset, _ = sphere.disks(nlat_out, nlat_in, nlon, cutoff, 0, nlat_in, torch.device("cpu"))
    counted.index_put_((h, row, offset % nlon), torch.ones(h.numel(), dtype=FP64), accumulate=True)
    sure = (angle - radius).abs() > 1e-6
    assert torch.equal(counted[sure], (angle < radius).to(FP64)[sure])
    assert counted.max() == 1


@pytest.mark.parametrize("preset", ["small", "production_local_operator_1deg"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_number_of_taps_is_as_costed(preset: str, world: int) -> None:
    """Memory traffic is what remains of the cost: x, the output, weights and bias, and 28 bytes a tap."""
    for case in PROBLEM.cases(preset, world):
        azimuths, polars = sphere.grid_of(case)
        for polar in range(polars):
            rank = polar * azimuths
            x, psi, weight, *_, bias = PROBLEM.inputs(case, rank, drawing(case, rank))
            rows = len(sphere.span(case["nlat_out"], polars, polar))
            output = case["batch"] * case["outputs"] * rows * len(sphere.span(case["nlon_out"], azimuths, 0))
            words = x.numel() + output + weight.numel() + (0 if bias is None else bias.numel())
            assert PROBLEM.cost(case, rank).hbm_bytes == 4 * words + 28 * psi.values().numel()
            torch.sparse_coo_tensor(psi.indices(), psi.values(), psi.shape, check_invariants=True)
            k, h, column = psi.indices()
            order = (k * psi.shape[1] + h) * psi.shape[2] + column
            assert bool((order[1:] > order[:-1]).all()), "coalesced: sorted, without repetition"


def test_the_public_shape_has_the_published_taps_and_sends_less() -> None:
    """8 ranks: 2.1 + 75 + 6.3 MB with an all-reduce; here one number per output point and channel is the least."""
    cost = costs(62, "pkb")[0]
    assert cost.ingress_bytes == 4 * 32 * 8 * 32 * 128
    assert cost.ingress_bytes < (2.1 + 75 / 2 + 6.3) * 1e6
    assert cost.hbm_bytes == pytest.approx(2 * 4 * 32 * 8 * 32 * 128 + 28 * 1536 + 4 * (8 * 8 * 3 + 8))


@pytest.mark.parametrize("preset", [item.name for item in PROBLEM.presets if item.name.startswith("production")])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_disks_need_no_more_than_the_halo_of_their_inputs(preset: str, world: int) -> None:
    """All points within the cutoff of the rank's part, poles aside, hold for an upper bound."""
    case = PROBLEM.cases(preset, world)[0]
    azimuths, polars = sphere.grid_of(case)
    reach = sphere.reach(case["nlat_out"], case["nlat_in"], case["nlon_in"], case["cutoff"])
    for rank in range(world):
        polar, azimuth = divmod(rank, azimuths)
        mine, band = sphere.span(case["nlat_out"], polars, polar), sphere.span(case["nlat_in"], polars, polar)
        arc = len(sphere.span(case["nlon_in"], azimuths, azimuth))
        widest = reach[mine.start : mine.stop].max(0).values
        halo = sum(min(case["nlon_in"], arc + 2 * int(n)) - (arc if i in band else 0) for i, n in enumerate(widest) if n >= 0)
        points = PROBLEM.cost(case, rank).ingress_bytes / (4 * case["batch"] * min(case["channels"], case["outputs"]))
        assert 0 < points <= halo
