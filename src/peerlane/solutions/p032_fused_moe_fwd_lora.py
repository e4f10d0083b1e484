"""Problem 32, a mixture-of-experts layer with low-rank adapters: the adapters are added to the weights, and two kernels are the layer.

W z + B (A z) is (W + B A) z. The sum W + B A is rounded once, and costs one pass over the weights. The layer's kernels are those of
problem 31, so the host waits for nothing. The device code is ``peerlane/moe/moe_layer.cuh``.

W + B A is a product of the kit. A library's product may launch clusters. Where ranks share a GPU, a cluster may find no room beside the
blocks of other ranks that already wait for this rank."""

import torch
import torch.distributed as dist

from peerlane.device import Group, group_of
from peerlane.device.moe.layer import Weights, gated_experts
from peerlane.device.products import gemm


def adapted(group: Group, layer: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor) -> Weights:
    weight, (outputs, depth) = layer.weight.detach(), b.shape
    if weight.dtype not in gemm.ELEMENT_TYPES:
        return Weights(torch.addmm(weight, b, a), layer.bias)
    multiply = gemm.product(group, outputs, a.shape[1], depth, weight.dtype, gemm.Epilogue(residual=True))
    return Weights(multiply(gemm.aligned(b), gemm.aligned(a), residual=weight), layer.bias)


@torch.no_grad()
def solution(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    gate_proj: torch.nn.Linear,
    up_proj: torch.nn.Linear,
    down_proj: torch.nn.Linear,
    lora_gate_A: torch.Tensor,
    lora_gate_B: torch.Tensor,
    lora_up_A: torch.Tensor,
    lora_up_B: torch.Tensor,
    lora_down_A: torch.Tensor,
    lora_down_B: torch.Tensor,
    num_experts: int,
    top_k: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks, tokens = group_of(group), hidden_states.reshape(-1, hidden_states.shape[-1])
    layers = (
        adapted(ranks, gate_proj, lora_gate_A, lora_gate_B),
        adapted(ranks, up_proj, lora_up_A, lora_up_B),
        adapted(ranks, down_proj, lora_down_A, lora_down_B),
    )
    return gated_experts(ranks, tokens, (gate_weight, gate_bias), layers, top_k)
