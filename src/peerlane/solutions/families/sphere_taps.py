"""Filters on the sphere applied to all longitudes: one load of x for all filters that have a tap there, and channels mixed in registers.

    y = convolve(group, exchange, x, taps, Mixing(weight, groups, bias))        (images, outputs, latitudes, this rank's longitudes)

A block takes an output row and some channels, a thread one longitude. It finds out whether all filters have their taps at the same
places, as bases on a disk have; if so a tap's place is worked out once, x loaded once a channel, and multiplied with all filters' values.
If not, filters take turns. What becomes of the responses depends on the shape:

    folded      one channel a group: weights are multiplied into the filters, so that one sum is left in place of K
    mixed       few channels and filters: a thread has all responses of a group and mixes them itself
    responses   else: those of some latitudes go to memory, and ``sphere_mixing.py`` mixes them

Bound: the mixing product, else one load from L1 for K multiplications (folded: one for one, which is what limits it). x is read where it
lies: the own arc in x, others' where the exchange left them.
"""

from typing import NamedTuple

import torch

from peerlane.device import F32, U32, BoundKernel, Group, LocalKernel, Pointer, per_group
from peerlane.device.host.jit import device_arch
from peerlane.solutions.families.sphere_exchange import ArcExchange
from peerlane.solutions.families.sphere_mixing import Mixing, mix

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr u32 most_taps = 64, folded = 0, mixed = 1, responses = 2;
constexpr u32 sums = MODE == folded ? 1 : FILTERS, values = MODE == folded ? CHANNELS : FILTERS, padded = (values + 3) / 4 * 4;

struct Shared {
    alignas(16) float value[most_taps][padded];
    u32 row[most_taps], longitude[most_taps], equal;
};

// Where x lies at a longitude, and how far it is to the next channel.
struct Column {
    const float* x;
    u64 channel;
};
__device__ inline Column column_at(const SphereTaps& args, u32 row, u32 longitude) {
    const u32 part = min(u32((float(longitude) + 0.5f) * args.inverse_columns), args.parts - 1), begin = part * args.part_columns;
    const u64 width = part + 1 < args.parts ? args.part_columns : args.circle - begin;
    const u32 slot = part > args.own ? part - 1 : part;
    const float* x = part == args.own ? args.x : args.arcs + u64(slot) * args.part_columns * args.images * args.rows;
    return {x + row * width + longitude - begin, args.rows * width};
}

// What a block reads: channels [image, image + channels) of x, from longitude `turn` on, where its first thread's circle begins.
struct Source {
    u32 image, channels, turn;
};

// An input row of these channels to shared memory, its circles repeated as far as the last thread reads.
__device__ inline void stage_row(const SphereTaps& args, const Source& source, u32 row, float* circles) {
    for (u32 i = threadIdx.x; i < PITCH; i += blockDim.x) {
        const Column column = column_at(args, row, (source.turn + i) % args.circle);
        const float* x = column.x + source.image * column.channel;
#pragma unroll
        for (u32 c = 0; c < CHANNELS; ++c) circles[c * PITCH + i] = c < source.channels ? x[c * column.channel] : 0.0f;
    }
}

// Adds the staged taps to the sums of filters [first, first + FILTERS) or, for one filter, of that alone. `staged` is the row that is in
// shared memory; only responses are made from there, which multiply a load with many filters' values.
template <u32 first, u32 count>
__device__ inline void add_taps(
    const SphereTaps& args, const Shared& shared, u32 taps, const Source& source, u32& staged, float (&sum)[sums][CHANNELS]) {
    const auto add = [&](u32 tap, const auto& x_of) {
#pragma unroll
        for (u32 c = 0; c < CHANNELS; ++c) {
            const float value = x_of(c);
            if constexpr (MODE == folded) {
                sum[0][c] += shared.value[tap][c] * value;
            } else {
#pragma unroll
                for (u32 k = first; k < first + count; ++k) sum[k][c] += shared.value[tap][k] * value;
            }
        }
    };
    if constexpr (MODE == responses) {
        float* const circles = reinterpret_cast<float*>(ptx::dynamic_shared());
        const float* const own = circles + threadIdx.x * args.step;
        for (u32 tap = 0, end = 0; tap < taps; tap = end) {
            const u32 row = shared.row[tap];
            if (row != staged) {
                __syncthreads();
                stage_row(args, source, row, circles);
                __syncthreads();
                staged = row;
            }
            while (++end < taps && shared.row[end] == row) {}
#pragma unroll 2
            for (u32 i = tap; i < end; ++i) {
                const float* const x = own + shared.longitude[i];
                add(i, [&](u32 c) { return x[c * PITCH]; });
            }
        }
    } else {
#pragma unroll 2
        for (u32 tap = 0; tap < taps; ++tap) {
            u32 longitude = shared.longitude[tap] + source.turn;
            if (longitude >= args.circle) longitude -= args.circle;
            const Column column = column_at(args, shared.row[tap], longitude);
            const float* const x = column.x + source.image * column.channel;
            add(tap, [&](u32 c) { return c < source.channels ? x[c * column.channel] : 0.0f; });
        }
    }
}

// The taps of filters from `first` on, at one output row.
struct Lists {
    const SphereTaps& args;
    u32 latitude, first;
    __device__ u64 begin(u32 k) const { return args.starts[u64(first + k) * args.latitudes + latitude]; }
    __device__ u64 end(u32 k) const { return args.starts[u64(first + k) * args.latitudes + latitude + 1]; }
};

// Taps [from, from + count) of filters [k, k + filters), which have the same places; or their sum with the outputs' weights.
__device__ void stage(const Lists& lists, Shared& shared, u64 from, u32 count, u32 k, u32 filters, u32 output, u32 outputs) {
    const SphereTaps& args = lists.args;
    __syncthreads();
    for (u32 tap = threadIdx.x; tap < count; tap += blockDim.x) {
        const u32 at = u32(args.places[lists.begin(k) + from + tap]);
        shared.row[tap] = at / args.circle, shared.longitude[tap] = at % args.circle;
        if constexpr (MODE != folded) {
            for (u32 f = 0; f < FILTERS - k; ++f) {
                shared.value[tap][k + f] = f < filters ? args.values[lists.begin(k + f) + from + tap] : 0.0f;
            }
        }
    }
    for (u32 i = threadIdx.x; MODE == folded && i < count * CHANNELS; i += blockDim.x) {
        const u32 tap = i / CHANNELS, c = i % CHANNELS;
        float total = 0.0f;
        for (u32 f = 0; f < filters && c < outputs; ++f) {
            total += args.weight[u64(output + c) * args.filters + lists.first + k + f] * args.values[lists.begin(k + f) + from + tap];
        }
        shared.value[tap][c] = total;
    }
    __syncthreads();
}

template <u32 k>
__device__ inline void each_filter(
    const Lists& lists, Shared& shared, u32 filters, const Source& source, u32& staged, u32 output, float (&sum)[sums][CHANNELS]) {
    if constexpr (k < FILTERS) {
        if (k < filters) {
            const u64 all = lists.end(k) - lists.begin(k);
            for (u64 from = 0; from < all; from += most_taps) {
                const u32 count = u32(min(all - from, u64(most_taps)));
                stage(lists, shared, from, count, k, 1, output, source.channels);
                add_taps<k, 1>(lists.args, shared, count, source, staged, sum);
            }
        }
        each_filter<k + 1>(lists, shared, filters, source, staged, output, sum);
    }
}

// Images [first_image, end_image) are images times channels. `some` latitudes, those at the ends first, for disks are widest near the
// poles. A block takes CHANNELS of them, or outputs (folded).
extern "C" __global__ void __launch_bounds__(192, 3) sphere_taps(const __grid_constant__ SphereTaps args) {
    __shared__ Shared shared;
    const u32 spans = (args.columns + blockDim.x - 1) / blockDim.x, wanted = MODE == folded ? args.outputs : args.channels;
    const u32 bundles = (wanted + CHANNELS - 1) / CHANNELS, images = (args.end_image - args.first_image) / args.channels;
    const u32 passes = MODE == folded ? 1 : (args.filters + FILTERS - 1) / FILTERS;
    for (u32 item = blockIdx.x; item < args.some * images * bundles * passes * spans; item += gridDim.x) {
        const u32 q = item % spans * blockDim.x + threadIdx.x, bundle = item / spans % bundles;
        const u32 pass = item / spans / bundles % passes, turns = item / spans / bundles / passes;
        const u32 batch = args.first_image / args.channels + turns % images, place = turns / images;
        const u32 latitude = args.first_latitude + (place % 2 == 0 ? place / 2 : args.some - 1 - place / 2);
        const u32 first = bundle * CHANNELS, channels = min(u32(CHANNELS), wanted - first);
        const u32 image = batch * args.channels + first, begin = MODE == responses ? q - threadIdx.x : min(q, args.columns - 1);
        const Source source{image, channels, begin * args.step + args.first_turn};
        const u32 filters = MODE == folded ? args.filters : min(u32(FILTERS), args.filters - pass * FILTERS);
        const Lists lists{args, latitude, pass * FILTERS};
        float sum[sums][CHANNELS] = {};
        u32 staged = ~0u;

        __syncthreads();
        if (threadIdx.x == 0) shared.equal = 1;
        __syncthreads();
        const u64 all = lists.end(0) - lists.begin(0);
        bool equal = true;
        for (u32 k = 1; k < filters && equal; ++k) {
            equal = lists.end(k) - lists.begin(k) == all;
            for (u64 i = threadIdx.x; equal && i < all; i += blockDim.x) {
                equal = args.places[lists.begin(k) + i] == args.places[lists.begin(0) + i];
            }
        }
        if (!equal) atomicAnd(&shared.equal, 0u);
        __syncthreads();
        if (shared.equal != 0) {
            for (u64 from = 0; from < all; from += most_taps) {
                const u32 count = u32(min(all - from, u64(most_taps)));
                stage(lists, shared, from, count, 0, filters, first, channels);
                add_taps<0, FILTERS>(args, shared, count, source, staged, sum);
            }
        } else if constexpr (MODE == folded) {
            for (u32 k = 0; k < filters; ++k) {
                const u64 taps = lists.end(k) - lists.begin(k);
                for (u64 from = 0; from < taps; from += most_taps) {
                    const u32 count = u32(min(taps - from, u64(most_taps)));
                    stage(lists, shared, from, count, k, 1, first, channels);
                    add_taps<0, 1>(args, shared, count, source, staged, sum);
                }
            }
        } else {
            each_filter<0>(lists, shared, filters, source, staged, first, sum);
        }
        if (q >= args.columns) continue;
        if constexpr (MODE == responses) {
#pragma unroll
            for (u32 c = 0; c < CHANNELS; ++c) {
#pragma unroll
                for (u32 k = 0; k < FILTERS; ++k) {
                    const u64 filter = u64(image - args.first_image + c) * args.filters + pass * FILTERS + k;
                    const u64 row = filter * args.some + latitude - args.first_latitude;
                    if (c < channels && k < filters) args.y[row * args.columns + q] = sum[k][c];
                }
            }
        } else {
            const u32 count = MODE == folded ? channels : args.outputs / (args.channels / CHANNELS);  // outputs of the bundle
            for (u32 i = 0; i < count; ++i) {
                const u32 output = MODE == folded ? first + i : bundle * count + i;
                float total = args.bias == nullptr ? 0.0f : args.bias[output];
                if constexpr (MODE == folded) {
#pragma unroll
                    for (u32 c = 0; c < CHANNELS; ++c) total += c == i ? sum[0][c] : 0.0f;
                } else {
                    float mixture = 0.0f;
#pragma unroll
                    for (u32 c = 0; c < CHANNELS; ++c) {
#pragma unroll
                        for (u32 k = 0; k < FILTERS; ++k) mixture += args.weight[(output * CHANNELS + c) * FILTERS + k] * sum[k][c];
                    }
                    total += mixture;
                }
                args.y[((u64(batch) * args.outputs + output) * args.latitudes + latitude) * args.columns + q] = total;
            }
        }
    }
}
"""
SPHERE_TAPS = LocalKernel(
    "sphere_taps", SOURCE, x=Pointer("const float*"), arcs=Pointer("const float*"), values=Pointer("const float*"),
    places=Pointer("const u64*"), starts=Pointer("const u64*"), weight=Pointer("const float*"), bias=Pointer("const float*"),
    y=Pointer("float*"), first_image=U32, end_image=U32, images=U32, channels=U32, outputs=U32, filters=U32, latitudes=U32,
    first_latitude=U32, some=U32, rows=U32, columns=U32, first_turn=U32, step=U32, circle=U32, parts=U32, part_columns=U32,
    own=U32, inverse_columns=F32,
)  # fmt: skip

PARTS = 4
"""The parts of the images, of which one is sent while the one before is convolved; responses are made of all at once."""
RESPONSE_BYTES = 512 * 2**20
"""The most bytes of responses in memory at a time. A launch for all latitudes has light ones to do beside those near the poles."""
MOST_SUMS, MOST_FILTERS, MOST_MIXED = 56, 9, 32
"""Sums that a thread has in registers, filters among them, and responses that it mixes itself."""


class Taps(NamedTuple):
    """The filters: ``places`` are row times nlon_in plus longitude, by filter and output row, whose first taps ``starts`` has."""

    places: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    filters: int
    latitudes: int


class Form(NamedTuple):
    """The use of responses, and how many channels and filters a thread has at a time."""

    mode: str
    channels: int
    filters: int


def form_of(channels: int, outputs: int, groups: int, filters: int) -> Form:
    """Returns the form that reads and adds least."""
    inner = channels // groups
    if inner == 1 and outputs == channels:
        return Form("folded", 8, filters)
    if inner * filters <= MOST_MIXED:
        return Form("mixed", inner, filters)
    at_once = -(-filters // -(-filters // MOST_FILTERS))
    most = min(8, MOST_SUMS // at_once)
    return Form("responses", min(range(most, most // 2, -1), key=lambda count: -(-channels // count) * (count + 1)), at_once)


@per_group
def _taps(group: Group, form: Form, columns: int, circle: int, step: int, rows: int) -> BoundKernel:
    """``rows`` of ``columns`` outputs, each for all channels and filters that a block has at a time."""
    spans = -(-columns // min(192, group.max_threads))
    block = min(group.max_threads, -(-columns // (32 * spans)) * 32)
    pitch = circle + (block - 1) * step if form.mode == "responses" else 0
    return SPHERE_TAPS.bind(
        group,
        grid=max(1, min(rows * -(-columns // block), 1 << 20)),
        block=block,
        defines={"MODE": form.mode, "CHANNELS": form.channels, "FILTERS": form.filters, "PITCH": pitch},
        shared_bytes=4 * form.channels * pitch,
    )


def convolve(group: Group, exchange: ArcExchange, x: torch.Tensor, taps: Taps, mixing: Mixing) -> torch.Tensor:
    """Returns this rank's longitudes of the filtered and mixed x, all latitudes of them; ``group`` launches the kernel."""
    weight, groups, bias = mixing
    (batch, channels, rows, _), outputs, azimuth = exchange.shape, weight.shape[0], exchange.group
    columns, form = exchange.outputs[azimuth.rank], form_of(channels, outputs, groups, taps.filters)
    y = x.new_empty((batch, outputs, taps.latitudes, columns))
    part_columns = exchange.widths[0]  # the last arc has all longitudes if this is zero
    own = form.mode != "responses"
    bundles = -(-outputs // form.channels) if form.mode == "folded" else -(-channels // form.channels) * -(-taps.filters // form.filters)
    for images in exchange(x, taps.places, PARTS if own else 1):
        row_bytes = 4 * len(images) * channels * taps.filters * max(exchange.outputs)  # the same on all ranks
        for latitudes in _spans(taps.latitudes, taps.latitudes if own else max(1, RESPONSE_BYTES // row_bytes)):
            launch = _taps(group, form, max(exchange.outputs), exchange.circle, exchange.step, len(latitudes) * len(images) * bundles)
            some, part = len(latitudes), slice(images.start, images.stop)
            result = y if own else x.new_empty((len(images), groups, channels // groups * taps.filters, some * columns))
            launch(
                x=x, arcs=exchange.arcs, values=taps.values, places=taps.places, starts=taps.starts, weight=weight, bias=bias, y=result,
                first_image=images.start * channels, end_image=images.stop * channels, images=exchange.images, channels=channels,
                outputs=outputs, filters=taps.filters, latitudes=taps.latitudes, first_latitude=latitudes.start, some=some, rows=rows,
                columns=columns, first_turn=exchange.outputs[0] * azimuth.rank * exchange.step, step=exchange.step,
                circle=exchange.circle, parts=len(exchange.widths), part_columns=part_columns, own=azimuth.rank,
                inverse_columns=1.0 / part_columns if part_columns else 1e6,
            )  # fmt: skip
            if not own and device_arch() == "sm_90a":
                mix(group, result, mixing, y[part], latitudes.start * columns)
            elif not own:
                mixed = y[part, :, latitudes.start : latitudes.stop].flatten(2).view(len(images), groups, -1, some * columns)
                for g, weights in enumerate(weight.view(groups, outputs // groups, -1)):
                    torch.bmm(weights.expand(len(images), -1, -1), result[:, g], out=mixed[:, g])
                if bias is not None:
                    mixed += bias.view(groups, -1, 1)
    return y


def _spans(size: int, most: int) -> list[range]:
    """Returns ranges of at most ``most``, as equal as possible."""
    each = -(-size // -(-size // most))
    return [range(first, min(first + each, size)) for first in range(0, size, each)]
