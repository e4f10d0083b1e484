"""Problem 72, a gated convolution over a sharded sequence: one kernel gates and sends, cuFFT convolves, one kernel sends results back.

Pushes store at the final place, zigzag included, so that no permutation is left. Transforms are as long as sequence and filter
together, not twice the sequence. Bound by HBM, which the transforms go through several times; the links carry the gated values and the
results once each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from peerlane.device import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Group, Pointer, element_type, group_of, per_group
from peerlane.solutions.families.gated_convolution import MOST_TAPS, Shape, aligned, gated_convolution

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int bytes = 4 / ELEMENT::lanes;
__device__ u32 place_of(int rank, u32 piece) { return piece == 0 ? rank : 2 * WORLD_SIZE - 1 - rank; }

// A rank has PIECES pieces of every channel, or all pieces of its own channels. To the owners of channels, or back.
extern "C" __global__ void __launch_bounds__(512)
    hyena_exchange(const __grid_constant__ Arena arena, const __grid_constant__ HyenaExchange args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    if (blockIdx.x == 0) peers.acknowledge_all(0, epoch);
    peers.wait_all(0, epoch);  // what read the results of the launch before has ended on all ranks
    const u32 all = WORLD_SIZE * PIECES, channels = WORLD_SIZE * args.own;
    for (int k = 0; k < WORLD_SIZE; ++k) {
        const int q = rank_after<WORLD_SIZE>(arena.rank, k);
        each_row(args.batch * args.own * PIECES, [&](u32 item) {
            const u32 piece = item % PIECES, channel = item / PIECES % args.own, b = item / PIECES / args.own;
            // As pieces of a tensor (batch, all channels, own pieces), and of one (batch, own channels, all pieces).
            const u64 by_pieces = (u64(b) * channels + (BACK ? arena.rank : q) * args.own + channel) * PIECES + piece;
            const u64 by_channels = (u64(b) * args.own + channel) * all + place_of(BACK ? q : arena.rank, piece);
            const RowOf<ELEMENT> source(args.x, BACK ? by_channels : by_pieces, args.length);
            const RowOf<ELEMENT> target(arena.peer(q, args.out), BACK ? by_pieces : by_channels, args.length);
            each_column(args.length, [&](u32 column) {
                float value[row_lanes], gate[row_lanes];
                source.load(column, value);
                if (!BACK) RowOf<ELEMENT>(args.gate, by_pieces, args.length).load(column, gate);
                for (int e = 0; e < row_lanes && !BACK; ++e) value[e] *= gate[e];
                target.store(column, value);
            });
        });
    }
    peers.barrier(1 + blockIdx.x, epoch);
}
"""
HYENA_EXCHANGE = DeclaredKernel(
    "hyena_exchange", SOURCE, epochs=Epochs(), flags=Flags(), out=Buffer(), x=Pointer("const char*"), gate=Pointer("const char*"),
    batch=U32, own=U32, length=U32,
)  # fmt: skip


@per_group
def hyena_exchange(group: Group, shape: tuple[int, ...], pieces: int, dtype: torch.dtype, back: bool) -> tuple[BoundKernel, torch.Tensor]:
    """Makes the launch for the shape (batch, channels, positions) of a rank's part; the result has it, or all positions of the rank's own
    channels."""
    batch, channels, local = shape
    own = channels // group.world_size
    threads = min(512, group.max_threads)
    grid = min(group.sm_count, batch * own * pieces)
    bound = HYENA_EXCHANGE.bind(
        group,
        grid=grid,
        block=threads,
        defines={"ELEMENT": element_type(dtype), "PIECES": pieces, "BACK": int(back)},
        sizes={"flags": 1 + grid, "out": batch * channels * local * dtype.itemsize},
        batch=batch,
        own=own,
        length=local // pieces,
    )
    return bound, bound.tensor("out", shape if back else (batch, own, group.world_size * local), dtype)


def transform_length(least: int) -> int:
    """Returns the smallest even number of at least this that cuFFT likes: a power of two times 1, 3, 5, 9 or 15."""
    return min(factor << max(1, (-(-least // factor) - 1).bit_length()) for factor in (1, 3, 5, 9, 15))


def solution(
    x1_seq: torch.Tensor,
    x2_seq: torch.Tensor,
    v_seq: torch.Tensor,
    h: torch.Tensor,
    conv_bias: torch.Tensor,
    num_groups: int,
    group_dim: int,
    group: dist.ProcessGroup | None = None,
    with_zigzag_splitting: bool = True,
) -> torch.Tensor:
    ranks, shape, pieces = group_of(group), tuple(v_seq.shape), 2 if with_zigzag_splitting else 1
    if h.shape[-1] <= MOST_TAPS and h.dtype == v_seq.dtype:
        batch, channels, local = shape
        part = Shape(batch, channels, local // pieces, pieces, num_groups, h.shape[-1], v_seq.dtype)
        if (convolve := gated_convolution(ranks, part)) is not None:
            out = v_seq.new_empty((batch, local, channels))
            convolve(x1=aligned(x1_seq), x2=aligned(x2_seq), v=aligned(v_seq), h=h.contiguous(), bias=conv_bias.contiguous(), out=out)
            return out
    there, gated = hyena_exchange(ranks, shape, pieces, v_seq.dtype, False)
    there(x=v_seq.contiguous(), gate=x2_seq.contiguous())

    filters, (batch, own, length) = num_groups // ranks.world_size, gated.shape
    z = gated.to(torch.float32).view(batch, filters, group_dim, length)
    taps = h[ranks.rank * filters : (ranks.rank + 1) * filters].to(torch.float32)
    size = transform_length(length + h.shape[-1] - 1)
    spectrum = torch.fft.rfft(z, n=size).mul_(torch.fft.rfft(taps, n=size).unsqueeze(1))
    bias = conv_bias[ranks.rank * own : (ranks.rank + 1) * own].to(torch.float32).view(filters, group_dim, 1)
    y = torch.fft.irfft(spectrum, n=size)[..., :length].addcmul(z, bias).to(v_seq.dtype)

    back, received = hyena_exchange(ranks, shape, pieces, v_seq.dtype, True)
    back(x=y.contiguous(), gate=None)
    return (x1_seq * received).transpose(1, 2).contiguous()
