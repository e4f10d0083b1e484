"""Problem 24, load-balancing loss of a router: one kernel takes softmax, choices and sums, and ranks exchange one number.

Lanes hold the logits of a token in registers, eight each; its choices are the next largest in turn. Sums of a lane, a warp, a block and
a rank are added in one order. Bound by HBM, which reads logits once, or by k passes over registers; small inputs by the launch and a
packet."""

import ctypes

import torch

from peerlane.device import (
    U32,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Group,
    Packets,
    Pointer,
    array,
    element_type,
    group_of,
    per_group,
)
from peerlane.errors import UsageError

SOURCE = r"""
#include <peerlane/grid.cuh>
using namespace peerlane;

// The order in which entries are chosen: larger logits first, of equal ones the first.
struct Entry {
    float logit;
    u32 expert;
};
__device__ bool before(const Entry& a, const Entry& b) { return a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert); }

extern "C" __global__ void __launch_bounds__(512)
    router_loss(const __grid_constant__ Arena arena, const __grid_constant__ RouterLoss args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs))), lane = Warp{}.thread();
    // Probabilities of every expert, how often it was chosen, and the weight of all tokens: of each warp, then of the rank.
    const u32 count = 2 * EXPERTS + 1, warps = blockDim.x / warp_threads;
    float* const of_warps = reinterpret_cast<float*>(ptx::dynamic_shared());
    float* const sums = of_warps + threadIdx.x / warp_threads * count;
    // LANES lanes hold the logits of a token, so a warp has several tokens at a time. A lane sums what all its tokens have of its experts.
    constexpr u32 together = warp_threads / LANES, vectors = (EXPERTS + row_lanes * LANES - 1) / (row_lanes * LANES);
    const u32 member = lane % LANES, rows = args.layers * args.tokens;
    float probability[vectors][row_lanes]{}, chosen[vectors][row_lanes]{}, weights = 0.0f;
    const auto each = [&](const auto& use) {
#pragma unroll
        for (u32 v = 0; v < vectors; ++v) {
#pragma unroll
            for (u32 e = 0; e < row_lanes; ++e) {
                if (const u32 expert = (v * LANES + member) * row_lanes + e; expert < EXPERTS) use(expert, v, e);
            }
        }
    };
    each_row((rows + together - 1) / together, [&](u32 bundle) {
        const u32 at = bundle * together + lane / LANES, row = min(at, rows - 1), token = row % args.tokens;
        const RowOf<ELEMENT> logits(args.logits[row / args.tokens], token, EXPERTS);
        const float weight = at != row ? 0.0f : args.mask == nullptr ? 1.0f : static_cast<float>(args.mask[token % args.masked]);
        float value[vectors][row_lanes], largest = -infinity, sum = 0.0f;
#pragma unroll
        for (u32 v = 0; v < vectors; ++v) logits.load((v * LANES + member) * row_lanes, value[v]);
        each([&](u32, u32 v, u32 e) { largest = fmaxf(largest, value[v][e]); });
        largest = warp_reduce<LANES>(largest, [](float a, float b) { return fmaxf(a, b); });
        each([&](u32, u32 v, u32 e) { sum += expf(value[v][e] - largest); });
        const float scale = weight / warp_sum<LANES>(sum);
        each([&](u32, u32 v, u32 e) { probability[v][e] += expf(value[v][e] - largest) * scale; });
        Entry last{infinity, 0};
        for (u32 k = 0; k < args.top_k; ++k) {
            Entry next{-infinity, EXPERTS};
            each([&](u32 expert, u32 v, u32 e) {
                const Entry entry{value[v][e], expert};
                if ((k == 0 || before(last, entry)) && before(entry, next)) next = entry;
            });
            last = warp_reduce<LANES>(next, [](const Entry& a, const Entry& b) { return before(b, a) ? b : a; });
            each([&](u32 expert, u32 v, u32 e) { chosen[v][e] += expert == last.expert ? weight : 0.0f; });
        }
        weights += weight;
    });
    const auto of_members = [](float x) {  // in one order, so that sums have the same bits in every call
#pragma unroll
        for (u32 offset = LANES; offset < warp_threads; offset *= 2) x += __shfl_xor_sync(full_warp, x, offset);
        return x;
    };
#pragma unroll
    for (u32 v = 0; v < vectors; ++v) {
#pragma unroll
        for (u32 e = 0; e < row_lanes; ++e) probability[v][e] = of_members(probability[v][e]), chosen[v][e] = of_members(chosen[v][e]);
    }
    weights = of_members(weights);
    if (lane < LANES) {
        each([&](u32 expert, u32 v, u32 e) { sums[expert] = probability[v][e], sums[EXPERTS + expert] = chosen[v][e]; });
        if (lane == 0) sums[2 * EXPERTS] = weights;
    }
    __syncthreads();
    float* partial = reinterpret_cast<float*>(arena.local(args.partial));
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        float total = 0.0f;
        for (u32 warp = 0; warp < warps; ++warp) total += of_warps[warp * count + i];
        partial[blockIdx.x * count + i] = total;
    }
    if (!last_block(reinterpret_cast<u32*>(arena.local(args.arrived)), gridDim.x)) return;
    const u32 slices = max(1u, min(warps, blockDim.x / count));  // of the blocks: several threads share an entry
    for (u32 i = threadIdx.x; i < slices * count; i += blockDim.x) {
        float total = 0.0f;
#pragma unroll 8
        for (u32 block = i / count; block < gridDim.x; block += slices) total += partial[block * count + i % count];
        of_warps[i] = total;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        for (u32 slice = 1; slice < slices; ++slice) of_warps[i] += of_warps[slice * count + i];
    }
    __syncthreads();
    if (threadIdx.x >= warp_threads) return;
    float loss = 0.0f;
    for (u32 expert = lane; expert < EXPERTS; expert += warp_threads) loss += sums[expert] * sums[EXPERTS + expert];
    loss = warp_sum(loss) / sums[2 * EXPERTS] / sums[2 * EXPERTS] * EXPERTS;
    const SmallExchange<WORLD_SIZE, float> exchange(arena, args.losses, epoch);
    exchange.push(0, loss);
    loss = exchange.pull(0, loss, [](float a, float b) { return a + b; });
    if (lane == 0) *args.loss = loss / WORLD_SIZE;
}
"""
MOST_LAYERS, MOST_EXPERTS, SHARED_BYTES = 128, 1024, 96 << 10
ROUTER_LOSS = DeclaredKernel(
    "router_loss", SOURCE, epochs=Epochs(), losses=Packets(), partial=Buffer(), arrived=Buffer(),
    logits=array(Field("const char*", ctypes.c_uint64), MOST_LAYERS), mask=Pointer("const long long*"), loss=Pointer("float*"),
    layers=U32, tokens=U32, masked=U32, top_k=U32,
)  # fmt: skip


@per_group
def router_loss(group: Group, rows: int, experts: int, dtype: torch.dtype) -> BoundKernel:
    lanes = min(32, 1 << max(0, -(-experts // 8) - 1).bit_length())
    grid, vector = min(group.sm_count, -(-rows * lanes // 32)), 4 * (2 * experts + 1)
    warps = max(1, min(group.max_threads // 32, 16, SHARED_BYTES // vector))
    return ROUTER_LOSS.bind(
        group,
        grid=grid,
        block=32 * warps,
        defines={"ELEMENT": element_type(dtype), "EXPERTS": experts, "LANES": lanes},
        sizes={"losses": 1, "partial": grid * vector, "arrived": 4},
        shared_bytes=warps * vector,
    )


def solution(
    gate_logits: torch.Tensor | tuple[torch.Tensor, ...], num_experts: int, top_k: int = 2, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    layers = [gate_logits] if isinstance(gate_logits, torch.Tensor) else list(gate_logits)
    if len(layers) > MOST_LAYERS or len({layer.shape for layer in layers}) > 1:
        layers = [torch.cat(layers)]
    if num_experts > MOST_EXPERTS or top_k > num_experts:
        raise UsageError(f"{top_k} of {num_experts} experts; expected at most {MOST_EXPERTS} experts, and no more choices than those")
    layers, ranks = [layer.contiguous() for layer in layers], group_of()
    mask = None if attention_mask is None else attention_mask.to(torch.int64).contiguous()
    loss = torch.empty((), dtype=torch.float32, device=ranks.device)
    router_loss(ranks, len(layers) * layers[0].shape[0], num_experts, layers[0].dtype)(
        logits=[ranks.address(layer) for layer in layers],
        mask=mask,
        loss=loss,
        layers=len(layers),
        tokens=layers[0].shape[0],
        masked=1 if mask is None else mask.numel(),
        top_k=top_k,
    )
    return loss
