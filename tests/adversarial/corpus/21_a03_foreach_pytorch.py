"""A03: takes all norms at once and scales all gradients at once, in place."""

import torch
import torch.distributed as dist


def solution(grad_tensors, max_norm, norm_type=2.0, fsdp_group=None):
    present = [gradient for gradient in grad_tensors if gradient is not None and gradient.numel()]
    device = next((gradient.device for gradient in grad_tensors if gradient is not None), None)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in present:
        total += gradient.float().abs().pow(norm_type).sum()
    if fsdp_group is not None:
        dist.all_reduce(total, group=fsdp_group)
    norm = total ** (1.0 / norm_type)
    if present and norm > max_norm:
        torch._foreach_mul_(present, (max_norm / norm).item())
    return norm
