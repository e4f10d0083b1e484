"""Problem 87, a convolution over an image with sharded rows: border rows go to both neighbours while the image is turned.

The launch that exchanges borders puts channels innermost, and the neighbours' rows above and below. One product reads windows of the image
where they lie (``families/convolution.py``). One launch turns the result and adds the bias. The exchange does not overlap the convolution,
which is by far the longer of the two. Bound by the convolution. Where there is a stride, or channels make no whole tiles,
``peerlane/collectives/exchange.cuh`` exchanges, and cuDNN convolves."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, communicator, group_of, per_group
from peerlane.solutions.families.convolution import TILE, TILE_BYTES, Images, channels_of, convolve, whole_words

SOURCE = (
    TILE
    + r"""
extern "C" __global__ void __launch_bounds__(1024)
    turned_rows(const __grid_constant__ Arena arena, const __grid_constant__ TurnedRows args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const int rank = arena.rank, before = rank > 0 ? rank - 1 : -1, after = rank + 1 < WORLD_SIZE ? rank + 1 : -1;
    // The convolution of the call before has read this rank's rows: neighbours may write theirs.
    if (blockIdx.x == 0 && before >= 0) peers.acknowledge(before, 0, epoch);
    if (blockIdx.x == 0 && after >= 0) peers.acknowledge(after, 0, epoch);

    const Turned matrix{args.channels, args.columns, u64(args.rows) * args.columns * 2, u64(args.channels) * 2};
    const u32 across = (args.columns + 63) / 64, tiles = (args.channels + 31) / 32 * across;
    // `count` rows of every image, from `first` on, to row `target` and the next of rank q, behind the zeros at its begin.
    const auto turn_rows = [&](u32 first, u32 count, int q, u32 target) {
        each_row(args.images * count * tiles, [&](u32 item) {
            const u32 row = item / tiles % count, image = item / tiles / count, place = item % tiles;
            const char* const from = args.x + (u64(image) * args.channels * args.rows + first + row) * args.columns * 2;
            const u64 line = u64(image) * (args.rows + 2 * args.padding) + target + row;
            char* const to = arena.peer(q, args.padded) + (line * (args.columns + args.padding) + args.padding) * args.channels * 2;
            turn_tile(matrix, from, to, place / across * 32, place % across * 64, [](u32 word, u32) { return word; });
        });
    };
    turn_rows(0, args.rows, rank, args.padding);
    if (before >= 0) {
        peers.wait(before, 0, epoch);
        turn_rows(0, args.padding, before, args.padding + args.rows);
        peers.signal(before, 1 + blockIdx.x, epoch);
    }
    if (after >= 0) {
        peers.wait(after, 0, epoch);
        turn_rows(args.rows - args.padding, args.padding, after, 0);
        peers.signal(after, 1 + blockIdx.x, epoch);
    }
    if (before >= 0) peers.wait(before, 1 + blockIdx.x, epoch);
    if (after >= 0) peers.wait(after, 1 + blockIdx.x, epoch);
}
"""
)
TURNED_ROWS = DeclaredKernel(
    "turned_rows", SOURCE, epochs=Epochs(), flags=Flags(), padded=Buffer(align=1024), x=Pointer("const char*"),
    **dict.fromkeys(("images", "channels", "rows", "columns", "padding"), U32),
)  # fmt: skip


@per_group
def turned_rows(group: Group, shape: tuple[int, ...], padding: int, dtype: torch.dtype) -> tuple[BoundKernel, torch.Tensor]:
    """Returns the kernel, and the points (points, channels) where it puts x and the rows around it. Zeros to the left of a row are also
    those to the right of the row before."""
    images, channels, rows, columns = shape
    points, block = (images * (rows + 2 * padding) * (columns + padding), channels), min(1024, group.max_threads)
    bound = TURNED_ROWS.bind(
        group, grid=group.sm_count, block=block, shared_bytes=block // 32 * TILE_BYTES, resident=True, images=images, channels=channels,
        rows=rows, columns=columns, padding=padding, sizes={"flags": 1 + group.sm_count, "padded": 2 * points[0] * channels},
    )  # fmt: skip
    return bound, bound.tensor("padded", points, dtype)


def solution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int = 1,
    padding: int = 1,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, (batch, channels, rows, columns), (outputs, _, height, width) = group_of(group), x.shape, weight.shape
    images = Images(
        batch, 1, rows + 2 * padding, columns + padding, columns + 2 * padding - width + 1, (1, height, width), channels, outputs, x.dtype
    )
    if stride == 1 and padding and images.supported and columns % 2 == 0:
        launch, points = turned_rows(ranks, tuple(x.shape), padding, x.dtype)
        launch(x=whole_words(x))
        return channels_of(ranks, images, convolve(ranks, images, points, weight), bias).squeeze(2)
    if padding:
        ours = torch.stack((x[:, :, :padding], x[:, :, x.shape[2] - padding :]))
        theirs, side = torch.zeros_like(ours), ours.nbytes // 2
        sends, receives = [(0, 0)] * ranks.world_size, [(0, 0)] * ranks.world_size
        if ranks.rank > 0:
            sends[ranks.rank - 1], receives[ranks.rank - 1] = (0, side), (0, side)
        if ranks.rank + 1 < ranks.world_size:
            sends[ranks.rank + 1], receives[ranks.rank + 1] = (side, side), (side, side)
        communicator(ranks).exchange(theirs, ours, sends, receives)
        x = torch.cat((theirs[0], x, theirs[1]), 2)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return F.conv2d(x, weight, bias, stride=stride, padding=(0, padding))
