"""Problem 23, a loss normalised by all ranks' tokens, and its gradient: one warp, one packet for each peer.

Bound by the launch and one trip of a packet: 12 bytes a rank, nothing else to read but five scalars. The device decides what a rank without
tokens means, so a graph can capture it."""

import torch

from peerlane.device import BoundKernel, DeclaredKernel, Epochs, Group, Packets, Pointer, element_type, group_of, per_group

SOURCE = r"""
#include <peerlane/rows.cuh>
using namespace peerlane;

// The scalar at `place`, 0 if there is none; rounded on the way back.
template <class E>
__device__ float scalar(const char* place) {
    float value[row_lanes] = {};
    if (place != nullptr) RowOf<E>(place, 0, 1).load(0, value);
    return value[0];
}
template <class E>
__device__ void put(char* place, float number) {
    const float value[row_lanes] = {number};
    RowOf<E>(place, 0, 1).store(0, value);
}

extern "C" __global__ void __launch_bounds__(32) token_loss(const __grid_constant__ Arena arena, const __grid_constant__ TokenLoss args) {
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    const SmallExchange<WORLD_SIZE, float> sums(arena, args.sums, epoch);
    const float tokens = static_cast<float>(*args.local_tokens), all_tokens = static_cast<float>(*args.global_tokens);
    float loss = scalar<LOSS_TYPE>(args.loss);
    if (tokens == 0.0f && !(fabsf(loss) <= 3.402823466e38f)) loss = 0.0f;  // times zero tokens: whatever finite number it counts as
    sums.push(0, loss * tokens);
    const float sum = sums.pull(0, loss * tokens, [](float a, float b) { return a + b; });
    if (threadIdx.x != 0) return;
    const float gradient = scalar<GRAD_TYPE>(args.grad) * tokens / all_tokens + scalar<GRAD_TYPE>(args.grad_sum) * tokens;
    put<LOSS_TYPE>(args.normalized, sum / all_tokens);
    put<LOSS_TYPE>(args.loss_sum, sum);
    put<GRAD_TYPE>(args.grad_loss, gradient);
}
"""
TOKEN_LOSS = DeclaredKernel(
    "token_loss", SOURCE, epochs=Epochs(), sums=Packets(), loss=Pointer("const char*"), local_tokens=Pointer("const TOKEN_COUNT*"),
    global_tokens=Pointer("const TOKEN_COUNT*"), grad=Pointer("const char*"), grad_sum=Pointer("const char*"),
    normalized=Pointer(), loss_sum=Pointer(), grad_loss=Pointer(),
)  # fmt: skip
COUNTS = {torch.int64: "long long", torch.int32: "int", torch.float32: "float"}


@per_group
def token_loss(group: Group, loss: torch.dtype, grad: torch.dtype, count: torch.dtype) -> BoundKernel:
    defines = {"LOSS_TYPE": element_type(loss), "GRAD_TYPE": element_type(grad), "TOKEN_COUNT": COUNTS[count]}
    return TOKEN_LOSS.bind(group, grid=1, block=32, defines=defines, sizes={"sums": 1})


def solution(
    loss: torch.Tensor,
    local_valid_tokens: torch.Tensor,
    global_valid_tokens: torch.Tensor,
    grad_normalized_loss: torch.Tensor,
    grad_loss_sum: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = local_valid_tokens.dtype if local_valid_tokens.dtype in COUNTS else torch.int64
    results = torch.empty_like(loss), torch.empty_like(loss), torch.empty_like(grad_normalized_loss)
    token_loss(group_of(), loss.dtype, grad_normalized_loss.dtype, counts)(
        loss=loss,
        local_tokens=local_valid_tokens.to(counts),
        global_tokens=global_valid_tokens.to(counts),
        grad=grad_normalized_loss,
        grad_sum=None if grad_loss_sum is None else grad_loss_sum.to(grad_normalized_loss.dtype),
        normalized=results[0],
        loss_sum=results[1],
        grad_loss=results[2],
    )
    return results
