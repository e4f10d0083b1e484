"""Operators of ``peerlane.ops`` beside the whole computation in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane import ops

Values = list[torch.Tensor]
"""The inputs of one rank."""
Shapes = Callable[[int], list[tuple[int, ...]]]


@dataclass(frozen=True)
class Case:
    """An operator with inputs of some shapes, and what it computes from all ranks' inputs."""

    name: str
    operator: str
    shapes: Shapes
    """of a rank's inputs, of the number of ranks"""
    whole: Callable[[list[Values]], Values]
    """every rank's result, of every rank's inputs"""
    options: tuple[tuple[str, object], ...] = ()
    settings: tuple[object, ...] = ()
    """arguments of the custom operator between the tensors and the group"""
    casts: bool = True
    """whether autocast casts its operands"""
    keywords: tuple[str, ...] = ()
    """the names of the last inputs, as arguments of the public function"""
    arguments: Callable[[Values], tuple[object, ...]] = tuple
    """its other arguments, of the other inputs"""
    schema: Callable[[Values], tuple[object, ...]] = tuple
    """the custom operator's arguments before ``settings``, of the inputs"""
    takes: Callable[[Any], torch.Tensor] = lambda result: result
    """one tensor of the result"""

    def draw(self, generator: torch.Generator, rank: int, world_size: int, dtype: torch.dtype) -> Values:
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in self.shapes(world_size)]
        if self.operator == "gated_experts":
            tokens, slots = values[1].shape[:-1], values[1].shape[-1]
            values[1] = torch.rand((*tokens, 2 * world_size), generator=generator).topk(slots).indices
        return [value.requires_grad_() if value.is_floating_point() else value for value in values]

    def call(self, group: dist.ProcessGroup | None) -> Callable[..., torch.Tensor]:
        function = getattr(ops, self.operator)

        def call(*values: torch.Tensor, **options: object) -> torch.Tensor:
            count = len(values) - len(self.keywords)
            terms = dict(zip(self.keywords, values[count:], strict=True))
            return self.takes(function(*self.arguments(list(values[:count])), group=group, **terms, **dict(self.options), **options))

        return call


def _sum(values: list[Values], call: Callable[..., torch.Tensor]) -> torch.Tensor:
    return torch.stack([call(*rank) for rank in values]).sum(0)


def _same(whole: torch.Tensor, values: list[Values]) -> Values:
    return [whole] * len(values)


def _exchanged(values: list[Values]) -> Values:
    parts = [x.chunk(len(values)) for (x,) in values]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(values))]


def _attention(values: list[Values]) -> Values:
    q, k, v = (torch.cat(shards, 1).transpose(1, 2) for shards in zip(*values, strict=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return list(out.chunk(len(values), 1))


def _experts(values: list[Values]) -> Values:
    gate, up, down = (torch.cat([rank[i] for rank in values]) for i in (3, 4, 5))
    found = []
    for x, experts, weights, *_ in values:
        rows = [torch.einsum("...h,...kih->...ki", x, layer[experts]) for layer in (gate, up)]
        found.append(torch.einsum("...ki,...khi,...k->...h", F.silu(rows[0]) * rows[1], down[experts], weights))
    return found


def _products(lead: tuple[int, ...], of: str) -> list[Case]:
    """Each product with rows of these leading axes. The first is multiplied by the number of ranks."""

    def shapes(world_size: int) -> list[tuple[int, ...]]:
        return [(world_size * lead[0], *lead[1:], 4), (4, 5)]

    def gathered(world_size: int) -> list[tuple[int, ...]]:
        return [(*lead, 4), (4 * world_size, 5)]

    def wide(values: list[Values]) -> Values:
        whole = torch.cat([a for a, _ in values], -1)
        return [whole @ b for _, b in values]

    return [
        Case(f"all_gather_gemm of {of}", "all_gather_gemm", gathered, wide),
        Case(
            f"row_gather_gemm of {of}",
            "row_gather_gemm",
            lambda world_size: [(*lead, 4), (4, 5), (5,)],
            lambda v: [torch.cat([a for a, *_ in v]) @ b + bias for _, b, bias in v],
            arguments=lambda v: (v[0], [v[1]], [v[2]]),
            schema=lambda v: (v[0].flatten(0, -2), [v[1]], [v[2]]),
            settings=("none", 1.0, False),
            takes=lambda result: result[0],
        ),
        Case(
            f"gemm_reduce_scatter of {of}",
            "gemm_reduce_scatter",
            shapes,
            lambda v: list(_sum(v, torch.matmul).chunk(len(v))),
            settings=(None, None, "none", 1.0),
        ),
        Case(
            f"gemm_all_reduce of {of}",
            "gemm_all_reduce",
            shapes,
            lambda v: _same(_sum(v, torch.matmul), v),
            settings=(None, None, "none", 1.0),
        ),
        Case(f"gemm_all_gather of {of}", "gemm_all_gather", shapes, lambda v: _same(torch.cat([a @ b for a, b in v], -1), v)),
    ]


def _moves(lead: tuple[int, ...], of: str) -> list[Case]:
    def shapes(world_size: int) -> list[tuple[int, ...]]:
        return [(world_size * lead[0], *lead[1:])]

    return [
        Case(f"all_reduce of {of}", "all_reduce", shapes, lambda v: _same(_sum(v, lambda x: x), v), casts=False),
        Case(f"all_gather of {of}", "all_gather", shapes, lambda v: _same(torch.cat([x for (x,) in v]), v), casts=False),
        Case(f"reduce_scatter of {of}", "reduce_scatter", shapes, lambda v: list(_sum(v, lambda x: x).chunk(len(v))), casts=False),
        Case(f"all_to_all of {of}", "all_to_all", shapes, _exchanged, casts=False),
    ]


def _finished(lead: tuple[int, ...]) -> list[Case]:
    """Products with a bias, an activation and a residual."""

    def shapes(parts: int, world_size: int) -> list[tuple[int, ...]]:
        rows = (world_size * lead[0], *lead[1:])
        return [(*rows, 4), (4, 5), (5,), (rows[0] // parts, *rows[1:], 5)]

    def finish(total: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.silu(total / 2 + bias) + residual

    options = (("activation", "silu"), ("scale", 0.5))
    return [
        Case(
            "gemm_reduce_scatter with an epilogue",
            "gemm_reduce_scatter",
            lambda world_size: shapes(world_size, world_size),
            lambda v: [finish(part, *own[2:]) for part, own in zip(_sum(v, lambda a, b, *_: a @ b).chunk(len(v)), v, strict=True)],
            options,
            keywords=("bias", "residual"),
        ),
        Case(
            "gemm_all_reduce with an epilogue",
            "gemm_all_reduce",
            lambda world_size: shapes(1, world_size),
            lambda v: [finish(_sum(v, lambda a, b, *_: a @ b), *own[2:]) for own in v],
            options,
            keywords=("bias", "residual"),
        ),
    ]


def _normalised(values: list[Values]) -> Values:
    """The norm, with one weight and one residual on all ranks."""
    total = _sum(values, lambda x, *_: x)
    return [F.rms_norm(total + residual, residual.shape[-1:], weight, 1e-6) for _, weight, residual in values]


def _normalised_shards(values: list[Values]) -> Values:
    """The norm of each rank's rows, with a weight and a residual of its own."""
    shards = _sum(values, lambda x, *_: x).chunk(len(values))
    return [F.rms_norm(part + own, own.shape[-1:], weight, 1e-6) for part, (_, weight, own) in zip(shards, values, strict=True)]


def _gathered_norm(values: list[Values]) -> Values:
    return _same(torch.cat(_normalised_shards(values)), values)


def _shards(heads: int, key_heads: int) -> Shapes:
    return lambda world_size: [(2, 3, heads, 8), (2, 3, key_heads, 8), (2, 3, key_heads, 8)]


def _mixture(tokens: tuple[int, ...]) -> Shapes:
    return lambda world_size: [(*tokens, 8), (*tokens, 2), (*tokens, 2), (2, 16, 8), (2, 16, 8), (2, 8, 16)]


CAUSAL = (("causal", True),)
SCALE = (8**-0.5, True)
CASES = [
    *_moves((2, 3), "a matrix"),
    *_moves((2,), "a row"),
    *_products((2,), "a matrix"),
    *_products((2, 3), "three axes"),
    *_finished((2, 3)),
    Case(
        "all_reduce_rms_norm",
        "all_reduce_rms_norm",
        lambda world_size: [(2, 3, 8 * world_size), (8 * world_size,), (2, 3, 8 * world_size)],
        _normalised,
        arguments=tuple,
        schema=tuple,
        settings=(None, 1e-6, 0.0, "none"),
        casts=False,
        takes=lambda result: result[0],
    ),
    *(
        Case(
            f"reduce_scatter_rms_norm{' and all-gather' if gathers else ''}",
            "reduce_scatter_rms_norm",
            lambda world_size: [(2 * world_size, 3, 8), (8,), (2, 3, 8)],
            whole,
            (("gathers", gathers),),
            settings=(gathers, 1e-6, "none"),
            casts=False,
            takes=lambda result: result[0],
        )
        for gathers, whole in ((False, _normalised_shards), (True, _gathered_norm))
    ),
    Case("ring_attention", "ring_attention", _shards(6, 6), _attention, CAUSAL, SCALE),
    Case("ring_attention with shared keys", "ring_attention", _shards(6, 2), _attention, CAUSAL, SCALE),
    Case("ulysses_attention", "ulysses_attention", _shards(12, 12), _attention, CAUSAL, SCALE),
    Case("gated_experts", "gated_experts", _mixture((5,)), _experts, settings=(0,)),
    Case("gated_experts of three axes", "gated_experts", _mixture((2, 3)), _experts, settings=(0,)),
]
