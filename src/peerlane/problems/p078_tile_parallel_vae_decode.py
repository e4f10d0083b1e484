"""Problem 78: tile-parallel decoding of a video, with blended overlaps; the decoder is trilinear upsampling."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import all_gather_single, group_layout, group_members
from peerlane.problems.families.matmul import BF16, FP32, FP64
from peerlane.problems.families.tiling import Tile, Tiling, cut, fade_exactly, fade_rounding


def three_channels(latents: torch.Tensor) -> torch.Tensor:
    """The first three of C channels, which are repeated in turn if they are fewer."""
    count = latents.shape[1]
    return latents[:, :3] if count >= 3 else torch.cat([latents] * -(-3 // count), 1)[:, :3]


def decode(latents: torch.Tensor, upsample: Tile) -> torch.Tensor:
    """Trilinear upsampling of (B, C, t, h, w) to three channels, in the latents' dtype."""
    return F.interpolate(three_channels(latents), scale_factor=[float(factor) for factor in upsample], mode="trilinear")


def reference(
    z: torch.Tensor,
    tile_latent_min_length: int,
    tile_latent_min_height: int,
    tile_latent_min_width: int,
    spatial_tile_overlap_factor: float,
    temporal_tile_overlap_factor: float,
    spatial_upsample: int,
    temporal_upsample: int,
    sr_ratio: int = 1,
    first_frame_as_image: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pixels = spatial_upsample * sr_ratio
    tiling = Tiling.of(
        z.shape[2:],
        (tile_latent_min_length, tile_latent_min_height, tile_latent_min_width),
        spatial_tile_overlap_factor,
        temporal_tile_overlap_factor,
        (temporal_upsample, pixels, pixels),
        first_frame_as_image,
    )
    owners = tiling.owners(ranks)
    owned = [[tile for tile, owner in owners.items() if owner == q] for q in range(ranks)]
    shapes = {tile: (z.shape[0], 3, *tiling.pixels(tile)) for tile in owners}

    # All ranks' decoded tiles, each rank's one after the other and filled up to the longest.
    longest = max(sum(torch.Size(shapes[tile]).numel() for tile in tiles) for tiles in owned)
    sent = z.new_zeros(longest, dtype=torch.bfloat16)
    decoded = [decode(cut(z, tiling.latents(tile)).to(torch.float32), tiling.upsample) for tile in owned[rank]]
    if decoded:
        flat = torch.cat([tile.flatten() for tile in decoded])
        sent[: flat.numel()] = flat
    received = sent.new_empty(ranks * longest)
    all_gather_single(received, sent, group=group)

    gathered = {}
    for row, tiles in zip(received.view(ranks, longest), owned, strict=True):
        parts = row.split_with_sizes([*(sizes := [torch.Size(shapes[tile]).numel() for tile in tiles]), longest - sum(sizes)])
        gathered.update({tile: part.view(shapes[tile]) for tile, part in zip(tiles, parts, strict=False)})
    return tiling.assembled(gathered, fade_rounding)


def _arguments(case: pc.Case) -> tuple[Any, ...]:
    """The arguments between z and group."""
    overlaps, upsample = case["overlaps"], case["upsample"]
    return (*case["tile"], *overlaps, *upsample, case.params.get("sr", 1), case.params.get("first_frame", False))


def tiling_of(case: pc.Case) -> Tiling:
    """The tiling that a case's arguments stand for."""
    length, height, width, spatial, temporal, pixels, frames, ratio, first_frame = _arguments(case)
    pixels *= ratio
    return Tiling.of(case["z"][2:], (length, height, width), spatial, temporal, (frames, pixels, pixels), first_frame)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """z of N(0, 1), another one on every rank, so that it matters who decodes a tile; with ``same``, the same one on all ranks.

    ``nan``: the first rank's z is NaN. Groups of ranks have the same z, rank by rank.
    """
    members = group_members(case, rank)
    place = members.index(rank)
    if case.params.get("same"):
        z = draw.shared.normal(case["z"], case.dtype)
    elif "group" in case.params:
        z = [draw.shared.normal(case["z"], case.dtype) for _ in members][place]
    else:
        z = draw.normal(case["z"], case.dtype)
    if case.params.get("nan") and place == 0:
        z.fill_(float("nan"))
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    return (z, *_arguments(case), group)


Owner = Callable[[Tile], int]

# The bound on an error, relative to the magnitude: see tolerance().
_BOUND = 8 * pc.UNIT_ROUNDOFF[BF16]


def _decoded(case: pc.Case, inputs: pc.Inputs, rank: int, work: torch.dtype, owner: Owner | None = None) -> dict[Tile, torch.Tensor]:
    """All tiles, decoded in ``work`` from the z of the rank that ``owner`` names; None: the right one."""
    tiling, members = tiling_of(case), group_members(case, rank)
    owners = tiling.owners(len(members))
    sources = {tile: members[owners[tile]] if owner is None else owner(tile) for tile in tiling.tiles}
    return {tile: decode(cut(inputs[q][0], tiling.latents(tile)).to(work), tiling.upsample) for tile, q in sources.items()}


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is made from the absolute values of decoded pixels, and of the latents, with the weight of float32's errors."""
    tiling, decoded = tiling_of(case), _decoded(case, inputs, rank, FP64)
    value = tiling.assembled(decoded, fade_exactly)
    terms = _decoded(case, [(args[0].abs(), *args[1:]) for args in inputs], rank, FP64)
    weight = 8 * pc.UNIT_ROUNDOFF[FP32] / _BOUND
    magnitude = tiling.assembled({tile: decoded[tile].abs_().add_(terms[tile], alpha=weight) for tile in decoded}, fade_exactly)
    return pc.Expected("video", value, BF16, magnitude=magnitude)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """A rounding of the decoded tile, and for every axis of blending those of two products and of their sum, all to bfloat16: 7 u of the
    blended absolute values, and one to spare. Interpolation in float32 errs by a few 2^-24 of the latents."""
    return {"video": pc.Tolerance(magnitude=_BOUND, normwise=6e-3, size="the blend of the absolute values of the decoded pixels")}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The three channels that are decoded of the latents of every tile travel from its owner; the video is written."""
    tiling, members = tiling_of(case), group_members(case, rank)
    cell = case["z"][0] * min(case["z"][1], 3) * case.dtype.itemsize
    owned = [latents * cell for latents in tiling.decoded_latents(len(members))]
    own = owned[members.index(rank)]
    pixels = case["z"][0] * 3 * torch.Size(tiling.output()).numel()
    travels = 0 if case.params.get("same") else 1
    return pc.Cost(
        hbm_bytes=own + pixels * BF16.itemsize,
        egress_bytes=travels * own,
        ingress_bytes=travels * (sum(owned) - own),
        flops={"fp32": 2 * pixels},
    )


def _interpolated(case: pc.Case, rank: int) -> pc.Steps:
    """Seven interpolations of two operations a pixel of every tile that covers it, and three operations where tiles are blended."""
    tiling, least = tiling_of(case), cost(case, rank)
    covered = case["z"][0] * 3 * sum(torch.Size(tiling.pixels(tile)).numel() for tile in tiling.tiles)
    return (
        pc.step("exchange of latents", link=max(least.egress_bytes, least.ingress_bytes), barriers=1),
        pc.step("pixels from latents", hbm=least.hbm_bytes, flops={"fp32": 17 * covered}),
    )


def _fp32(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Decoded and blended in float32, rounded once."""
    return tiling_of(case).assembled(_decoded(case, inputs, rank, FP32), fade_exactly).to(BF16)


def _rounded_tiles(case: pc.Case, inputs: pc.Inputs, rank: int, owner: Owner | None = None) -> dict[Tile, torch.Tensor]:
    return {tile: pixels.to(BF16) for tile, pixels in _decoded(case, inputs, rank, FP32, owner).items()}


def _rounding(case: pc.Case, inputs: pc.Inputs, rank: int, owner: Owner | None = None) -> torch.Tensor:
    """Tiles rounded when they are decoded, and blended in bfloat16."""
    return tiling_of(case).assembled(_rounded_tiles(case, inputs, rank, owner), fade_rounding)


def _faded_by(context: pc.AnswerContext, fade: Callable[..., torch.Tensor]) -> torch.Tensor:
    return tiling_of(context.case).assembled(_rounded_tiles(context.case, context.inputs, context.rank), fade)


def _dealt_by_place(context: pc.AnswerContext) -> torch.Tensor:
    tiles = tiling_of(context.case).tiles
    return _rounding(context.case, context.inputs, context.rank, lambda tile: context.members[tiles.index(tile) % len(context.members)])


def _last_rank_forgotten(context: pc.AnswerContext) -> torch.Tensor:
    tiling, tiles = tiling_of(context.case), _rounded_tiles(context.case, context.inputs, context.rank)
    owners = tiling.owners(len(context.members))
    last = max(owners.values())
    return tiling.assembled({tile: pixels.zero_() if owners[tile] == last else pixels for tile, pixels in tiles.items()}, fade_rounding)


def _resampled(context: pc.AnswerContext, mode: str, **options: bool) -> torch.Tensor:
    tiling, tiles = tiling_of(context.case), {}
    for tile, owner in tiling.owners(len(context.members)).items():
        latents = three_channels(cut(context.inputs[context.members[owner]][0], tiling.latents(tile))).to(FP32)
        tiles[tile] = F.interpolate(latents, size=list(tiling.pixels(tile)), mode=mode, **options).to(BF16)
    return tiling.assembled(tiles, fade_rounding)


def _last_channels(context: pc.AnswerContext) -> torch.Tensor:
    return _rounding(context.case, [(args[0].flip(1), *args[1:]) for args in context.inputs], context.rank)


def _with_arguments(context: pc.AnswerContext, **arguments: Any) -> torch.Tensor:
    """The answer to other arguments."""
    return _rounding(replace(context.case, params={**context.case.params, **arguments}), context.inputs, context.rank)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    sizes = {"z": (1, 4, 4, 7, 8), "tile": (3, 4, 4), "overlaps": (0.25, 0.34), "upsample": (4, 2)}
    return pc.case(label, dtype, **{**sizes, **params})


_IMAGE: dict[str, Any] = {"z": (1, 2, 3, 6, 5), "tile": (2, 4, 4), "overlaps": (0.5, 0.5), "upsample": (2, 2), "sr": 2, "first_frame": True}
_SPATIAL: dict[str, Any] = {"z": (1, 3, 2, 6, 6), "tile": (2, 4, 4), "overlaps": (0.25, 0.0), "upsample": (2, 2)}
_PUBLIC: dict[str, Any] = {"tile": (3, 32, 32), "overlaps": (0.25, 0.0), "upsample": (8, 4)}

PRESETS = (
    pc.preset(
        "small",
        "overlaps on all axes and on none; last tiles thinner than the overlap; oblong tiles; fewer tiles than ranks; one and two "
        "channels; NaN; groups",
        _small("all_axes_bf16", BF16),
        _small("all_axes_fp32", FP32, z=(1, 4, 3, 5, 8), tile=(3, 5, 3), upsample=(4, 3)),
        _small("image_bf16", BF16, **_IMAGE),
        _small("single_tile_fp32", FP32, z=(1, 1, 1, 3, 3)),
        _small("two_tiles_bf16", BF16, **{**_SPATIAL, "z": (2, 5, 2, 6, 3)}),
        _small("no_overlap_bf16", BF16, z=(1, 3, 5, 6, 6), overlaps=(0.0, 0.0)),
        _small("same_bf16", BF16, same=True, **_SPATIAL),
        _small("nan_bf16", BF16, nan=True, world_sizes=(4, 8), **_SPATIAL),
        _small("strided_group_bf16", BF16, group="strided", world_sizes=(4, 8), **_SPATIAL),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 32 tiles; also with the same latents on all ranks",
        pc.case("bf16", BF16, z=(1, 16, 6, 90, 90), **_PUBLIC),
        pc.case("same_bf16", BF16, z=(1, 16, 6, 90, 90), same=True, **_PUBLIC),
    ),
    pc.preset(
        "production_magi1_720p",
        "MAGI-1, 48 frames of 1280 x 720 pixels: 112 tiles",
        pc.case("bf16", BF16, z=(1, 16, 12, 90, 160), **_PUBLIC),
    ),
    pc.preset(
        "production_magi1_480p_temporal",
        "96 frames of 832 x 480 pixels, tiles overlapping in time too",
        pc.case("bf16", BF16, z=(1, 16, 24, 60, 104), tile=(8, 32, 32), overlaps=(0.25, 0.25), upsample=(8, 4)),
    ),
)


# The cases in which tiles fade into each other.
_BLENDED = pc.where(lambda c: c["overlaps"] != (0.0, 0.0) and c["z"] != (1, 1, 1, 3, 3))

PROBLEM = pc.Problem(
    id=78,
    slug="tile_parallel_vae_decode",
    title="Tile-parallel video decoding with blended overlaps",
    category="geometric_spatial",
    parallelism=("spatial",),
    origin="SandAI's MAGI-1: tile-parallel decoding by its video VAE, for which trilinear upsampling stands in",
    summary=(
        "z (B, C, T, H, W) is cut into tiles of (length, height, width), the length being one more if first_frame_as_image, at strides of "
        "int(extent (1 - overlap)). Tiles are sorted by their number of latents, the largest first, ties by place (time, height, width); "
        "the k-th is decoded from the z of rank k mod W of the group (the world if None): float32 trilinear upsampling with half-pixel "
        "centres by (temporal_upsample, s, s), s = spatial_upsample sr_ratio, of the first three channels, repeated in turn if there are "
        "fewer, rounded to bfloat16. Along time, then height, then width, a tile with a neighbour before it fades in over "
        "E = min(both extents, int(tile pixels overlap)) pixels: pixel x < E becomes (1 - x / E) times the x-th of the neighbour's last E, "
        "as they were decoded, plus x / E times the tile's own. Of each tile the first (tile pixels - int(tile pixels overlap)) remain. "
        "Every rank returns the tiles put together, (B, 3, ...) in bfloat16."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm("every pixel from the latents of the tiles that cover it", "no decoded tile is stored", _interpolated),
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "dealt_by_place",
            "tiles dealt out by place, whatever their size",
            _dealt_by_place,
            lambda c: not c.params.get("same") and c["z"] not in ((1, 1, 1, 3, 3), (2, 5, 2, 6, 3), (1, 3, 2, 6, 6)),
        ),
        pc.wrong("last_rank_forgotten", "zeros for the tiles of the last rank", _last_rank_forgotten),
        pc.wrong("not_blended", "tiles as they were decoded", lambda c: _faded_by(c, lambda before, after, weight: after), _BLENDED),
        pc.wrong(
            "averaged",
            "the mean of both tiles where they overlap",
            lambda c: _faded_by(c, lambda before, after, weight: 0.5 * before + 0.5 * after),
            _BLENDED,
        ),
        pc.wrong(
            "faded_out",
            "weights exchanged",
            lambda c: _faded_by(c, lambda before, after, weight: fade_rounding(after, before, weight)),
            _BLENDED,
        ),
        pc.wrong("nearest", "nearest-neighbour upsampling", lambda c: _resampled(c, "nearest")),
        pc.wrong(
            "aligned_corners", "corners aligned instead of half-pixel centres", lambda c: _resampled(c, "trilinear", align_corners=True)
        ),
        pc.wrong("last_channels", "channels from the last on", _last_channels, lambda c: c["z"][1] > 1),
        pc.wrong(
            "tiles_of_four",
            "tiles of 4 x 4 latents, whatever was passed",
            lambda c: _with_arguments(c, tile=(3, 4, 4)),
            ("small/all_axes_fp32",),
        ),
        pc.wrong("square_tiles", "the height for the width", lambda c: _with_arguments(c, tile=(3, 5, 5)), ("small/all_axes_fp32",)),
        pc.wrong(
            "two_frames_a_latent",
            "twice as many frames as latents, whatever was passed",
            lambda c: _with_arguments(c, upsample=(4, 2)),
            ("small/all_axes_fp32",),
        ),
    ),
    alternative_solutions=pc.alternatives(fp32_rounded_once=_fp32, rounded_blending=_rounding),
    excused={"another_rank": "all ranks have the same answer"},
    process_groups=group_layout,
    replicated=True,
    notes=(
        "The latents are meant to be the same on all ranks, and then no communication is needed. As in the public benchmark they differ, "
        "and a tile is defined by its owner's; the same latents are a second case of the public shape.",
        "The stub hides what tiles are for: latents are so much smaller than pixels that it is best to exchange latents and decode all.",
        "Blending without rounding in between is as right as the public reference's, which rounds after every operation.",
        "Tiles of 6 with a temporal overlap of 0.25 would repeat frames (18 frames remain of a tile, at strides of 16); the preset with "
        "temporal overlap has tiles of 8.",
        "NaN fills the latents of a rank whose one tile is the first: elsewhere it would depend on whether weights of zero are applied.",
    ),
    speed_note=(
        "The public one blends tiles row by row in Python and exchanges them decoded and again blended; this one blends a whole overlap "
        "at a time and exchanges decoded tiles alone."
    ),
)
