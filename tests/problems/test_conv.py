"""Problems 71, 72, 76, 78, 86 and 87 beyond the contract: oracles against independent computations."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems.families.conv import convolve, from_zigzag, terms_bound, zigzag_shard
from peerlane.problems.families.tiling import Tiling
from peerlane.problems.p078_tile_parallel_vae_decode import tiling_of
from peerlane.problems.p086_tp_muon_newton_schulz import COEFFICIENTS, iterate
from problem_cases import costs, drawn, oracle, oracles

FP64 = torch.float64


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_short_filters_need_only_halos() -> None:
    halo = 4096 * 127 * 2
    for cost, wanted in zip(costs(72, "production_evo2_7b_mr"), [halo, *[2 * halo] * 6, halo], strict=True):
        assert cost.ingress_bytes == cost.egress_bytes == wanted


def test_public_tiles() -> None:
    """32 tiles, 74.6 MB of video, and 0.47 MB of latents in the three channels that are used."""
    tiling, found = tiling_of(problems.get(78).cases("pkb", 8)[0]), costs(78, "pkb")
    assert tiling.counts == (2, 4, 4) and tiling.output() == (24, 720, 720) and tiling.keep == (12, 192, 192)
    # Tiles overlap, and a latent that several ranks decode from is each one's own.
    latents = [cost.egress_bytes for cost in found]
    distinct = 3 * 6 * 90 * 90 * 2
    assert distinct < sum(latents) < 0.47e6
    assert found[0].ingress_bytes == sum(latents[1:])
    assert found[0].hbm_bytes == pytest.approx(74.6e6, rel=0.01)
    sizes = [math.prod(part.stop - part.start for part in tiling.latents(tile)) for tile in tiling.owners(8)]
    assert sizes == sorted(sizes, reverse=True) and list(tiling.owners(8).values()) == [*range(8)] * 4


def test_muon_sends_half_a_gram_matrix_or_the_matrix() -> None:
    """A whole Gram matrix, once, would take 1.8 MB on 8 ranks."""
    public, large = (costs(86, name)[0] for name in ("pkb", "production_llama3_8b_mlp"))
    assert public.egress_bytes == 7 * 512 * 64 * 2 < 1.8e6 / 2
    assert large.egress_bytes == 2 * 7 / 8 * 4096 * 4097 / 2 * 4


def test_convolution_by_taps_is_the_library_s() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator, dtype=FP64) for shape in ((2, 4, 6, 7, 9), (6, 2, 2, 3, 3)))
    got = convolve(x, weight, stride=(1, 2, 3), dilation=(2, 1, 2), groups=2)
    close(got, F.conv3d(x, weight, stride=(1, 2, 3), dilation=(2, 1, 2), groups=2))
    bound = terms_bound(x, weight, stride=(1, 2, 3), dilation=(2, 1, 2), groups=2)
    terms = F.conv3d(x.abs(), weight.abs(), stride=(1, 2, 3), dilation=(2, 1, 2), groups=2)
    assert bool((bound >= terms).all()) and float(bound.mean()) < 2 * float(terms.mean())


def test_zigzag_shards_pair_the_first_chunk_with_the_last() -> None:
    whole = torch.arange(12)
    shards = [zigzag_shard(whole, rank, 3, 0) for rank in range(3)]
    assert [shard.tolist() for shard in shards] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert torch.equal(from_zigzag(shards, 0), whole)


@pytest.mark.parametrize("label", ["four_taps_bf16", "whole_chunk_fp32", "one_tap_bf16"])
def test_causal_convolution_of_the_whole_sequence(label: str) -> None:
    case, inputs = drawn(71, label)
    weight = inputs[0][1].to(FP64)
    whole = from_zigzag([args[0] for args in inputs], -1).to(FP64)
    want = F.conv1d(F.pad(whole, (weight.shape[-1] - 1, 0)), weight, groups=whole.shape[1])
    close(from_zigzag([expected.value for expected in oracles(case, inputs)], -1), want)


@pytest.mark.parametrize("label", ["shared_fp32", "short_bf16", "contiguous_odd_bf16", "slow_bf16"])
def test_long_convolution_by_a_sum_over_taps(label: str) -> None:
    case, inputs = drawn(72, label)
    assemble = (lambda shards: from_zigzag(shards, -1)) if case["zigzag"] else (lambda shards: torch.cat(shards, -1))
    x1, z = (assemble(parts).to(FP64) for parts in ([args[0] for args in inputs], [args[1] * args[2] for args in inputs]))
    h, bias = inputs[0][3].to(FP64).repeat_interleave(case["group_dim"], 0), inputs[0][4].to(FP64)
    want = z * bias.unsqueeze(-1)
    for tap in range(h.shape[-1]):
        want[..., tap:] += h[:, tap, None] * z[..., : z.shape[-1] - tap]
    close(assemble([expected.value.transpose(1, 2) for expected in oracles(case, inputs)]), x1 * want)


@pytest.mark.parametrize("label", ["three_bf16", "five_no_bias_fp32", "thin_bf16", "stride_two_bf16"])
def test_stripes_of_the_whole_image_s_convolution(label: str) -> None:
    case, inputs = drawn(87, label)
    weight, bias = (None if argument is None else argument.to(FP64) for argument in inputs[0][1:3])
    image = torch.cat([args[0] for args in inputs], 2).to(FP64)
    want = F.conv2d(image, weight, bias, stride=case.params.get("stride", 1), padding=case["padding"])
    close(torch.cat([expected.value for expected in oracles(case, inputs)], 2), want)


def test_a_stride_that_does_not_divide_the_stripe_starts_anew() -> None:
    case, inputs = drawn(87, "stride_two_odd_bf16", 2)
    image = F.pad(torch.cat([args[0] for args in inputs], 2).to(FP64), (1, 1, 1, 1))
    for rank, expected in enumerate(oracles(case, inputs)):
        stripe = image[:, :, 5 * rank : 5 * rank + 7]
        close(expected.value, F.conv2d(stripe, inputs[0][1].to(FP64), inputs[0][2].to(FP64), stride=2))


@pytest.mark.parametrize("label", ["plain_bf16", "by_axis_fp32"])
def test_partial_sums_are_a_convolution_over_all_channels(label: str) -> None:
    case, inputs = drawn(76, label)
    x, weight = (torch.cat([args[i] for args in inputs], 1).to(FP64) for i in (0, 1))
    bias = None if inputs[0][2] is None else inputs[0][2].to(FP64)
    want = F.conv3d(x, weight, bias, *inputs[0][3:6])
    for expected in oracles(case, inputs):
        close(expected.value, want)


def sample(z: torch.Tensor, position: int, factor: int, start: int, count: int) -> tuple[int, int, float]:
    """Two latents along an axis, within a tile, and the weight of the second: half-pixel centres."""
    place = max((position + 0.5) / factor - 0.5, 0.0)
    low = min(int(place), count - 1)
    return start + low, start + min(low + 1, count - 1), place - low


def decoded_pixel(z: torch.Tensor, channel: int, tiling: Tiling, tile: tuple[int, int, int], position: Sequence[int]) -> float:
    axes = []
    for axis, part in enumerate(tiling.latents(tile)):
        low, high, weight = sample(z, position[axis], tiling.upsample[axis], part.start, part.stop - part.start)
        axes.append(((low, 1 - weight), (high, weight)))
    return sum(wa * wb * wc * float(z[0, channel % z.shape[1], a, b, c]) for (a, wa), (b, wb), (c, wc) in itertools.product(*axes))


@pytest.mark.parametrize(("label", "world"), [("all_axes_fp32", 2), ("image_bf16", 4), ("two_tiles_bf16", 2)])
def test_video_pixel_by_pixel(label: str, world: int) -> None:
    case, inputs = drawn(78, label, world)
    tiling, volume = tiling_of(case), oracle(case, inputs).value
    order = sorted(
        itertools.product(*map(range, tiling.counts)),
        key=lambda tile: (-math.prod(part.stop - part.start for part in tiling.latents(tile)), tile),
    )
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(volume[0].numel(), (150,), generator=generator).tolist():
        channel, *pixel = (int(i) for i in torch.unravel_index(torch.tensor(index), volume.shape[1:]))
        tile, position = [], []
        for axis, at in enumerate(pixel):  # the tile that the pixel falls into, and its place there
            place = 0
            while at >= (kept := min(tiling.pixels(tuple(place * (i == axis) for i in range(3)))[axis], tiling.keep[axis])):
                at, place = at - kept, place + 1
            tile.append(place)
            position.append(at)

        def value(tile: tuple[int, ...], position: Sequence[int], channel: int = channel) -> float:
            return decoded_pixel(inputs[order.index(tile) % world][0].to(FP64), channel, tiling, tile, position)

        want = value(tuple(tile), position)
        for axis in range(3):
            if tile[axis] == 0:
                continue
            before = tuple(place - (i == axis) for i, place in enumerate(tile))
            theirs, own = tiling.pixels(before)[axis], tiling.pixels(tuple(tile))[axis]
            extent = min(theirs, own, tiling.blend[axis])
            if position[axis] < extent:
                weight = position[axis] / extent
                other = value(before, [theirs - extent + at if i == axis else at for i, at in enumerate(position)])
                want = (1 - weight) * other + weight * want
        assert float(volume[0, channel, *pixel]) == pytest.approx(want, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("label", ["quintic_fp32", "polar_express_fp32", "rows_simple_fp32"])
def test_newton_schulz_maps_singular_values_by_its_polynomials(label: str) -> None:
    case, inputs = drawn(86, label, 2)
    dim = case["partition_dim"]
    x = torch.cat([args[0] for args in inputs], dim).to(FP64)
    u, sizes, v = torch.linalg.svd(x, full_matrices=False)
    sizes = sizes / sizes.norm()
    triples = COEFFICIENTS[case["coefficients"]]
    for step in range(case["steps"]):
        a, b, c = triples[step % len(triples)]
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    got = torch.cat([expected.value for expected in oracles(case, inputs)], dim)
    torch.testing.assert_close(got, (u * sizes) @ v, rtol=1e-8, atol=1e-10)


def test_newton_schulz_gives_zero_or_nearly_orthogonal_matrices() -> None:
    assert not iterate(torch.zeros(3, 4), 5, COEFFICIENTS["quintic"]).any()
    x = torch.randn((6, 40), generator=torch.Generator().manual_seed(0), dtype=FP64)
    for name, triples in COEFFICIENTS.items():
        result = iterate(x / x.norm(), 5 * len(triples) if len(triples) == 1 else len(triples), triples)
        sizes = torch.linalg.svdvals(result)
        assert float(sizes.min()) > 0.6 and float(sizes.max()) < 1.3, name
