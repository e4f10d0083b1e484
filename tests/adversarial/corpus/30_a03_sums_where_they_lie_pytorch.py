"""A03: reduces the gradients where they lie and returns them, as the problem allows."""

import torch.distributed as dist


def solution(grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B, group=None):
    gradients = (grad_fc1_1_lora_A, grad_fc1_2_lora_A, grad_fc2_lora_B)
    for gradient in gradients:
        wide = gradient.float().contiguous()
        dist.all_reduce(wide, group=group)
        gradient.copy_(wide)
    return gradients
