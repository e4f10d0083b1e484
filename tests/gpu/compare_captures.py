"""How much the time of a replayed call depends on its capture, that is on where the driver put its graphs. One GPU does.

    python tests/gpu/compare_captures.py [--captures 24] [--elements 1048576]

Captures calls of one small kernel, each into a graph of its own as timed blocks do, and times some blocks; then captures them anew, and so
on. Prints for the median, the mean of the middle half, and the mean of a block's calls, in microseconds: how far captures lie apart, and
blocks of one capture, as standard deviations; by how much a capture's first block is slower than its others; and how far the means over 2
and more captures in a row lie apart. Then the same for graphs that stay, and for calls without a kernel.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from peerlane.evaluate.ranks.timed_block import GraphBlock
from peerlane.evaluate.timing import cache_flush
from peerlane.evaluate.timing.cores import TimedCore, cores_of_rank
from peerlane.evaluate.timing.statistics import mean_between

SLOTS, BLOCKS = 160, 4
LEADING = 4  # calls that do not count
IN_A_ROW = (2, 3, 5, 9)
FIGURES = ("median", "middle half", "mean")


class Snapshots:
    """What a block wants of :class:`~peerlane.evaluate.memory.slots.OutputRegions`: a copy of every answer."""

    def __init__(self, like: torch.Tensor) -> None:
        self._copies = [torch.empty_like(like) for _ in range(SLOTS)]

    def fresh(self, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args

    def take(self, slot: int, output: torch.Tensor, args: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        self._copies[slot].copy_(output)
        return [output]


def timed(block: GraphBlock, core: TimedCore) -> tuple[float, float, float]:
    """The figures of one block."""
    times = block.run(core, {}, random.sample(range(SLOTS), SLOTS), {}, {})["iterations_us"][LEADING:]
    return float(np.median(times)), mean_between(times, (0.25, 0.75)), float(np.mean(times))


def report(name: str, blocks: np.ndarray) -> None:
    """Of blocks by capture, and the figures of each."""
    captures = blocks.mean(1)
    print(f"{name}: {len(blocks)} captures, {blocks.shape[1]} blocks of each, a call takes {captures.mean(0)[1]:.2f} us")
    late = (blocks[:, 0] - blocks[:, 1:].mean(1)).mean(0)
    for number, figure in enumerate(FIGURES):
        column = captures[:, number]
        rows = [np.std([column[i : i + k].mean() for i in range(len(column) - k + 1)]) for k in IN_A_ROW]
        within = blocks.std(1).mean(0)[number]
        print(
            f"  {figure:12s} captures {column.std():.3f}, blocks of one {within:.3f}, the first {late[number]:+.3f}; "
            + ", ".join(f"{k} in a row {value:.3f}" for k, value in zip(IN_A_ROW, rows, strict=True))
        )
    print("  captures by the middle half:", " ".join(f"{value:.2f}" for value in captures[:, 1]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=int, default=24)
    parser.add_argument("--elements", type=int, default=1 << 20, help="of bfloat16, that a call copies")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1, device_id=device)
        cache_flush.bind()
        core = TimedCore(cores_of_rank(0, 1))
        args = [(torch.randn(options.elements, device=device, dtype=torch.bfloat16),) for _ in range(SLOTS)]
        snapshots: Any = Snapshots(args[0][0])

        def captured(solution: Callable[..., torch.Tensor]) -> GraphBlock:
            block = GraphBlock(solution, args, snapshots, device)
            block.warm()
            return block

        def anew(solution: Callable[..., torch.Tensor]) -> np.ndarray:
            rows = []
            for _ in range(options.captures):
                block = captured(solution)
                rows.append([timed(block, core) for _ in range(BLOCKS)])
                del block  # its place is free before the next one is captured, as in races
            return np.array(rows)

        report("one kernel, captured anew", anew(torch.clone))
        block = captured(torch.clone)
        report("one kernel, the same graphs", np.array([[timed(block, core) for _ in range(BLOCKS)] for _ in range(options.captures)]))
        del block
        report("no kernel, captured anew", anew(lambda tensor: tensor))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
