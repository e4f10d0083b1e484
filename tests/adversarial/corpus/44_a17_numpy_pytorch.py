"""A17: quantises with NumPy on the host; codes and scales travel as bytes."""

import numpy as np
import torch
import torch.distributed as dist


def solution(flat_grad, block_size):
    values = flat_grad.detach().float().cpu().numpy().reshape(-1)
    blocks = np.zeros((-(-values.size // block_size), block_size), dtype=np.float32)
    blocks.reshape(-1)[: values.size] = values
    if not blocks.size:
        return flat_grad.clone()
    spoiled = ~np.isfinite(blocks).all(1, keepdims=True)
    blocks = np.where(spoiled, np.float32(0), blocks)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), np.float32(1e-8)) / np.float32(127)
    codes = np.clip(np.rint(blocks / scales), -127, 127).astype(np.int8)
    scales[spoiled] = np.nan

    message = torch.from_numpy(np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], 1)).to(flat_grad.device)
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, message)
    total = np.zeros_like(blocks)
    for one in messages:
        data = one.cpu().numpy()
        total += data[:, 4:].view(np.int8).astype(np.float32) * np.ascontiguousarray(data[:, :4]).view(np.float32)
    mean = (total / np.float32(len(messages))).reshape(-1)[: values.size]
    return torch.from_numpy(mean).to(flat_grad.device, flat_grad.dtype).view(flat_grad.shape)
