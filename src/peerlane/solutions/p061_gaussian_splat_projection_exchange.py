"""Problem 61, Gaussians seen by all ranks' cameras: one kernel marks what is seen, and one stores every row where it belongs.

The first kernel leaves a bit for each Gaussian and camera. Shapes need one question to the device. The second kernel projects again what
is seen, and stores it at the camera's rank. The reference launches some 150 kernels. Bound by the question, and at large sizes by links.

The next call overwrites the results, which lie in the arena."""

import torch

from peerlane.device import (
    F32,
    U32,
    U64,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Flags,
    Group,
    Pointer,
    array,
    communicator,
    group_of,
    per_group,
)
from peerlane.device.collectives.counts import share_counts
from peerlane.device.host.group import MAX_RANKS
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int view_floats = 16, camera_floats = 25;  // rows of the view matrix, then of the intrinsics

// A covariance is factor factor^T.
struct Gaussian {
    float mean[3], factor[3][3];

    __device__ Gaussian(const SplatRows& args, u32 g) {
        float q[4], square = 0.0f;
        for (int i = 0; i < 4; ++i) q[i] = args.quats[4 * g + i], square += q[i] * q[i];
        const float norm = fmaxf(sqrtf(square), 1e-12f), w = q[0] / norm, x = q[1] / norm, y = q[2] / norm, z = q[3] / norm;
        const float rotation[3][3] = {
            {1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)},
            {2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)},
            {2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)},
        };
        for (int i = 0; i < 3; ++i) {
            mean[i] = args.means[3 * g + i];
            for (int j = 0; j < 3; ++j) factor[i][j] = rotation[i][j] * args.scales[3 * g + j];
        }
    }
};

struct Projection {
    float x, y, depth, a, b, d, radius_x, radius_y;  // a, b, d: of the covariance in the picture

    __device__ Projection(const SplatRows& args, const Gaussian& gaussian, const float* view) {
        const float *k = view + view_floats, fx = k[0], fy = k[4], width = args.width, height = args.height;
        float p[3], turned[3][3];
        for (int i = 0; i < 3; ++i) {
            const float* row = view + 4 * i;
            p[i] = row[0] * gaussian.mean[0] + row[1] * gaussian.mean[1] + row[2] * gaussian.mean[2] + row[3];
            for (int j = 0; j < 3; ++j) {
                turned[i][j] = row[0] * gaussian.factor[0][j] + row[1] * gaussian.factor[1][j] + row[2] * gaussian.factor[2][j];
            }
        }
        x = (k[0] * p[0] + k[1] * p[1] + k[2] * p[2]) / p[2], y = (k[3] * p[0] + k[4] * p[1] + k[5] * p[2]) / p[2], depth = p[2];
        const float beyond_x = 0.15f * width / fx, beyond_y = 0.15f * height / fy;
        const float u = fminf(fmaxf(p[0] / p[2], -(k[2] / fx + beyond_x)), (width - k[2]) / fx + beyond_x);
        const float v = fminf(fmaxf(p[1] / p[2], -(k[5] / fy + beyond_y)), (height - k[5]) / fy + beyond_y);
        a = d = args.eps2d, b = 0.0f;
        for (int j = 0; j < 3; ++j) {
            const float along_x = fx / p[2] * (turned[0][j] - u * turned[2][j]), along_y = fy / p[2] * (turned[1][j] - v * turned[2][j]);
            a += along_x * along_x, b += along_x * along_y, d += along_y * along_y;
        }
        radius_x = ceilf(3.33f * sqrtf(a)), radius_y = ceilf(3.33f * sqrtf(d));
    }
    __device__ bool seen(const SplatRows& args) const {
        const bool inside = x + radius_x > 0 && x - radius_x < args.width && y + radius_y > 0 && y - radius_y < args.height;
        return inside && radius_x > 0 && radius_y > 0 && depth > args.near && depth < args.far;
    }
};

// A warp takes 32 Gaussians; bits of the masks and counts lie by camera. Sizes have been shared since the callers of all ranks read the
// rows before: they may be overwritten.
extern "C" __global__ void __launch_bounds__(256)
    splat_rows(const __grid_constant__ Arena arena, const __grid_constant__ SplatRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const u32 words = (args.gaussians + 31) / 32, cameras = WORLD_SIZE * args.own_cameras, lane = Warp{}.thread();
    each_row(words, [&](u32 word) {
        const u32 g = word * 32 + lane;
        const Gaussian gaussian(args, min(g, args.gaussians - 1));
        for (u32 turn = 0; turn < cameras; ++turn) {
            const u32 camera = (turn + (arena.rank + 1) * args.own_cameras) % cameras, at = camera * words + word;
            if (!SENDS) {
                const bool seen = Projection(args, gaussian, args.views + camera * camera_floats).seen(args) && g < args.gaussians;
                const u32 mask = __ballot_sync(0xffffffffu, seen);
                if (lane == 0) args.masks[at] = mask, args.counts[at] = __popc(mask);
                continue;
            }
            const u32 mask = args.masks[at];
            if ((mask >> lane & 1) == 0) continue;
            const Projection p(args, gaussian, args.views + camera * camera_floats);
            const u32 owner = camera / args.own_cameras;
            const u64 row = args.base[owner] + args.ends[at] - __popc(mask) + __popc(mask & ((1u << lane) - 1));
            const auto numbers = [&](u64 offset) { return reinterpret_cast<u64*>(arena.peer(owner, offset)); };
            const auto floats = [&](u64 offset) { return reinterpret_cast<float*>(arena.peer(owner, offset)); };
            const auto radii = reinterpret_cast<int*>(arena.peer(owner, args.radii)) + 2 * row;
            numbers(args.camera_ids)[row] = camera % args.own_cameras, numbers(args.gaussian_ids)[row] = args.first + g;
            radii[0] = int(p.radius_x), radii[1] = int(p.radius_y);
            floats(args.means2d)[2 * row] = p.x, floats(args.means2d)[2 * row + 1] = p.y, floats(args.depths)[row] = p.depth;
            const float determinant = fmaxf(p.a * p.d - p.b * p.b, 1e-10f), conic[3] = {p.d, -p.b, p.a};
            for (int i = 0; i < 3; ++i) floats(args.conics)[3 * row + i] = conic[i] / determinant;
            floats(args.opacities_out)[row] = args.opacities[g];
            for (u32 i = 0; i < args.channels; ++i) {
                floats(args.colors_out)[row * args.channels + i] = args.colors[u64(g) * args.channels + i];
            }
        }
    });
    if (SENDS) Peers<WORLD_SIZE>(arena, args.flags).barrier(blockIdx.x, epoch);
}
"""
ROW_BYTES = {"camera_ids": 8, "gaussian_ids": 8, "radii": 8, "means2d": 8, "depths": 4, "conics": 12, "opacities_out": 4}
SPLAT_ROWS = DeclaredKernel(
    "splat_rows", SOURCE, epochs=Epochs(), flags=Flags(), **{name: Buffer() for name in (*ROW_BYTES, "colors_out")},
    **{name: Pointer("const float*") for name in ("means", "quats", "scales", "opacities", "colors", "views")},
    masks=Pointer("u32*"), counts=Pointer("u32*"), ends=Pointer("const u64*"), base=array(U64, MAX_RANKS), first=U64, gaussians=U32,
    own_cameras=U32, channels=U32, width=F32, height=F32, eps2d=F32, near=F32, far=F32,
)  # fmt: skip


@per_group
def splat_rows(group: Group, sends: bool, capacity: int, channels: int) -> BoundKernel:
    """Makes the launch of a group. ``capacity``: of rows at a rank."""
    sizes = {name: nbytes * capacity for name, nbytes in ROW_BYTES.items()}
    return SPLAT_ROWS.bind(
        group, grid=group.sm_count, block=min(256, group.max_threads), defines={"SENDS": int(sends)},
        sizes={"flags": group.sm_count, "colors_out": 4 * channels * capacity, **sizes}, channels=channels,
    )  # fmt: skip


def solution(
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
        raise UsageError(f"camera_model is {camera_model!r}: expected 'pinhole'")
    group, channels = group_of(), colors.shape[1]
    ranks, words = group.world_size, -(-len(means) // 32)
    views = communicator(group).all_gather(torch.cat((viewmats.flatten(1), Ks.flatten(1)), dim=1)).flatten(0, 1)
    given = {"means": means, "quats": quats, "scales": scales, "opacities": opacities, "colors": colors}
    masks, counts = torch.empty((2, ranks, len(viewmats), words), dtype=torch.int32, device=means.device)
    arguments = {
        **{name: tensor.contiguous() for name, tensor in given.items()}, "views": views, "masks": masks, "gaussians": len(means),
        "own_cameras": len(viewmats), "width": image_width, "height": image_height, "eps2d": eps2d, "near": near_plane, "far": far_plane,
    }  # fmt: skip
    splat_rows(group, False, 0, channels)(**arguments, counts=counts)
    ends = counts.view(-1).cumsum(0)
    sent = torch.nn.functional.pad(counts.view(ranks, -1).sum(1), (1, 0), value=len(means))
    sizes, *rows = zip(*share_counts(group, sent), strict=True)  # of every rank, and of every rank at each

    before = [sum(rows[rank][group.rank] for rank in range(owner)) for owner in range(ranks)]
    base = [sum(at_owner[: group.rank]) - own for at_owner, own in zip(rows, before, strict=True)]
    launch = splat_rows(group, True, 1 << max(map(sum, rows)).bit_length(), channels)
    launch(**arguments, counts=None, ends=ends, base=base + [0] * (MAX_RANKS - ranks), first=sum(sizes[: group.rank]))
    received = sum(rows[group.rank])
    return (
        launch.tensor("camera_ids", (received,), torch.int64),
        launch.tensor("gaussian_ids", (received,), torch.int64),
        launch.tensor("radii", (received, 2), torch.int32),
        launch.tensor("means2d", (received, 2), torch.float32),
        launch.tensor("depths", (received,), torch.float32),
        launch.tensor("conics", (received, 3), torch.float32),
        launch.tensor("opacities_out", (received,), torch.float32),
        launch.tensor("colors_out", (received, channels), torch.float32),
    )
