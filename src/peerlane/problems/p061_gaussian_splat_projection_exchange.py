"""Problem 61: Gaussians projected to all ranks' cameras, culled, and sent to the rank whose camera sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import splat, splat_answers
from peerlane.problems.families.collective import FP32, FP64, all_gather_single

NAMES = ("camera_ids", "gaussian_ids", "radii", "means2d", "depths", "conics", "opacities", "colors")


def reference(
    means: torch.Tensor,
    quats: torch.Tensor,
    scales: torch.Tensor,
    opacities: torch.Tensor,
    colors: torch.Tensor,
    viewmats: torch.Tensor,
    Ks: torch.Tensor,
    image_width: int,
    image_height: int,
    eps2d: float = 0.3,
    near_plane: float = 0.01,
    far_plane: float = 1e10,
    camera_model: str = "pinhole",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if camera_model != "pinhole":
        raise ValueError(f"camera_model is {camera_model!r}: expected 'pinhole'")
    rank, ranks, cameras, device = dist.get_rank(), dist.get_world_size(), len(viewmats), means.device

    counts = torch.empty(ranks, dtype=torch.int64, device=device)
    all_gather_single(counts, torch.tensor([len(means)], device=device))
    own_cameras = torch.cat((viewmats.flatten(1), Ks.flatten(1)), dim=1)
    all_cameras = own_cameras.new_empty(ranks * cameras, own_cameras.shape[1])
    all_gather_single(all_cameras, own_cameras)
    views, intrinsics = all_cameras[:, :16].view(-1, 4, 4), all_cameras[:, 16:].view(-1, 3, 3)

    radii, means2d, depths, conics = splat.project_covariances(
        means, quats, scales, views, intrinsics, image_width, image_height, eps2d, near_plane, far_plane
    )
    seen = (radii > 0).all(-1)
    camera, gaussian = seen.nonzero(as_tuple=True)
    sent = seen.view(ranks, -1).sum(1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    sent_rows, received_rows = torch.stack((sent, received)).tolist()

    first = counts.cumsum(0)[rank] - counts[rank]
    whole = torch.stack((camera % cameras, gaussian + first, *radii[camera, gaussian].unbind(-1)), dim=1)
    real = torch.cat(
        (
            means2d[camera, gaussian],
            depths[camera, gaussian].unsqueeze(1),
            conics[camera, gaussian],
            opacities[gaussian].unsqueeze(1),
            colors[gaussian],
        ),
        dim=1,
    )
    whole_in, real_in = (rows.new_empty(sum(received_rows), rows.shape[1]) for rows in (whole, real))
    dist.all_to_all_single(whole_in, whole, received_rows, sent_rows)
    dist.all_to_all_single(real_in, real, received_rows, sent_rows)
    means2d, depths, conics, opacities, colors = torch.split(real_in, [2, 1, 3, 1, colors.shape[1]], dim=1)
    return (
        whole_in[:, 0],
        whole_in[:, 1],
        whole_in[:, 2:].to(torch.int32),
        means2d,
        depths.squeeze(1),
        conics,
        opacities.squeeze(1),
        colors,
    )


def public_reference(*args: Any) -> splat_answers.Outputs:
    """The reference with the public benchmark's numbers, which count from the first Gaussian of the destination rank."""
    outputs = reference(*args)
    count = torch.tensor([len(args[0])], device=args[0].device)
    counts = count.new_empty(dist.get_world_size())
    all_gather_single(counts, count)
    before = counts.cumsum(0) - counts
    source = torch.searchsorted(before, outputs[1].contiguous(), right=True) - 1
    return (outputs[0], outputs[1] - before[source] + before[dist.get_rank()], *outputs[2:])


def scene_of(case: pc.Case) -> splat.Scene:
    counts = case["gaussians"]
    per_rank = tuple(counts[rank % len(counts)] for rank in range(case.world_size))
    return splat.Scene(
        name=case.key,
        counts=per_rank,
        cameras=case["cameras"],
        width=case["width"],
        height=case["height"],
        extent=case.params.get("extent", 4.0),
        distance=case.params.get("distance", 4.0),
        focal=case.params.get("focal", 0.8),
        size=case.params.get("size", 0.1),
        near=case.params.get("near", 0.01),
        far=case.params.get("far", 1e10),
        eps2d=case.params.get("eps2d", 0.3),
        lift=case.params.get("lift", 0.2),
        blind=case.params.get("pattern") == "blind",
    )


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """A scene that is the same in every call, in another place, another order and slightly changed.

    How many Gaussians a camera sees decides the outputs' shapes, so that this must not change: a :class:`Scene` fixes it. Drawn anew are a
    rigid motion of all Gaussians and cameras, the order of the rank's Gaussians, their colours and opacities, the lengths of their
    quaternions, moves of their means by a fraction of a pixel, scales by 5 %, and the cameras' focal lengths and skew, which move what is
    at the picture's border by less than a quarter of a pixel.

    ``case["pattern"]``: ``blind``, see :class:`Scene`; ``edges``, see :func:`edge_gaussians`.
    """
    scene, count = scene_of(case), scene_of(case).counts[rank]
    opacities = draw.uniform((count,), FP32, low=0.1, high=0.9)
    colors = draw.uniform((count, case["channels"]), FP32)
    rest = (case["width"], case["height"], scene.eps2d, scene.near, scene.far, "pinhole")
    if case.params.get("pattern") == "edges":
        return (*splat.edge_gaussians(draw, scene, count), opacities, colors, *splat.edge_cameras(draw, scene, rank), *rest)
    order = draw.permutation(count)
    means, quats, scales, reach = (tensor[order] for tensor in splat.settled_gaussians(scene, rank, draw.device))
    means = means + 0.5 * reach * (2 * draw.uniform((count, 3), FP32) - 1)
    scales = scales * (1 + 0.05 * (2 * draw.uniform((count, 3), FP32) - 1))

    motion = F.normalize(draw.shared.normal((4,), FP64), dim=0)
    turn, shift = splat.rotations(motion), draw.shared.normal((3,), FP64)
    means = means @ turn.to(FP32).t() + shift.to(FP32)
    quats = splat.quaternion_products(motion.to(FP32), quats) * torch.pow(10.0, 4 * draw.uniform((count, 1), FP32) - 2)
    own = slice(rank * scene.cameras, (rank + 1) * scene.cameras)
    views, intrinsics = (tensor[own].clone() for tensor in splat.viewpoints_on(scene, draw.device))
    views[:, :3, :3] = views[:, :3, :3] @ turn.t()
    views[:, :3, 3] -= views[:, :3, :3] @ shift
    _disturb(scene, intrinsics, draw)
    return (means, quats, scales, opacities, colors, views.to(FP32), intrinsics.to(FP32), *rest)


def _disturb(scene: splat.Scene, intrinsics: torch.Tensor, draw: pc.Draw) -> None:
    """Changes focal lengths and skew in place, so little that what overlaps the picture's border moves by less than a quarter of a pixel.

    Nothing of which that is certain has a radius of more than 3.33 times its size, in pixels at a twentieth of the cameras' distance.
    """
    size = max(scene.width, scene.height)
    radius = splat.EXTENT_SIGMAS * scene.size * 1.1 * scene.focal * scene.width / (0.05 * scene.distance)
    most = 0.12 / (size + radius)
    change = 2 * draw.uniform((len(intrinsics), 3), FP32).to(FP64) - 1
    change = most / 2 * (change + change.sign())  # no less than half of it
    intrinsics[:, 0, 1] = change[:, 2] * intrinsics[:, 1, 1]
    intrinsics.diagonal(dim1=1, dim2=2)[:, :2] *= 1 + change[:, :2]


def _undisturbed(context: pc.AnswerContext) -> splat_answers.Outputs:
    """Positions projected with the focal lengths and without the skew that the scene has before they change from call to call."""
    scene, outputs = scene_of(context.case), list(context.answer)
    own = slice(context.rank * scene.cameras, (context.rank + 1) * scene.cameras)
    before = splat.viewpoints_on(scene, outputs[3].device)[1][own][outputs[0]]
    now = context.args[6].to(FP64)[outputs[0]]
    points = F.pad(outputs[3].to(FP64), (0, 1), value=1.0).unsqueeze(2)
    outputs[3] = (before @ torch.linalg.inv(now) @ points)[:, :2, 0].to(FP32)
    return tuple(outputs)


@dataclass(kw_only=True)
class Radii(pc.Expected):
    """Radii in pixels: extents rounded up, of which each may be off by ``error``."""

    extents: torch.Tensor
    error: torch.Tensor


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, ...]:
    """In float64. Magnitudes are sums of absolute values of the terms; a covariance's error weighs more in the inverse of a narrow one."""
    rows = splat_answers.visible_rows(inputs, rank)
    u = pc.UNIT_ROUNDOFF[FP32]
    radius_error = 64 * u * (splat.EXTENT_SIGMAS * rows.spread / rows.smallest.sqrt()).unsqueeze(1) + 8 * u * rows.extents
    narrow = rows.spread * rows.trace / rows.determinant
    conic_size = rows.spread.unsqueeze(1) / rows.determinant.unsqueeze(1) + rows.conics.abs() * narrow.unsqueeze(1)
    return (
        pc.exactly("camera_ids", rows.camera),
        pc.exactly("gaussian_ids", splat_answers.numbers_of(case, inputs, rank, rows)),
        Radii("radii", rows.extents.ceil(), torch.int32, extents=rows.extents, error=radius_error),
        pc.Expected("means2d", rows.means2d, FP32, magnitude=rows.position_spread),
        pc.Expected("depths", rows.depths, FP32, magnitude=rows.depth_spread),
        pc.Expected("conics", rows.conics, FP32, magnitude=conic_size),
        pc.exactly("opacities", splat_answers.copied(inputs, rows, 3)),
        pc.exactly("colors", splat_answers.copied(inputs, rows, 4)),
    )


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """In units of u and of the terms' absolute values: 8 for a depth (three products and a sum), 16 for a position (a division more).

    A covariance passes through three products of matrices before it is inverted: 64 of the largest term of its entries, and as many of the
    inverse for every unit by which the determinant is smaller than the product of trace and largest term.
    """
    u = pc.UNIT_ROUNDOFF[FP32]
    return {
        "means2d": pc.Tolerance(relative=2 * u, magnitude=16 * u),
        "depths": pc.Tolerance(relative=2 * u, magnitude=8 * u),
        "conics": pc.Tolerance(relative=8 * u, magnitude=64 * u),
    }


def compare(case: pc.Case, got: splat_answers.Outputs, expected: tuple[pc.Expected, ...], kind: str) -> list[pc.Score]:
    """A radius may be any whole number to which an extent within its error is rounded up; the rest as everywhere."""
    allowed = tolerance(case)
    scores = []
    for value, want in zip(got, expected, strict=True):
        if isinstance(want, Radii):
            scores.append(_radius_score(value, want))
        elif want.exact:
            scores.append(pc.compare_exact(want.name, value, want.value))
        else:
            scores.append(pc.compare_close(want.name, value, want, allowed[want.name]))
    return scores


def _radius_score(got: torch.Tensor, want: Radii) -> pc.Score:
    wrong = (got < (want.extents - want.error).ceil()) | (got > (want.extents + want.error).ceil())
    count = int(wrong.sum())
    if not count:
        return pc.Score(want.name, 0.0, "every radius is its extent rounded up")
    worst = int(wrong.flatten().to(torch.uint8).argmax())
    index = (worst // 2, worst % 2)
    return pc.Score(want.name, float("inf"), f"{count} of {wrong.numel()} radii wrong", index, float(got[index]), float(want.value[index]))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """For the number of visible Gaussians that a sample of the scene suggests (in the scene of edges, a third).

    Either a Gaussian's 11 + D numbers are sent once to a rank and projected there, or 7 + D numbers of its projection, with 14 bytes of
    radii and numbers, to every camera that sees it: whichever is less.
    """
    scene, ranks, cameras, channels = scene_of(case), case.world_size, case["cameras"], case["channels"]
    edges = case.params.get("pattern") == "edges"
    shares = ((1 / 3,) * (ranks * cameras),) * ranks if edges else splat.visible_shares(scene)

    def rows(source: int, target: int) -> float:
        return scene.counts[source] * sum(shares[source][target * cameras : (target + 1) * cameras])

    def traffic(source: int, target: int) -> float:
        return float(min(scene.counts[source] * 4 * (11 + channels), rows(source, target) * (4 * (7 + channels) + 14)))

    others = [q for q in range(ranks) if q != rank]
    received = sum(rows(q, rank) for q in range(ranks))
    own = scene.counts[rank]
    return pc.Cost(
        hbm_bytes=own * 12 + received * (24 + 4 * (7 + channels)),
        egress_bytes=sum(traffic(rank, q) for q in others) + 100 * cameras * (ranks - 1),
        ingress_bytes=sum(traffic(q, rank) for q in others) + 100 * cameras * (ranks - 1),
        flops={"fp32": 40 * own * cameras * ranks + 200 * received},
        typical=True,
    )


def _projected(case: pc.Case, rank: int) -> pc.Steps:
    least, scene = cost(case, rank), scene_of(case)
    return (
        pc.step("exchange of cameras", barriers=1),
        pc.step("projection and culling", hbm=scene.counts[rank] * 4 * (11 + case["channels"]), flops=least.flops),
        pc.step("exchange of counts", barriers=1),
        pc.step("exchange of projections", hbm=least.hbm_bytes, link=max(least.egress_bytes, least.ingress_bytes), barriers=1),
    )


def _small(label: str, **params: Any) -> pc.CaseSpec:
    defaults = {"gaussians": (64, 40, 90, 24), "cameras": 2, "width": 128, "height": 96, "channels": 3}
    return pc.case(label, FP32, variant=params.pop("variant", "default"), **{**defaults, **params})


def _large(label: str, variant: str = "default", **params: Any) -> pc.CaseSpec:
    return pc.case(label, FP32, variant=variant, **{"cameras": 1, "channels": 3, "gaussians": (1024,), **params})


PRESETS = (
    pc.preset(
        "small",
        "uneven counts, several cameras and one, Gaussians behind, around and larger than the picture; ranks that see or show nothing; "
        "Gaussians on borders and at the near and far planes; one channel and many; the public benchmark's numbering",
        _small("two_cameras"),
        _small("one_camera", cameras=1, channels=1),
        _small("large", size=2.0, focal=0.6, eps2d=0.5),
        _small("narrow", focal=1.2, far=8.0, near=0.2, channels=17, gaussians=(150, 100)),
        _small("blind", pattern="blind", cameras=1),
        _small("edges", pattern="edges", cameras=2, near=0.5, far=8.0, width=96, gaussians=(12, 6, 18, 24)),
        _small("public_numbers", variant="pkb"),
        _small("from_below", size=2.0, focal=0.6, eps2d=0.5, lift=-0.6, height=72),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's sizes, in float32, and with its numbering",
        _large("fp32", width=512, height=512, extent=2.0),
        _large("public_numbers_fp32", "pkb", width=512, height=512, extent=2.0),
    ),
    pc.preset(
        "production_garden",
        "Mip-NeRF 360 garden, 725000 Gaussians and a camera per rank",
        _large("fp32", gaussians=(725_000,), width=1297, height=840, size=0.02),
    ),
    pc.preset(
        "production_city",
        "a large aerial scene, 3.1 million Gaussians and a camera per rank, most of them out of sight",
        _large("fp32", gaussians=(3_100_000,), width=1600, height=900, focal=1.2, extent=12.0, size=0.02),
    ),
    pc.preset(
        "production_four_cameras",
        "250000 Gaussians and four cameras per rank",
        _large("fp32", gaussians=(250_000,), cameras=4, width=1920, height=1080, size=0.02),
    ),
)


_GENERAL = pc.where(lambda c: c.params.get("pattern") != "edges")
_ONE_CAMERA = tuple(f"{item.name}/{spec.label}" for item in PRESETS for spec in item.cases if spec.params["cameras"] == 1)
_SEVERAL_CAMERAS = pc.where(lambda c: c["cameras"] > 1 and c.params.get("pattern") != "edges")
_NOT_BLIND = pc.where(lambda c: c.params.get("pattern") != "blind")
_DEFAULT = pc.where(lambda c: c.variant == "default" and c.params.get("pattern") != "blind")
_ORDINARY = ("small/two_cameras", "small/one_camera", "small/narrow")
_FIXED = "how many Gaussians each camera sees of each rank is the same in every call"
_EDGES = "small/edges"
_POINTS = "all Gaussians are points there, whose projections are alike"
_ZERO = "a rank's only camera has number 0"

PROBLEM = pc.Problem(
    id=61,
    slug="gaussian_splat_projection_exchange",
    title="Gaussian splatting: project to all cameras, cull, and send to the camera's rank",
    category="geometric_spatial",
    parallelism=("spatial", "data"),
    origin="gsplat and Grendel-GS: distributed front end of a renderer of 3D Gaussians",
    summary=(
        "A rank has N Gaussians (means (N, 3), quats (N, 4) as w, x, y, z of any length, scales (N, 3), opacities (N,), colors (N, D)) "
        "and C cameras (viewmats (C, 4, 4) world to camera, Ks (C, 3, 3)), C equal on all ranks. With p = R mean + t and the covariance"
        " Sigma = R R_q diag(scales)^2 R_q^T R^T: A = J Sigma J^T + eps2d I, J the Jacobian of the projection without skew at p with "
        "p_x / p_z and p_y / p_z kept within the picture widened by 15 % of its size on every side; radii = ceil(3.33 sqrt(diag A)); "
        "means2d = K p / "
        "p_z, depth p_z, conic (A_11, -A_01, A_00) / det A. A Gaussian is seen if near < p_z < far and means2d +- radii overlaps (0, "
        "width) x (0, height), strictly. A rank returns what its cameras see of all ranks' Gaussians, ordered by source rank, camera, "
        "Gaussian: camera_ids (R,) from 0 to C - 1, gaussian_ids (R,) among all ranks' Gaussians in rank order, both int64, radii int32"
        " (R, 2), and float32 means2d (R, 2), depths (R,), conics (R, 3), opacities (R,), colors (R, D)."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    compare=compare,
    cost=cost,
    attainable=pc.Algorithm(
        "projection by the owner, counts, rows", "Zhao et al., Grendel, 2024; what the host waits for sizes is left out", _projected
    ),
    presets=PRESETS,
    variant_references={"pkb": public_reference},
    known_wrong_answers=(
        pc.wrong(
            "local_numbers", "Gaussians numbered within their rank", splat_answers.numbered(lambda c, rows, first: rows.gaussian), _DEFAULT
        ),
        pc.wrong(
            "destination_numbers",
            "Gaussians counted from the destination's first",
            splat_answers.numbered(lambda c, rows, first: rows.gaussian + first[c.rank]),
            _DEFAULT,
        ),
        pc.wrong("world_cameras", "cameras numbered among all ranks'", splat_answers.world_cameras, _NOT_BLIND),
        pc.wrong("sources_reversed", "the last rank's Gaussians first", splat_answers.reordered(lambda rows: (-rows.source,)), _NOT_BLIND),
        pc.wrong("camera_major", "rows by camera, then source", splat_answers.reordered(lambda rows: (rows.camera,)), _SEVERAL_CAMERAS),
        pc.wrong(
            "gaussian_major",
            "rows by source, then Gaussian",
            splat_answers.reordered(lambda rows: (rows.source, rows.gaussian)),
            _SEVERAL_CAMERAS,
        ),
        pc.wrong("jacobian_not_clamped", "J wherever the Gaussian is", splat_answers.projected_wrongly(clamp=1e6), ("small/large",)),
        pc.wrong(
            "upper_side_not_clamped",
            "J wherever the Gaussian is, if that is above the picture",
            splat_answers.projected_wrongly(low_clamp=(0.3, 1e6)),
            ("small/from_below",),
        ),
        pc.wrong("camera_not_turned", "covariances not turned to the camera", splat_answers.projected_wrongly(turned=False), _GENERAL),
        pc.wrong("intrinsics_of_another_call", "focal lengths that do not change, and no skew", _undisturbed, _ORDINARY),
        pc.wrong("eps2d_forgotten", "covariances without eps2d", splat_answers.projected_wrongly(eps2d=1e-3)),
        pc.wrong(
            "quaternions_reversed",
            "the real part taken for the last",
            splat_answers.with_arguments(lambda args: (args[0], args[1].roll(1, 1), *args[2:])),
            _GENERAL,
        ),
        pc.wrong(
            "conjugate_quaternions",
            "rotations the other way round",
            splat_answers.with_arguments(lambda args: (args[0], args[1] * args[1].new_tensor([1.0, -1.0, -1.0, -1.0]), *args[2:])),
            _GENERAL,
        ),
    ),
    alternative_solutions=pc.alternatives(factored_fp32=splat_answers.factored, covariances_fp32=splat_answers.by_covariances),
    excused={
        "previous/camera_ids": _FIXED,
        **{f"previous/{name}@{_EDGES}": _POINTS for name in ("radii", "conics")},
        f"previous_mean/radii@{_EDGES}": _POINTS,
        **{
            f"another_rank/{name}@{_EDGES}": "all ranks see the same Gaussians there, from two sides" for name in NAMES if name != "means2d"
        },
        **{
            f"{null}/camera_ids@{name}": _ZERO
            for name in _ONE_CAMERA
            for null in ("zeros", "previous_mean", "input_mean", "another_rank", "echo")
        },
    },
    graph=False,
    graph_reason="how many rows a rank gets depends on what its cameras see, and the host must wait for that number",
    notes=(
        "gaussian_ids count from the source rank's first Gaussian. The public reference counts from the destination's, so that rows of "
        "different sources cannot be told apart; the pkb variant of the small and pkb presets keeps that.",
        "The public benchmark feeds bfloat16, in which pixels are two apart and a correctly rounded computation fails its check. Here "
        "everything is float32.",
        "All its cameras are equal and see every Gaussian, so that nothing is culled and all splits are equal. Here cameras stand around "
        "the scene and see different parts of it, and ranks may see or show nothing (where the public reference crashes).",
        "K's skew moves means2d but has no part in J, as in the public reference; there it is always 0, here it is not.",
        "Numbers of rows must be the same in every call, so that a case has one scene; calls differ by a rigid motion, order, colours, "
        "opacities and changes of scales, places, focal lengths and skew too small to decide what is seen. A radius next to a whole number "
        "may be rounded either way.",
    ),
    speed_note=(
        "Likely because the public one reads counts from the device at every allocation and split, this one once; inputs differ too: "
        "float32 here, and cameras see only a part of the scene."
    ),
)
