"""A small GPT, its data and its training, for the examples of this folder."""

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from peerlane.hardware.virtual_node import share_gpus

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 32, 128, 8, 2, 16
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values (batch, heads, tokens, HEAD) of the heads that this rank has."""
        return [layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(device: torch.device) -> GPT:
    """A GPT whose weights are the same on all ranks."""
    torch.manual_seed(0)
    return GPT().to(device)


def batch(step: int, part: int, device: torch.device) -> torch.Tensor:
    """Tokens (BATCH, CONTEXT + 1): four of five follow from the token before, the others are random."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    follows = torch.rand(tokens.shape, generator=generator) < 0.8
    for place in range(1, CONTEXT + 1):
        tokens[:, place] = torch.where(follows[:, place], (5 * tokens[:, place - 1] + 3) % VOCABULARY, tokens[:, place])
    return tokens.to(device)


def train(
    model: Callable[[torch.Tensor], torch.Tensor], parameters: object, part: int, device: torch.device, steps: int, dtype: torch.dtype
):
    """The loss of this rank's part of the data at every step."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-3, foreach=False), []
    for step in range(steps):
        tokens = batch(step, part, device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    return parser.parse_args()


def start(backend: str | None = None) -> torch.device:
    """Starts this rank on its GPU, on one that ranks share, or on the CPU; ``backend`` None: NCCL or gloo."""
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if (node := share_gpus(int(os.environ["WORLD_SIZE"]), torch.cuda.device_count())) is not None:
        os.environ |= node.rank_environment(rank)  # NCCL needs it where ranks share a GPU
        torch.cuda.set_device(device := torch.device("cuda", node.device_index(rank)))
    torch.set_num_threads(1)
    dist.init_process_group(backend or baseline(device))
    return device


def baseline(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def compare(ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    """Prints the losses, averaged over ranks, and raises AssertionError where they differ by more than ``limit`` of them."""
    both = torch.stack([ours, theirs]).double()
    dist.all_reduce(both)
    ours, theirs = both.cpu() / dist.get_world_size()
    if dist.get_rank() == 0:
        shown = sorted({0, len(ours) // 4, len(ours) // 2, 3 * len(ours) // 4, len(ours) - 1})
        print("step             ", *(f"{step + 1:8}" for step in shown))
        print("peerlane         ", *(f"{ours[step]:8.5f}" for step in shown))
        print("torch.distributed", *(f"{theirs[step]:8.5f}" for step in shown))
        print(f"largest relative difference {((ours - theirs) / theirs).abs().max():.1e}, allowed {limit:.0e}", flush=True)
    torch.testing.assert_close(ours, theirs, rtol=limit, atol=0.0)
