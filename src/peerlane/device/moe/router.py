"""The router of a mixture with few experts, in one launch: products, softmax, and the largest probabilities."""

import torch

from peerlane.device.host.declare import U32, BoundKernel, DeclaredKernel, Pointer
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.host.group import Group, per_group

MOST_EXPERTS = 32
"""A lane has a logit. More experts are a matter for matrix units."""
_THREADS = 128

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

constexpr int at_once = EXPERTS <= 8 ? 4 : EXPERTS <= 16 ? 2 : 1;  // tokens of a warp, which share what it loads of the router

extern "C" __global__ void __launch_bounds__(128) moe_router(const __grid_constant__ Arena, const __grid_constant__ MoeRouter args) {
    const u32 lane = Warp{}.thread();
    each_row((args.tokens + at_once - 1) / at_once, [&](u32 number) {
        float sum[at_once][EXPERTS] = {};
        each_column(args.h, [&](u32 column) {
            float x[at_once][row_lanes], row[row_lanes];
#pragma unroll
            for (int t = 0; t < at_once; ++t) {
                RowOf<ELEMENT>(args.x, min(number * at_once + t, args.tokens - 1), args.h).load(column, x[t]);
            }
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) {
                RowOf<ELEMENT>(args.router, e, args.h).load(column, row);
#pragma unroll
                for (int t = 0; t < at_once; ++t) {
#pragma unroll
                    for (int i = 0; i < row_lanes; ++i) sum[t][e] += x[t][i] * row[i];
                }
            }
        });
#pragma unroll
        for (int t = 0; t < at_once; ++t) {
            const u32 token = number * at_once + t;
            float logit = -infinity;
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) {
                const float whole = warp_sum(sum[t][e]);
                if (lane == e) logit = whole + (args.bias == nullptr ? 0.0f : element_of<ELEMENT>(args.bias, e));
            }
            const float most = warp_max(logit), power = lane < EXPERTS ? expf(logit - most) : 0.0f;
            const float share = power / warp_sum(power);
            // As torch.topk ranks them: NaN before all numbers. Each slot has an expert, and none has the same one.
            float left = lane >= EXPERTS ? -1.0f : share == share ? share : 2.0f;
            for (u32 slot = 0; slot < args.k; ++slot) {
                const u32 chosen = __ffs(__ballot_sync(0xffffffffu, left == warp_max(left))) - 1;
                if (lane != chosen) continue;
                left = -1.0f;
                if (token >= args.tokens) continue;
                args.experts[u64(token) * args.k + slot] = chosen;
                set_element<ELEMENT>(args.weights, u64(token) * args.k + slot, share);
            }
        }
    });
}
"""
MOE_ROUTER = DeclaredKernel(
    "moe_router", SOURCE, x=Pointer("const char*"), router=Pointer("const char*"), bias=Pointer("const char*"),
    experts=Pointer("long long*"), weights=Pointer(), tokens=U32, h=U32, k=U32,
)  # fmt: skip


@per_group
def _router(group: Group, experts: int, dtype: torch.dtype) -> BoundKernel:
    defines: dict[str, str | int] = {"EXPERTS": experts, "ELEMENT": ELEMENT_TYPES[dtype]}
    return MOE_ROUTER.bind(group, grid=group.sm_count, block=_THREADS, defines=defines)


def route(
    group: Group, tokens: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's ``top_k`` experts (T, k), int64, and their probabilities, in the tokens' dtype, the largest first. ``router``
    (experts, H) and ``bias`` (experts) have that dtype too: bfloat16, float16 or float32. The first call for a number of experts is
    collective."""
    experts, (count, h) = router.shape[0], tokens.shape
    top_experts = torch.empty((count, top_k), dtype=torch.int64, device=tokens.device)
    weights = tokens.new_empty((count, top_k))
    _router(group, experts, tokens.dtype)(
        x=tokens.contiguous(), router=router.contiguous(), bias=bias, experts=top_experts, weights=weights, tokens=count, h=h, k=top_k
    )
    return weights, top_experts
