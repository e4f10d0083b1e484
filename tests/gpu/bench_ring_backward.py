"""Gradients of attention over ranks on GPUs: right beside float64, and how fast by heads beside the gather of whole shards.

    PYTHONPATH=src python tests/gpu/bench_ring_backward.py [--ranks 2] [--shape llama2_4k] [--out FILE]

``gathered_us`` gathers and computes without overlap, ``heads_N_B_us`` sends heads in N pieces by B blocks, ``chosen_us`` is what the
library does, and ``products_us`` are the products of a rank's heads alone. Times are of replayed graphs: the slowest rank's median of five
stretches. ``error`` is the largest one of a gradient of the first head relative to its norm, ``wrong`` counts those above 1e-2. Every line
is a JSON object; ``--out`` appends them to a file. Exits with 1 where a gradient is wrong."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from harness import BF16, Row, microseconds, run_on_shared_gpus, script

from peerlane.device import communicator, group_of
from peerlane.device.attention import head_exchange, ring_backward
from peerlane.device.attention.backward import attention_backward, query_numbers
from peerlane.device.attention.head_exchange import HeadExchange, HeadShape
from peerlane.device.attention.ring import attend_over_ranks

SHAPES = {  # tokens, heads, key heads, causal
    "small": (1024, 8, 4, True),
    "llama2_4k": (4096, 32, 32, True),
    "llama2_16k": (16384, 32, 32, True),
    "llama3_64k": (65536, 8, 8, True),
    "grouped_16k": (16384, 32, 8, True),
    "full_16k": (16384, 8, 8, False),
}
DEPTH, LIMIT, ROWS = 128, 1e-2, 1024
VARIANTS = ((1, 128), (2, 32), (4, 16), (4, 32), (4, 64), (8, 32))


def exact(own: tuple[torch.Tensor, ...], shared: int, causal: bool) -> list[torch.Tensor]:
    """dq of this rank's first head, dk and dv of its first key head, (S, D) in float64."""
    rank, world, length = dist.get_rank(), dist.get_world_size(), own[0].shape[1]
    first = [x[0, :, : 1 if index in (2, 3) else shared].contiguous() for index, x in enumerate(own)]
    dout, q, k, v = (communicator().all_gather(x).flatten(0, 1).double() for x in first)
    k, v, scale = k[:, 0], v[:, 0], DEPTH**-0.5
    dq, dk, dv = torch.zeros_like(q[:, 0]), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(shared):
        for begin in range(0, world * length, ROWS):
            rows = slice(begin, begin + ROWS)
            scores = q[rows, head] @ k.t() * scale
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1 + begin), -torch.inf)
            p = scores.softmax(-1)
            given = dout[rows, head]
            dp = given @ v.t()
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            if head == 0:
                dq[rows] = scale * ds @ k
            dk += scale * ds.t() @ q[rows, head]
            dv += p.t() @ given
    mine = slice(rank * length, (rank + 1) * length)
    return [dq[mine], dk[mine], dv[mine]]


def measure(name: str, rank: int, world: int) -> dict[str, object]:
    tokens, heads, key_heads, causal = SHAPES[name]
    torch.manual_seed(rank)
    shape = HeadShape(1, tokens // world, heads, key_heads, DEPTH, DEPTH, BF16)
    dout, q, k, v = own = tuple(torch.randn(shape.shard(of), device="cuda").to(BF16) for of in ("dout", "q", "k", "v"))
    group = group_of()
    out, logarithms = (x.clone() for x in attend_over_ranks(q, k, v, causal=causal))
    kept: dict[tuple[int, int], HeadExchange] = {}

    def by_heads(pieces: int, blocks: int) -> tuple[torch.Tensor, ...]:
        def find(group: object, shape: HeadShape) -> HeadExchange:
            if (pieces, blocks) not in kept:
                head_exchange.BLOCKS_BESIDE = blocks
                kept[pieces, blocks] = HeadExchange(group_of(), shape)
            return kept[pieces, blocks]

        before = ring_backward.pieces, ring_backward.head_exchange
        ring_backward.pieces, ring_backward.head_exchange = (lambda *_: pieces), find
        try:
            return ring_backward.attend_over_ranks_backward(*own, out, logarithms, causal=causal)
        finally:
            ring_backward.pieces, ring_backward.head_exchange = before

    def gathered() -> tuple[torch.Tensor, ...]:
        known = ring_backward.Known(*own, query_numbers(group, dout, out, logarithms), None, causal)
        return ring_backward._gathered(group, known)

    mine = replace(shape, length=tokens, heads=heads // world, key_heads=key_heads // world)
    alone = [torch.randn(mine.shard(of), device="cuda").to(BF16) for of in ("dout", "q", "k", "v", "dout")]
    sums = torch.full((1, mine.heads, tokens), 10.0, device="cuda")
    variants = [variant for variant in VARIANTS if mine.key_heads % variant[0] == 0]
    calls = {
        "chosen_us": lambda: ring_backward.attend_over_ranks_backward(*own, out, logarithms, causal=causal),
        "gathered_us": gathered,
        "products_us": lambda: attention_backward(*alone, sums, causal=causal, group=group),
        **{f"heads_{n}_{blocks}_us": lambda n=n, blocks=blocks: by_heads(n, blocks) for n, blocks in variants},
    }
    wanted, errors, wrong = exact(own, heads // key_heads, causal), {}, 0
    for kind, call in calls.items():
        if kind != "products_us":
            for _ in range(2):
                found = call()
            pairs = zip(found, wanted, strict=True)
            errors[kind] = max(float((got[0, :, 0].double() - want).norm() / want.norm()) for got, want in pairs)
            wrong += not errors[kind] < LIMIT
    again = [x.clone() for x in calls["chosen_us"]()]
    wrong += sum(not torch.equal(x, y) for x, y in zip(again, calls["chosen_us"](), strict=True))
    counted = torch.tensor(max(errors.values()))
    every = [torch.empty_like(counted) for _ in range(world)]
    dist.all_gather(every, counted)
    times = microseconds(calls, 4)
    pieces = ring_backward.pieces(shape, world, group.sm_count)
    return {
        "bench": "ring_backward", "shape": name, "ranks": world, "wrong": wrong,
        "error": max(float(one) for one in every), "pieces": pieces, **times,
    }  # fmt: skip


def rows_of(shapes: list[str], rank: int, ranks: int) -> Iterator[Row]:
    for name in shapes:
        yield measure(name, rank, ranks)


if __name__ == "__main__":
    parser = script(__doc__, ranks=2)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small", "llama2_4k", "llama2_16k"])
    options = parser.parse_args()
    run_on_shared_gpus(options.ranks, options.out, rows_of, options.shape)
