"""Problem 80, Sinkhorn-Knopp by scaling vectors: exponentials E of the logits are never stored in memory.

The assignment is diag(u) E diag(v): an iteration takes v = 1 / (K sum over all ranks of E^T u) and u = 1 / (n E v), so the total mass
cancels. The number of samples travels with the first sum. A pass over the logits takes three rows at a time, keeps their exponentials in
shared memory until their u is known, and then adds u E to the next iteration's sums or writes the result. Blocks of a team have parts of
these rows, and send each other sums as packets. So logits are read once an iteration and once more. Bound by HBM. The reference passes
about twenty times over exponentials in float32. Sums have a fixed order."""

import math

import torch
import torch.distributed as dist

from peerlane.device import (
    F32,
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Group,
    Pointer,
    communicator,
    element_type,
    group_of,
    per_group,
)  # fmt: skip
from peerlane.device.host.declare import Reserved
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

constexpr u32 together = packet_words, ring = 4;
constexpr int first = 0, last = 2;  // passes: the first one has neither u nor v yet
constexpr int words = row_lanes / ELEMENT::lanes;
struct Sums {
    float of[together];
};
struct Logits {  // of a thread's columns, as they lie in memory
    u32 word[together][VECTORS][words];
};
struct alignas(16) Four {
    float value[4];
};

// By teams of `members` blocks, each with a strip of the columns; a team takes some rows together, and then those `teams` further on.
extern "C" __global__ void __launch_bounds__(THREADS) balance(const __grid_constant__ Arena arena, const __grid_constant__ Balance args) {
    __shared__ Sums scratch[32], total[2];
    Four* const kept = reinterpret_cast<Four*>(ptx::dynamic_shared());
    const u32 rows = args.rows, columns = args.columns, members = args.members, member = blockIdx.x % members;
    const u32 team = blockIdx.x / members, teams = gridDim.x / members, groups = (rows + together - 1) / together;
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)), groups / teams + 1);
    const u32 steps = team < groups ? (groups - team - 1) / teams + 1 : 0, end = min(columns, (member + 1) * args.strip);
    constexpr u32 bytes = 4 / ELEMENT::lanes;
    const u64 row_bytes = u64(columns) * bytes;
    const float samples = PASS == first ? 0.0f : *args.samples;
    const auto add = [](Sums a, Sums b) {
        for (u32 r = 0; r < together; ++r) a.of[r] += b.of[r];
        return a;
    };
    const auto column_of = [&](int j) { return member * args.strip + (j * THREADS + threadIdx.x) * row_lanes; };
    const auto row_of = [&](u32 step, u32 r) { return (team + step * teams) * together + r; };
    const auto packet_of = [&](u32 step, u32 of) {
        return arena.local(args.packets + ((team * ring + step % ring) * members + of) * sizeof(Vec16));
    };
    const auto kept_at = [&](u32 step, u32 r, int j) {  // the first four of eight; the others lie THREADS further on
        return kept + ((step % 2 * together + r) * VECTORS + j) * 2 * THREADS + threadIdx.x;
    };

    float v[VECTORS][row_lanes], sum[VECTORS][row_lanes] = {};
    for (int j = 0; j < (PASS == first ? 0 : VECTORS); ++j) {
        const u32 column = column_of(j);
        if (column < end) RowOf<Float32>(reinterpret_cast<const char*>(args.sums), 0, columns).load(column, v[j]);
        for (int e = 0; e < row_lanes; ++e) v[j][e] = column + e < end ? 1.0f / (v[j][e] * columns) : 0.0f;
    }
    const auto store = [&](u32 row, int j, const float(&value)[row_lanes]) {
        if (column_of(j) < end) RowOf<Float32>(reinterpret_cast<const char*>(args.out), row, columns).store(column_of(j), value);
    };
    const bool whole = aligned_for<Vec16>(args.logits) && columns % row_lanes == 0;
    const auto load = [&](u32 step, Logits& coming) {
        const auto each = [&](const auto& use) {
#pragma unroll
            for (u32 r = 0; r < together; ++r) {
                const char* row = args.logits + row_of(step, r) * row_bytes;
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    use(row_of(step, r) < rows && column_of(j) < end, row, u64(column_of(j)) * bytes, coming.word[r][j]);
                }
            }
        };
        if (whole) {  // nothing stands between these loads
            each([&](bool there, const char* row, u64 at, u32(&to)[words]) {
#pragma unroll
                for (int i = 0; i < words / 4; ++i) {
                    const Vec16 loaded = there ? reinterpret_cast<const Vec16*>(row + at)[i] : Vec16{};
                    for (int w = 0; w < 4; ++w) to[4 * i + w] = loaded.word[w];
                }
            });
        } else {
            each([&](bool there, const char* row, u64 at, u32(&to)[words]) {
                for (u32& word : to) word = 0;
                if (there) load_words(row, at, row_bytes, to);
            });
        }
    };
    // This step's exponentials, and the use of the last step's. Loads of the next step are under way; those behind it begin here. No member
    // is over two steps ahead of another one, so that packets may take turns in the ring.
    const auto take = [&](u32 step, Logits& coming) {
        if (step < steps) {
            Sums own{};
#pragma unroll
            for (u32 r = 0; r < together; ++r) {
#pragma unroll
                for (int j = 0; j < VECTORS; ++j) {
                    float value[row_lanes];
                    for (int w = 0; w < words; ++w) ELEMENT::widen(coming.word[r][j][w], value + w * ELEMENT::lanes);
                    for (float& x : value) x = exp2f(x * args.scale);
                    if constexpr (PASS == first) {
                        for (int e = 0; e < row_lanes; ++e) sum[j][e] += row_of(step, r) < rows ? value[e] : 0.0f;
                        continue;
                    }
                    for (int e = 0; e < row_lanes; ++e) own.of[r] += value[e] * v[j][e];
                    Four* const to = kept_at(step, r, j);
                    to[0] = {{value[0], value[1], value[2], value[3]}}, to[THREADS] = {{value[4], value[5], value[6], value[7]}};
                }
            }
            load(step + 2, coming);
            if constexpr (PASS == first) return;
            own = block_reduce(own, add, scratch);
            u32 data[packet_words];
            SmallExchange<WORLD_SIZE, Sums>::pack(own, data);
            if (threadIdx.x == 0) push_packet(packet_of(step, member), data, epoch + step);
        }
        if (PASS == first || step == 0) return;
        const u32 before = step - 1;
        if (threadIdx.x < warp_threads) {
            Sums all{};
            for (u32 m = threadIdx.x; m < members; m += warp_threads) {
                u32 data[packet_words];
                pull_packet(arena, arena.rank, packet_of(before, m), m, epoch + before, data);
                all = add(all, SmallExchange<WORLD_SIZE, Sums>::unpack(data));
            }
            all = warp_reduce(all, add);
            if (threadIdx.x == 0) total[before % 2] = all;
        }
        __syncthreads();
#pragma unroll
        for (u32 r = 0; r < together; ++r) {
            const u32 row = row_of(before, r);
            const float u = row < rows ? 1.0f / (total[before % 2].of[r] * samples) : 0.0f;
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) {
                const Four *from = kept_at(before, r, j), half[2] = {from[0], from[THREADS]};
                float value[row_lanes];
                for (int e = 0; e < row_lanes; ++e) value[e] = half[e / 4].value[e % 4];
                if constexpr (PASS == last) {
                    for (int e = 0; e < row_lanes; ++e) value[e] *= v[j][e] * (u * samples);
                    if (row < rows) store(row, j, value);
                } else {
                    for (int e = 0; e < row_lanes; ++e) sum[j][e] += u * value[e];
                }
            }
        }
    };
    Logits even, odd;
    load(0, even), load(1, odd);
    for (u32 step = 0; step <= steps; step += 2) {
        take(step, even);
        if (step < steps) take(step + 1, odd);
    }
    if constexpr (PASS != last) {
        for (int j = 0; j < VECTORS; ++j) store(team, j, sum[j]);
    }
}
"""
BALANCE = DeclaredKernel(
    "balance", SOURCE, epochs=Epochs(), packets=Buffer(), logits=Pointer("const char*"), sums=Pointer("const float*"),
    samples=Pointer("const float*"), out=Pointer("float*"), rows=U32, columns=U32, members=U32, strip=U32, scale=F32,
)  # fmt: skip
FIRST, BETWEEN, LAST = range(3)
STRIP, TOGETHER = 256, 3
"""The least columns of a block, where rows are few, and rows of a team."""


@per_group
def packets(group: Group) -> Reserved:
    """Collective: memory for the packets of teams."""
    return BALANCE.reserve(group, sizes={"packets": 16 * 4 * group.sm_count})


@per_group
def balance(group: Group, rows: int, columns: int, dtype: torch.dtype, place: int) -> tuple[BoundKernel, int]:
    """Returns the launch of a pass, and its teams. Few rows are cut into more strips."""
    threads, vectors = min(512, group.max_threads), 4 // dtype.itemsize  # logits that are under way lie in registers
    needed, most = -(-columns // (8 * vectors * threads)), -(-columns // STRIP)
    if needed > group.sm_count:
        raise UsageError(f"{columns} prototypes on {group.sm_count} SMs: expected at most {8 * vectors * threads} for each")
    wanted = max(1, -(-rows // TOGETHER))
    members = max(needed, min(most, group.sm_count // wanted))
    teams = min(wanted, group.sm_count // members)
    bound = packets(group).bind(
        grid=teams * members, block=threads, shared_bytes=2 * TOGETHER * vectors * 8 * 4 * threads, resident=True,
        defines={"ELEMENT": element_type(dtype), "THREADS": threads, "VECTORS": vectors, "PASS": place},
        rows=rows, columns=columns, members=members, strip=-(-columns // (8 * members)) * 8,
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

    def passed(place: int, v: torch.Tensor | None, samples: torch.Tensor | None) -> torch.Tensor:
        launch, teams = balance(ranks, rows, prototypes, logits.dtype, place)
        out = logits.new_empty((rows if place == LAST else teams, prototypes), dtype=torch.float32)
        launch(logits=logits, sums=v, samples=samples, out=out, scale=scale)
        return out if place == LAST else out.sum(0)

    sums = torch.cat([passed(FIRST, None, None), n_masked_patches_tensor.to(torch.float32)])  # a number below 2^24: exact
    kit.all_reduce(sums)
    v, samples = sums[:prototypes], sums[prototypes:]
    if n_iterations == 0:
        return torch.exp2(logits.to(torch.float32) * scale).mul_(samples / v.sum())
    for _ in range(n_iterations - 1):
        v = passed(BETWEEN, v, samples)
        kit.all_reduce(v)
    return passed(LAST, v, samples)
