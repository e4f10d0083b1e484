"""Gaussian splatting: projections of Gaussians to cameras, two ways, and scenes in which it is certain who sees whom."""

import functools
import math
import zlib
from dataclasses import dataclass

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64

# Standard deviations to which a Gaussian counts as visible, and the smallest determinant of its projection.
EXTENT_SIGMAS, MIN_DETERMINANT = 3.33, 1e-10

# How far out of the picture, in half pictures, the Jacobian is still taken where the Gaussian is.
_CLAMP = 0.3

# Pairs of a Gaussian and a camera that are looked at together when a scene is made.
_PAIRS = 2**23

# Gaussians of every rank that the cost model projects to find what share of them cameras see.
_SAMPLE = 160


@dataclass
class Projection:
    """Of N Gaussians to C cameras.

    Attributes:
        means2d: (C, N, 2) pixels. depths: (C, N).
        covariance: (C, N, 3): entries 00, 01 and 11 of the projected covariance with eps2d added.
        in_depth: (C, N): near < depth < far.
        spread: (C, N): bound of the terms behind a covariance's entry.
        position_spread: (C, N, 2), depth_spread: (C, N): of those behind ``means2d`` and ``depths``.
    """

    means2d: torch.Tensor
    depths: torch.Tensor
    covariance: torch.Tensor
    in_depth: torch.Tensor
    spread: torch.Tensor
    position_spread: torch.Tensor
    depth_spread: torch.Tensor

    def extents(self) -> torch.Tensor:
        """(C, N, 2): the radii before they are rounded up to whole pixels."""
        return EXTENT_SIGMAS * self.covariance[..., ::2].sqrt()

    def visible(self, radii: torch.Tensor, width: int, height: int) -> torch.Tensor:
        """(C, N): in depth, and the box of these radii overlaps the picture."""
        size = radii.new_tensor([width, height])
        inside = (self.means2d + radii > 0) & (self.means2d - radii < size)
        return self.in_depth & inside.all(-1) & (radii > 0).all(-1)

    def determinant(self) -> torch.Tensor:
        """(C, N): of the projected covariance, no less than the smallest that is allowed."""
        a, b, c = self.covariance.unbind(-1)
        return (a * c - b * b).clamp(min=MIN_DETERMINANT)

    def conics(self) -> torch.Tensor:
        """(C, N, 3): the inverse of the projected covariance."""
        a, b, c = self.covariance.unbind(-1)
        return torch.stack((c, -b, a), -1) / self.determinant().unsqueeze(-1)


def rotations(quats: torch.Tensor) -> torch.Tensor:
    """(N, 3, 3) of quaternions (w, x, y, z) of any length: v -> v + 2 w (u x v) + 2 u x (u x v), u their vector part at length one."""
    unit = torch.nn.functional.normalize(quats, dim=-1)
    w, u = unit[..., :1], unit[..., 1:]
    identity = torch.eye(3, dtype=quats.dtype, device=quats.device).expand(*quats.shape[:-1], 3, 3)
    cross = torch.linalg.cross(u.unsqueeze(-2).expand_as(identity), identity).transpose(-1, -2)
    rotation: torch.Tensor = identity + 2 * w.unsqueeze(-1) * cross + 2 * cross @ cross
    return rotation


def quaternion_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Products (N, 4) of one quaternion (4,) with many (N, 4): first the rotation on the right."""
    w, u = left[0], left[1:].expand_as(right[:, 1:])
    scalar = w * right[:, :1] - (u * right[:, 1:]).sum(-1, keepdim=True)
    return torch.cat((scalar, w * right[:, 1:] + right[:, :1] * u + torch.linalg.cross(u, right[:, 1:])), dim=1)


def project(
    means: torch.Tensor,
    quats: torch.Tensor,
    scales: torch.Tensor,
    viewmats: torch.Tensor,
    intrinsics: torch.Tensor,
    *,
    width: int,
    height: int,
    eps2d: float,
    near: float,
    far: float,
    clamp: float = _CLAMP,
    low_clamp: tuple[float, float] | None = None,
    turned: bool = True,
) -> Projection:
    """The projection in the inputs' precision, from the factor J R_c R_q diag(s) of the projected covariance.

    ``turned`` False leaves out R_c, which is wrong, and so is another ``low_clamp``, for the left and the upper side of the picture.
    """
    turn, shift = viewmats[:, :3, :3], viewmats[:, :3, 3]
    p = torch.einsum("cij,nj->cni", turn, means) + shift.unsqueeze(1)
    p_spread = torch.einsum("cij,nj->cni", turn.abs(), means.abs()) + shift.abs().unsqueeze(1)
    z = p[..., 2]
    focal = intrinsics.diagonal(dim1=-2, dim2=-1)[:, None, :2]
    centre = intrinsics[:, None, :2, 2]
    size = means.new_tensor([width, height])
    margin = clamp * 0.5 * size / focal
    slope = p[..., :2] / z.unsqueeze(-1)
    low_margin = margin if low_clamp is None else means.new_tensor(low_clamp) * 0.5 * size / focal
    kept = slope.clamp(-centre / focal - low_margin, (size - centre) / focal + margin)
    scale = focal / z.unsqueeze(-1)

    factor = rotations(quats) * scales.unsqueeze(-2)
    seen = torch.einsum("cij,njk->cnik", turn, factor) if turned else factor.expand(len(turn), *factor.shape)
    rows = scale.unsqueeze(-1) * (seen[..., :2, :] - kept.unsqueeze(-1) * seen[..., 2:, :])
    a, b, c = (rows[..., 0, :].square().sum(-1), (rows[..., 0, :] * rows[..., 1, :]).sum(-1), rows[..., 1, :].square().sum(-1))

    means2d = torch.einsum("cij,cnj->cni", intrinsics[:, :2], p) / z.unsqueeze(-1)
    jacobian = scale.square() * (1 + kept.square())
    relative = 1 + (p_spread.amax(-1) / z.abs())
    return Projection(
        means2d=means2d,
        depths=z,
        covariance=torch.stack((a + eps2d, b, c + eps2d), -1),
        in_depth=(z > near) & (z < far),
        spread=jacobian.sum(-1) * scales.square().amax(-1) * relative + eps2d,
        position_spread=scale.abs() * (p_spread[..., :2] + slope.abs() * p_spread[..., 2:]) + centre.abs() + (focal * slope).abs(),
        depth_spread=p_spread[..., 2],
    )


def project_covariances(
    means: torch.Tensor,
    quats: torch.Tensor,
    scales: torch.Tensor,
    viewmats: torch.Tensor,
    intrinsics: torch.Tensor,
    width: int,
    height: int,
    eps2d: float,
    near: float,
    far: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Radii (C, N, 2), zero where nothing is seen, means (C, N, 2), depths (C, N) and conics (C, N, 3), all in the inputs' dtype."""
    w, x, y, z = torch.nn.functional.normalize(quats, dim=-1).unbind(-1)
    rotation = torch.stack(
        (
            1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
        ),
        dim=-1,
    ).view(-1, 3, 3)  # fmt: skip
    factor = rotation * scales.unsqueeze(-2)
    turn = viewmats[:, None, :3, :3]
    covariance = turn @ (factor @ factor.transpose(-1, -2)) @ turn.transpose(-1, -2)
    p = (turn @ means.unsqueeze(-1)).squeeze(-1) + viewmats[:, None, :3, 3]
    px, py, pz = p.unbind(-1)

    fx, fy = intrinsics[:, None, 0, 0], intrinsics[:, None, 1, 1]
    cx, cy = intrinsics[:, None, 0, 2], intrinsics[:, None, 1, 2]
    beyond_x, beyond_y = 0.15 * width / fx, 0.15 * height / fy
    u = pz * torch.clamp(px / pz, -(cx / fx + beyond_x), (width - cx) / fx + beyond_x)
    v = pz * torch.clamp(py / pz, -(cy / fy + beyond_y), (height - cy) / fy + beyond_y)
    zero = torch.zeros_like(pz)
    jacobian = torch.stack((fx / pz, zero, -fx * u / pz**2, zero, fy / pz, -fy * v / pz**2), dim=-1).view(*pz.shape, 2, 3)
    projected = jacobian @ covariance @ jacobian.transpose(-1, -2)
    means2d = (p @ intrinsics[:, :2].transpose(-1, -2)) / pz.unsqueeze(-1)

    a, d = projected[..., 0, 0] + eps2d, projected[..., 1, 1] + eps2d
    b, c = projected[..., 0, 1], projected[..., 1, 0]
    determinant = (a * d - b * c).clamp(min=MIN_DETERMINANT)
    conics = torch.stack((d, -(b + c) / 2, a), dim=-1) / determinant.unsqueeze(-1)
    radii = (EXTENT_SIGMAS * torch.stack((a, d), dim=-1).sqrt()).ceil()
    size = means2d.new_tensor([width, height])
    inside = ((means2d + radii > 0) & (means2d - radii < size)).all(-1) & (pz > near) & (pz < far)
    return torch.where(inside.unsqueeze(-1), radii, 0.0).to(torch.int32), means2d, pz, conics


@dataclass(frozen=True)
class Scene:
    """What a case's Gaussians and cameras are drawn from, the same in every call.

    Attributes:
        name: seeds the scene.
        counts: Gaussians of every rank.
        cameras: per rank.
        extent: Gaussians lie in a box of this half width (and a quarter of it upwards), around which cameras stand.
        distance: of the cameras from the middle of the box.
        lift: the least height of a camera above the middle of the box, in distances; others are up to 0.4 higher.
        focal: in picture widths.
        size: the largest standard deviation of a Gaussian.
        blind: the last rank's cameras look away from the box, and no camera sees any of the first rank's Gaussians.
    """

    name: str
    counts: tuple[int, ...]
    cameras: int
    width: int
    height: int
    extent: float
    distance: float
    focal: float
    size: float
    near: float
    far: float
    eps2d: float
    lift: float
    blind: bool

    def viewpoints(self) -> tuple[torch.Tensor, torch.Tensor]:
        """World-to-camera matrices (W C, 4, 4) and intrinsics (W C, 3, 3), float64 on the CPU: cameras on a ring, looking at the box."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        count = len(self.counts) * self.cameras
        angle, lift, aim = (torch.rand(count, 1, generator=generator, dtype=FP64) for _ in range(3))
        angle = 2 * math.pi * (angle + torch.arange(count).view(-1, 1)) / count
        place = self.distance * torch.cat((angle.cos(), angle.sin(), self.lift + 0.4 * lift), 1)
        target = self.extent * 0.2 * torch.cat((aim.cos(), aim.sin(), 0 * aim), 1) * (2 * aim - 1)
        up = place.new_tensor([0.0, 0.0, 1.0])
        forward = torch.nn.functional.normalize(target - place, dim=1)
        if self.blind:
            outwards = place[-self.cameras :] - target[-self.cameras :]
            outwards[:, 2] = -0.5 * self.distance
            forward[-self.cameras :] = torch.nn.functional.normalize(outwards, dim=1)
        right = torch.nn.functional.normalize(torch.linalg.cross(forward, up.expand_as(forward)), dim=1)
        turn = torch.stack((right, torch.linalg.cross(forward, right), forward), 1)
        views = torch.eye(4, dtype=FP64).repeat(count, 1, 1)
        views[:, :3, :3], views[:, :3, 3] = turn, -(turn @ place.unsqueeze(-1)).squeeze(-1)
        focal = self.focal * self.width * (1 + 0.1 * torch.rand(count, generator=generator, dtype=FP64))
        intrinsics = torch.eye(3, dtype=FP64).repeat(count, 1, 1)
        intrinsics[:, 0, 0], intrinsics[:, 1, 1] = focal, 0.97 * focal
        intrinsics[:, 0, 2], intrinsics[:, 1, 2] = 0.48 * self.width, 0.53 * self.height
        return views, intrinsics


@functools.lru_cache(maxsize=8)
def viewpoints_on(scene: Scene, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The scene's viewpoints on a device, not to be changed in place."""
    return tuple(tensor.to(device) for tensor in scene.viewpoints())


@functools.lru_cache(maxsize=8)
def settled_gaussians(scene: Scene, rank: int, device: torch.device, count: int | None = None) -> tuple[torch.Tensor, ...]:
    """One rank's Gaussians: means (N, 3), quaternions (N, 4), scales (N, 3), and how far each may be moved (N, 1), float32.

    Whether a camera sees one must not depend on small changes: those within a pixel of a border, near the camera's plane or beyond four
    fifths of the largest depth are taken far up, where no camera of the ring looks. Of the rest it does not, if a mean is moved by no more
    than that length, scales are changed by 5 %, and all is rounded to float32.
    """
    generator = pc.seeded_generator(device, zlib.crc32(f"{scene.name}/{rank}".encode()))
    number = scene.counts[rank] if count is None else count

    def uniform(width: int) -> torch.Tensor:
        return torch.rand(number, width, generator=generator, device=device)

    means = (2 * uniform(3) - 1) * scene.extent * means_shape(device)
    quats = torch.randn(number, 4, generator=generator, device=device)
    scales = scene.size * torch.exp(-3 * uniform(3))
    scales[::16] = 0.0
    views, intrinsics = (tensor.to(device, FP32) for tensor in scene.viewpoints())
    unsure = torch.zeros(number, dtype=torch.bool, device=device)
    reach = means.new_full((number,), math.inf)
    together = max(1, _PAIRS // max(number, 1))
    for first in range(0, len(views), together):
        some = slice(first, first + together)
        seen = project(
            means, quats, scales, views[some], intrinsics[some],
            width=scene.width, height=scene.height, eps2d=scene.eps2d, near=scene.near, far=scene.far,
        )  # fmt: skip
        extents, depth = seen.extents(), seen.depths
        least, most = (0.93 * extents - 1.0).clamp_(min=0.5), 1.07 * extents + 3.0
        differ = seen.visible(least, scene.width, scene.height) != seen.visible(most, scene.width, scene.height)
        differ |= (depth > -0.05 * scene.distance) & (depth < max(0.05 * scene.distance, 2 * scene.near))
        differ |= depth > 0.8 * scene.far
        unsure |= differ.any(0)
        reach = torch.minimum(reach, (depth.abs() / intrinsics[some, None, 0, 0]).amin(0))
    if scene.blind and rank == 0:
        unsure |= True
    up = means.new_tensor([0.0, 0.0, 1e3 * scene.distance])
    means = torch.where(unsure.unsqueeze(1), up, means)
    return means, quats, scales, (0.25 * reach.unsqueeze(1)).masked_fill_(unsure.unsqueeze(1), 0.0)


@functools.lru_cache(maxsize=64)
def visible_shares(scene: Scene) -> tuple[tuple[float, ...], ...]:
    """Share of every rank's Gaussians (first index) that each camera of the world sees, from a sample."""
    views, intrinsics = (tensor.to(FP32) for tensor in scene.viewpoints())
    shares = []
    for rank, count in enumerate(scene.counts):
        means, quats, scales, _ = settled_gaussians(scene, rank, torch.device("cpu"), min(count, _SAMPLE))
        view = project(
            means, quats, scales, views, intrinsics,
            width=scene.width, height=scene.height, eps2d=scene.eps2d, near=scene.near, far=scene.far,
        )  # fmt: skip
        seen = view.visible(view.extents().ceil(), scene.width, scene.height).to(FP32).mean(1)
        shares.append(tuple(seen.tolist()))
    return tuple(shares)


def means_shape(device: torch.device) -> torch.Tensor:
    """Sides of the box of Gaussians relative to each other."""
    return torch.tensor([1.0, 1.0, 0.25], device=device)


def edge_gaussians(draw: pc.Draw, scene: Scene, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussians without size in places that float32 holds exactly, of radius 2 from eps2d alone, in random order.

    Of every six one is somewhere in the picture, and others at the near plane, at the far plane, touching the picture's side from outside,
    overlapping it by a quarter of a pixel, and behind the camera. Only the first and the fifth are seen.
    """
    places = [(0.0, 0.0, 1.0), (0.0, 0.0, scene.near), (0.0, 0.0, scene.far), (50 / 64, 0.0, 1.0), (49.75 / 64, 0.0, 1.0), (0.0, 0.0, -1.0)]
    means = pc.constant(places, draw.device).repeat(count // len(places), 1)
    inside = means[:: len(places)]
    inside[:, 2] = draw.integers(128, 256, (len(inside),), FP32) / 64
    inside[:, :2] = draw.integers(-40, 41, (len(inside), 2), FP32) / 64 * inside[:, 2:]
    means = means[draw.permutation(len(means))]
    return means, draw.normal((len(means), 4), FP32), torch.zeros_like(means)


def edge_cameras(draw: pc.Draw, scene: Scene, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cameras in the origin, looking along z, upside down on every other rank: 64 pixels per unit of slope, centred in the picture."""
    views = torch.eye(4, device=draw.device).repeat(scene.cameras, 1, 1)
    views[:, :2] *= 1 - 2 * (rank % 2)
    row = [[64.0, 0.0, scene.width / 2], [0.0, 64.0, scene.height / 2], [0.0, 0.0, 1.0]]
    return views, pc.constant(row, draw.device).repeat(scene.cameras, 1, 1)
