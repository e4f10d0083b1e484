"""What tests of problems share: the arguments of every rank, their answers and costs, and the small cases."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from peerlane import problems
from peerlane.problems import Case, Cost, Draw


def drawing(case: Case, rank: int, block: int = 0, slot: int = 0, *, secret: str = "unit", kind: str = "random") -> Draw:
    return Draw(secret=secret, case_key=case.key, slot=slot, block=block, rank=rank, kind=kind)


def arguments(case: Case, block: int = 0, slot: int = 0, *, secret: str = "unit") -> list[tuple[Any, ...]]:
    """Every rank's."""
    draws = (drawing(case, rank, block, slot, secret=secret) for rank in range(case.world_size))
    return [problems.get(case.problem).inputs(case, rank, draw) for rank, draw in enumerate(draws)]


def drawn(number: int, label: str, world_size: int = 4) -> tuple[Case, list[tuple[Any, ...]]]:
    """A small case and every rank's arguments."""
    case = problems.get(number).case("small", label, world_size)
    return case, arguments(case)


def oracle(case: Case, inputs: Sequence[tuple[Any, ...]], rank: int = 0) -> Any:
    """One rank's answer."""
    return problems.get(case.problem).oracle(case, list(inputs), rank)


def oracles(case: Case, inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every rank's answer."""
    return [oracle(case, inputs, rank) for rank in range(case.world_size)]


def costs(number: int, preset: str, world_size: int = 8) -> list[Cost]:
    """Every rank's cost of a preset's first case."""
    case = problems.get(number).cases(preset, world_size)[0]
    return [problems.get(number).cost(case, rank) for rank in range(world_size)]


def members(case: Case, rank: int) -> list[int]:
    """The ranks of a rank's group: all of them, or every second one."""
    return [q for q in range(case.world_size) if case.params.get("group") != "strided" or q % 2 == rank % 2]


def small(*numbers: int, variant: str | None = "default", worlds: Sequence[int] = (2, 4), marks: Any = ()) -> list[Any]:
    """Parameters of a test: the problems' small cases on so many ranks; of all variants if none is named."""
    return [
        pytest.param(case, id=case.key, marks=marks)
        for problem in map(problems.get, numbers)
        for world in worlds
        for name in (problem.variants if variant is None else (variant,))
        for case in problem.cases("small", world, name)
    ]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def attention_layer(
    x: torch.Tensor, w_qkv: torch.Tensor, w_o: torch.Tensor, heads: int, *, causal: bool, scale: float | None = None
) -> torch.Tensor:
    """A layer on the whole sequence with all heads by torch's attention, in float64, as a model without parallelism computes it."""
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in F.linear(wide(x), wide(w_qkv)).chunk(3, dim=-1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return F.linear(attended.transpose(1, 2).flatten(2), wide(w_o))
