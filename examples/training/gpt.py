"""A GPT of several sizes, its data and its training, for the examples of this folder."""

import argparse
import gc
import json
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from peerlane.hardware.virtual_node import share_gpus

SYMBOLS = 64  # tokens that occur in the data


@dataclass(frozen=True)
class Size:
    """The size of a GPT and of a step, and how it is trained."""

    vocabulary: int
    context: int
    width: int
    head: int  # elements of a head
    layers: int
    batch: int  # sequences of a step: of each rank where ranks have data of their own
    rate: float  # of learning
    dtype: torch.dtype  # of products and activations; weights and their optimizer are float32


SIZES = {
    "tiny": Size(64, 32, 128, 16, 2, 16, 1e-3, torch.float32),
    "400m": Size(50_304, 1024, 1024, 64, 24, 8, 3e-4, torch.bfloat16),
    "1.4b": Size(50_304, 2048, 2048, 128, 24, 4, 2e-4, torch.bfloat16),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.head
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values (batch, heads, tokens, head) of the heads that this rank has: they lie head by head."""
        return self.qkv(x).unflatten(-1, (-1, 3 * self.head)).transpose(1, 2).chunk(3, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(size.width), nn.LayerNorm(size.width), Attention(size)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(size: Size, device: torch.device) -> GPT:
    """A GPT whose weights are the same on all ranks. Frees first what models that are gone have left."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with device:
        return GPT(size)


def follower(token: torch.Tensor) -> torch.Tensor:
    """The token that the rule of the data has behind ``token``."""
    return (5 * token + 3) % SYMBOLS


def batch(size: Size, step: int, part: int, device: torch.device) -> torch.Tensor:
    """Tokens (batch, context + 1): four of five follow from the token before, the others are random."""
    generator, shape = torch.Generator().manual_seed(1000 * step + part), (size.batch, size.context + 1)
    tokens = torch.randint(SYMBOLS, shape, generator=generator)
    follows = torch.rand(shape, generator=generator) < 0.8
    cycle = [torch.tensor(0)]  # the rule passes through all tokens before it comes back
    while len(cycle) < SYMBOLS:
        cycle.append(follower(cycle[-1]))
    cycle, places = torch.stack(cycle), torch.arange(shape[1])
    drawn = torch.where(follows, 0, places).cummax(1).values  # the last place with a random token
    return cycle[(cycle.argsort()[tokens.gather(1, drawn)] + places - drawn) % SYMBOLS].to(device)


def batches(size: Size, steps: int, part: int, device: torch.device) -> list[torch.Tensor]:
    """The data of all steps, made before them so that no step waits for it."""
    return [batch(size, step, part, device) for step in range(steps)]


@dataclass(frozen=True)
class Training:
    losses: torch.Tensor
    ms: list[float]  # milliseconds of every step

    def quartiles_ms(self) -> list[float]:
        """Of the steps after the first quarter, which warms up."""
        return torch.tensor(self.ms[len(self.ms) // 4 :]).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()


def train(model: nn.Module, size: Size, data: list[torch.Tensor], dtype: torch.dtype) -> Training:
    """Trains for a step with each batch, with ``dtype`` by autocast."""
    device, parameters = data[0].device, list(model.parameters())
    kinds = ([p for p in parameters if isinstance(p, DTensor)], [p for p in parameters if not isinstance(p, DTensor)])
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=size.rate, fused=True)  # no kernel takes both kinds
    losses, moments = [], [moment(device)]
    for tokens in data:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        moments.append(moment(device))
    losses = torch.stack(losses)
    losses.cpu()  # waits
    return Training(losses, [between_ms(*pair) for pair in pairwise(moments)])


def moment(device: torch.device) -> torch.cuda.Event | float:
    """Now: on a GPU when it has done what it was given so far, without a wait of the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    return (end - start) * 1e3 if isinstance(end, float) else start.elapsed_time(end)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that share a layer, with FSDP2 over the others")
    parser.add_argument("--checkpoint", type=Path, help="a folder: fsdp2.py writes the trained model to it, decode.py reads it")
    parser.add_argument("--json", type=Path, help="a file to which the numbers are appended, as a line")
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


def compare(ours: Training, theirs: Training, options: argparse.Namespace, limit: float) -> None:
    """Prints losses, averaged over ranks, and times of a step. Raises AssertionError where losses differ by more than ``limit`` of them."""
    both = torch.stack([ours.losses, theirs.losses]).double()
    dist.all_reduce(both)
    losses = both.cpu() / dist.get_world_size()
    sides = {"peerlane": ours, "torch.distributed": theirs}
    if dist.get_rank() == 0:
        shown = sorted({0, options.steps // 4, options.steps // 2, 3 * options.steps // 4, options.steps - 1})
        print("step             ", *(f"{step + 1:8}" for step in shown))
        for name, row in zip(sides, losses, strict=True):
            print(f"{name:17}", *(f"{row[step]:8.5f}" for step in shown))
        print(f"largest relative difference {((losses[0] - losses[1]) / losses[1]).abs().max():.1e}, allowed {limit:.0e}")
        times = (f"{name} {{1:.1f}} ({{0:.1f}} to {{2:.1f}})".format(*side.quartiles_ms()) for name, side in sides.items())
        print("ms a step:", ", ".join(times), flush=True)
        rows = zip(sides.items(), losses.tolist(), strict=True)
        store(options, {name: {"losses": row, "ms": side.ms, "quartiles_ms": side.quartiles_ms()} for (name, side), row in rows})
    torch.testing.assert_close(*losses, rtol=limit, atol=0.0)


def store(options: argparse.Namespace, sides: dict[str, object]) -> None:
    """Appends the numbers of both libraries to the file that the options name."""
    if options.json is not None:
        row = {"model": options.model, "ranks": dist.get_world_size(), "steps": options.steps, "sides": sides}
        with options.json.open("a") as file:
            print(json.dumps(row), file=file)
