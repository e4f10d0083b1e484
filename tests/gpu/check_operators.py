"""Operators of ``peerlane.ops`` on GPUs in bfloat16: results and gradients beside those of the whole computation in float32.

    PYTHONPATH=src python tests/gpu/check_operators.py [--ranks 4]

Ranks share GPUs where there are fewer GPUs than ranks. Every rank draws all ranks' inputs, so the whole computation needs no exchange. A
number is the norm of an error over the norm of the value, on rank 0. Exits with 1 where one is above 2 % on any rank.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from harness import BF16, Row, run_on_shared_gpus, script

from peerlane import ops

LIMIT, OWN = 0.02, 4
Values = list[torch.Tensor]


def products(values: list[Values]) -> Values:
    a = torch.cat([x @ w1 for x, w1, _ in values], 1).relu()
    return [a @ torch.cat([w2 for *_, w2 in values])] * len(values)


def own_products(rank: int, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    columns = slice(rank * w2.shape[0], (rank + 1) * w2.shape[0])
    return ops.gemm_all_reduce(ops.gemm_all_gather(x, w1).relu()[:, columns].contiguous(), w2)


def routing(rank: int, tokens: int, experts: int) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank)).topk(4).indices.cuda()


def mixture(values: list[Values]) -> Values:
    """Of x, weights, gate, up, down of every rank."""
    gate, up, down = (torch.cat([rank[i] for rank in values]) for i in (2, 3, 4))
    found = []
    for rank, (x, weights, *_) in enumerate(values):
        chosen, y = routing(rank, x.shape[0], gate.shape[0]), torch.zeros_like(x)
        for expert in range(gate.shape[0]):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(x[token] @ gate[expert].T) * (x[token] @ up[expert].T)
            y = y.index_add(0, token, hidden @ down[expert].T * weights[token, slot].unsqueeze(1))
        found.append(y)
    return found


def compared(
    shapes: list[list[tuple[int, ...]]], whole: Callable[[list[Values]], Values], own: Callable[..., torch.Tensor], rank: int
) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    values = [[(torch.randn(shape, generator=draw) / shape[-1] ** 0.25).to(BF16).cuda() for shape in of] for of in shapes]
    wide = [[value.float().requires_grad_() for value in of] for of in values]
    mine = [value.requires_grad_() for value in values[rank]]
    results = whole(wide)
    grads = [torch.randn(result.shape, generator=draw).to(BF16).cuda() for result in results]
    torch.autograd.backward(results, [grad.float() for grad in grads])
    y = own(*mine)
    y.backward(grads[rank])
    pairs = [(y.detach(), results[rank].detach()), *((value.grad, want.grad) for value, want in zip(mine, wide[rank], strict=True))]
    return [round(float((got - want).norm() / want.norm()), 5) for got, want in pairs]  # type: ignore[operator, union-attr]


def rows_of(rank: int, ranks: int) -> Iterator[Row]:
    for number in range(2):
        m, k, n, tokens, h, inner = 512, 256, 384, 300 + 100 * number, 512, 256
        layers: list[tuple[int, ...]] = [(OWN, inner, h), (OWN, inner, h), (OWN, h, inner)]
        errors = {
            "products": compared([[(m, k), (k, n), (n, k)]] * ranks, products, partial(own_products, rank), rank),
            "experts": compared(
                [[(tokens - 50 * r, h), (tokens - 50 * r, 4), *layers] for r in range(ranks)],
                mixture,
                lambda x, *others: ops.gated_experts(x, routing(rank, x.shape[0], ranks * OWN), *others),
                rank,
            ),
        }
        for name, found in errors.items():
            yield {"operator": name, "tokens": tokens, "errors": found, "wrong": sum(not error < LIMIT for error in found)}


if __name__ == "__main__":
    options = script(__doc__, ranks=4).parse_args()
    run_on_shared_gpus(options.ranks, options.out, rows_of)
