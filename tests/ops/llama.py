"""A Llama of two layers, its projections sharded over ranks: what the compiler's pass is tested on."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, INNER, HEADS, WIDTH, VOCABULARY = 64, 128, 4, 16, 32
AllReduce = Callable[[torch.Tensor], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Transformers has it for Llama."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * wide.to(x.dtype)


class Layer(torch.nn.Module):
    """Attention and a gated perceptron; this rank has its part of the heads and of the perceptron's inner columns."""

    def __init__(self, rank: int, world: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = HEADS // world

        def shard(rows: int, columns: int, axis: int) -> torch.nn.Parameter:
            whole = torch.randn(rows, columns) / columns**0.5
            return torch.nn.Parameter(whole.chunk(world, axis)[rank].contiguous().to(dtype))

        self.qkv = torch.nn.ParameterList([shard(HEADS * WIDTH, HIDDEN, 0) for _ in range(3)])
        self.out = shard(HIDDEN, HEADS * WIDTH, 1)
        self.gate, self.up, self.down = shard(INNER, HIDDEN, 0), shard(INNER, HIDDEN, 0), shard(HIDDEN, INNER, 1)
        self.norms = torch.nn.ParameterList([torch.nn.Parameter((1 + 0.1 * torch.randn(HIDDEN)).to(dtype)) for _ in range(2)])

    def forward(self, x: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        normed = rms_norm(x, self.norms[0])
        q, k, v = (F.linear(normed, weight).unflatten(-1, (self.heads, WIDTH)).transpose(-2, -3) for weight in self.qkv)
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(hidden, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
        x = x + all_reduce(F.linear(attended, self.out))
        normed = rms_norm(x, self.norms[1])
        return x + all_reduce(F.linear(F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up), self.down))


class Llama(torch.nn.Module):
    """Two layers; ``forward`` returns the loss of the next tokens. One seed on all ranks gives shards of one model."""

    def __init__(self, rank: int, world: int, all_reduce: AllReduce, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN).to(dtype))
        self.layers: Any = torch.nn.ModuleList([Layer(rank, world, dtype) for _ in range(2)])
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN, dtype=dtype))
        self.all_reduce = all_reduce

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x, self.all_reduce)
        logits = F.linear(rms_norm(x, self.norm), self.embedding).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
