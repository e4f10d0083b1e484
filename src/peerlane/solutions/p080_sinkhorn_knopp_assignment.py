"""Problem 80, Sinkhorn-Knopp by scaling vectors: exponentials E of the logits are never stored in memory.

The assignment is diag(u) E diag(v): an iteration takes v = 1 / (sum over all ranks of E^T u) and u = 1 / (E v). Factors of u and v cancel,
among them the numbers of samples and prototypes. A pass keeps two rows of E diag(v) in registers. It adds up the one. Of the other u is
known: it adds u E to the next sums of columns, or writes the result. A row lies in the blocks of a cluster, whose warps send each other
their sums. So logits are read once an iteration and once more. Bound by HBM. The reference passes about twenty times over exponentials in
float32. Sums have a fixed order. Exponentials are stored where a row is too long for a cluster, or a cluster might find no room."""

import math

import torch
import torch.distributed as dist

from peerlane.device import F32, U32, BoundKernel, Group, LocalKernel, Pointer, communicator, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/pipeline.cuh>
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int first = 0, last = 2;  // passes: the first one has neither u nor v yet
constexpr u32 warps = THREADS / warp_threads, lanes = 4, width = CHUNKS * lanes * warp_threads, ring = 4, bytes = 4 / ELEMENT::lanes;

struct alignas(16) Four {
    float value[lanes];
};
struct alignas(lanes * bytes) Logits {
    u32 word[lanes / ELEMENT::lanes];
};
struct alignas(16) Memory {
    Logits logits[warps][STAGES][CHUNKS][warp_threads];
    Four shift[warps][CHUNKS][warp_threads];  // logarithms of v
    float sum[ring][CLUSTER * warps];
    u64 loaded[warps][STAGES], met[ring];
};

// Warps of a cluster have `width` columns each. They share no barrier: a warp that is behind holds up others only two rows later.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1) balance(const __grid_constant__ Balance args) {
    Memory& memory = *reinterpret_cast<Memory*>(ptx::dynamic_shared());
    const u32 warp = threadIdx.x / warp_threads, lane = Warp{}.thread(), block = ptx::cluster_rank();
    const u32 columns = args.columns, team = blockIdx.x / CLUSTER, teams = gridDim.x / CLUSTER;
    const u32 steps = team < args.rows ? (args.rows - team - 1) / teams + 1 : 0;
    const u32 begin = (block * warps + warp) * width, count = begin < columns ? min(width, columns - begin) : 0;
    const bool loads = WHOLE && count > 0;
    const auto column_of = [&](u32 c) { return begin + (c * warp_threads + lane) * lanes; };
    if (threadIdx.x == 0) {
        for (auto& of_warp : memory.loaded) {
            for (u64& barrier : of_warp) ptx::mbarrier_init(&barrier, 1);
        }
        for (u64& barrier : memory.met) ptx::mbarrier_init(&barrier, CLUSTER * warps + 1);
        ptx::mbarrier_init_fence();
    }
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        ptx::cluster_barrier();
    }

    const auto load = [&](u32 step) {
        if (!loads || step >= steps || !ptx::elect_one()) return;
        u64* const barrier = &memory.loaded[warp][step % STAGES];
        const u64 at = u64(team + step * teams) * columns + begin;
        ptx::mbarrier_arrive_expect(barrier, count * bytes);
        ptx::bulk_load(memory.logits[warp][step % STAGES], args.logits + at * bytes, count * bytes, barrier);
    };
    for (u32 step = 0; step < STAGES; ++step) load(step);
    for (u32 c = 0; c < CHUNKS; ++c) {
        Four shift{};
        Logits none{};
        const float least[] = {-INFINITY, -INFINITY};
        for (u32& word : none.word) word = ELEMENT::narrow(least);
        for (u32 e = 0; PASS != first && e < lanes; ++e) {
            if (column_of(c) + e < columns) shift.value[e] = -log2f(args.sums[column_of(c) + e]);
        }
        for (u32 stage = 0; column_of(c) >= columns && stage < STAGES; ++stage) memory.logits[warp][stage][c][lane] = none;
        memory.shift[warp][c][lane] = shift;
    }

    // E diag(v) of a row, and its sum to all blocks.
    const auto take = [&](u32 step, Four(&mass)[CHUNKS]) {
        if (loads) wait_phase(&memory.loaded[warp][step % STAGES], step / STAGES & 1);
        Four sum{};
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            const Four shift = memory.shift[warp][c][lane];
            float logit[lanes];
            if constexpr (WHOLE) {
                const Logits logits = memory.logits[warp][step % STAGES][c][lane];
                for (u32 w = 0; w < lanes / ELEMENT::lanes; ++w) ELEMENT::widen(logits.word[w], logit + w * ELEMENT::lanes);
            } else {
                const u64 at = u64(team + step * teams) * columns;
                for (u32 e = 0, i; e < lanes; ++e) {
                    logit[e] = (i = column_of(c) + e) < columns ? element_of<ELEMENT>(args.logits, at + i) : -INFINITY;
                }
            }
            for (u32 e = 0; e < lanes; ++e) {
                mass[c].value[e] = ptx::exp2(logit[e] * args.scale + shift.value[e]);
                sum.value[e] += mass[c].value[e];
            }
        }
        __syncwarp();
        load(step + STAGES);
        if constexpr (PASS != first) {
            const float total = warp_sum((sum.value[0] + sum.value[1]) + (sum.value[2] + sum.value[3]));
            u64* const met = &memory.met[step % ring];
            if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(met, sizeof memory.sum[0]);
            if (lane < CLUSTER) {  // the arrival says that this warp has read the sums of two rows before
                ptx::store_async(&memory.sum[step % ring][block * warps + warp], lane, total, met);
                ptx::mbarrier_arrive_at(met, lane);
            }
        }
    };
    const auto store = [&](u32 row, u32 c, const Four& four) {
        float* const to = args.out + u64(row) * columns + column_of(c);
        if constexpr (WHOLE) {
            if (column_of(c) < columns) *reinterpret_cast<Four*>(to) = four;
        } else {
            for (u32 e = 0; e < lanes; ++e) {
                if (column_of(c) + e < columns) to[e] = four.value[e];
            }
        }
    };
    Four even[CHUNKS], odd[CHUNKS], sums[CHUNKS] = {};
    const auto use = [&](u32 step, Four(&mass)[CHUNKS]) {
        float u = 1;
        if constexpr (PASS != first) {
            float total = 0;
            wait_phase(&memory.met[step % ring], step / ring & 1);
            for (u32 i = lane; i < CLUSTER * warps; i += warp_threads) total += memory.sum[step % ring][i];
            u = 1 / warp_sum(total);
        }
#pragma unroll
        for (u32 c = 0; c < CHUNKS; ++c) {
            for (u32 e = 0; e < lanes; ++e) {
                if constexpr (PASS == last) mass[c].value[e] *= u;
                else sums[c].value[e] += u * mass[c].value[e];
            }
            if constexpr (PASS == last) store(team + step * teams, c, mass[c]);
        }
    };

    if constexpr (PASS == first) {
        for (u32 step = 0; step < steps; ++step) take(step, even), use(step, even);
    } else if (steps > 0) {
        take(0, even);
    }
    for (u32 step = 0; PASS != first && step < steps; step += 2) {
        if (step + 1 < steps) take(step + 1, odd);
        use(step, even);
        if (step + 2 < steps) take(step + 2, even);
        if (step + 1 < steps) use(step + 1, odd);
    }
    for (u32 c = 0; PASS != last && c < CHUNKS; ++c) {
        const Four shift = memory.shift[warp][c][lane];
        for (u32 e = 0; e < lanes; ++e) sums[c].value[e] *= ptx::exp2(-shift.value[e]);
        store(team, c, sums[c]);
    }
}
"""
BALANCE = LocalKernel(
    "balance", SOURCE, logits=Pointer("const char*"), sums=Pointer("const float*"), out=Pointer("float*"), rows=U32, columns=U32, scale=F32
)
FIRST, BETWEEN, LAST = range(3)
CHUNKS, CLUSTER, STAGE_BYTES = 8, 8, 128 << 10
"""The most groups of four columns of a thread, blocks of a cluster, and bytes of logits under way in a block."""


@per_group
def balance(group: Group, rows: int, columns: int, dtype: torch.dtype, whole: bool, part: int) -> tuple[BoundKernel, int] | None:
    """Returns the launch of a pass, and its clusters; None if there is none. ``whole``: rows begin at multiples of 16 bytes."""
    threads = min(512, group.max_threads)
    cluster = 1 << (-(-columns // (4 * CHUNKS * threads)) - 1).bit_length()
    if cluster > (1 if group.ranks_per_device > 1 else CLUSTER):  # other ranks' blocks may wait on some SM of every cluster
        return None
    chunks, warps = -(-columns // (4 * cluster * threads)), threads // 32
    row_bytes = 4 * chunks * threads * dtype.itemsize
    stages, teams = max(2, min(4, STAGE_BYTES // row_bytes)), max(1, min(rows, group.sm_count // cluster))
    bound = BALANCE.bind(
        group, grid=teams * cluster, block=threads, cluster=cluster, rows=rows, columns=columns,
        shared_bytes=stages * row_bytes + 16 * chunks * threads + 16 * cluster * warps + 8 * warps * stages + 32 + 16,
        defines={
            "ELEMENT": element_type(dtype), "THREADS": threads, "CHUNKS": chunks, "CLUSTER": cluster, "STAGES": stages, "WHOLE": int(whole),
            "PASS": part,
        },
    )  # fmt: skip
    return bound, teams


def solution(
    teacher_output: torch.Tensor,
    teacher_temp: float,
    n_masked_patches_tensor: torch.Tensor,
    n_iterations: int = 3,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    kit, ranks, (rows, prototypes) = communicator(group), group_of(group), teacher_output.shape
    logits, scale = teacher_output.contiguous(), math.log2(math.e) / teacher_temp
    whole = (logits.data_ptr() | prototypes * logits.itemsize) % 16 == 0

    def over_ranks(part: torch.Tensor) -> torch.Tensor:
        kit.all_reduce(part)
        return part

    if n_iterations == 0 or balance(ranks, rows, prototypes, logits.dtype, whole, FIRST) is None:
        e = torch.exp2(logits.to(torch.float32) * scale)
        if n_iterations == 0:
            return e.mul_(over_ranks(n_masked_patches_tensor.to(torch.float32, copy=True).reshape(1)) / over_ranks(e.sum().reshape(1)))
        u = e.new_ones(rows)
        for _ in range(n_iterations):
            v = over_ranks(u @ e).reciprocal_()
            u = (e @ v).reciprocal_()
        return e.mul_(u.unsqueeze(1)).mul_(v)

    def passed(part: int, sums: torch.Tensor | None) -> torch.Tensor:
        found = balance(ranks, rows, prototypes, logits.dtype, whole, part)
        assert found is not None
        launch, teams = found
        out = logits.new_empty((rows if part == LAST else teams, prototypes), dtype=torch.float32)
        launch(logits=logits, sums=sums, out=out, scale=scale)
        return out if part == LAST else over_ranks(out.sum(0))

    sums = passed(FIRST, None)
    for _ in range(n_iterations - 1):
        sums = passed(BETWEEN, sums)
    return passed(LAST, sums)
