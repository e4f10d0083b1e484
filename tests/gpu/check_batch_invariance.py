"""A row's bits beside every number of other rows, with the batch-invariant mode on and off, and what the mode costs.

    PYTHONPATH=src python tests/gpu/check_batch_invariance.py [--ranks 2] [--seconds 130] [--out FILE] [OPERATOR ...]

Each operator runs with all 4,096 rows of a pool, then with 1, 2, ... 4,096 of them, from another first row each time; every row's bits are
compared with those of the first run. Where the seconds do not last, numbers of rows are left out evenly. Without the mode 64 numbers are
looked at. Then both modes are timed: the slowest rank's median of replayed graphs that take turns, with the kernel that selects the rows.
``tiles``: whether the shape of tiles changes the bits of a product of one rank. Prints lines of JSON; exits with 1 where bits differ in
the mode."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch
import torch.distributed as dist
from harness import BF16, Call, Row, meet, replay, run_on_shared_gpus, script, slowest_in_turn

from peerlane import ops
from peerlane.device import group_of
from peerlane.device.attention.forward import attention
from peerlane.device.products import gemm
from peerlane.settings import batch_invariant

POOL, TIMED, WITHOUT = 4096, (8, 512, 4096), 64
N, K, WIDE = 1024, 512, 4096
GROUPS = 8
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """``call`` gives its results for some rows of the pool, of all of them on every rank, or with ``parts`` of a rank's equal part."""

    call: Callable[[torch.Tensor], Results]
    parts: bool = False


def drawn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Draws the same numbers on every rank for one seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def operators(rank: int, world: int) -> Mapping[str, Operator]:
    """Returns the operators by name. Left operands, and right ones, differ from rank to rank where operators let them."""
    own = 1000 * (rank + 1)
    x, b, shared = drawn(POOL, K, seed=own), drawn(K, N, seed=own + 1) / K**0.5, drawn(POOL, K, seed=2)
    tall, bias, residual = drawn(K * world, N, seed=own + 3) / K**0.5, drawn(N, seed=4), drawn(POOL, N, seed=5)
    wide, added, weight = drawn(POOL, WIDE, seed=own + 6), drawn(POOL, WIDE, seed=7), drawn(WIDE, seed=8)
    right, scales = ops.quantize_fp8(b.t().contiguous(), "row")
    experts = torch.stack([torch.randperm(GROUPS, generator=torch.Generator().manual_seed(i))[:2] for i in range(POOL)]).cuda()
    factors = drawn(POOL, 2, seed=9, dtype=torch.float32).abs()
    layers = [drawn(GROUPS // world, *size, seed=own + 10) / K**0.5 for size in ((N, K), (N, K), (K, N))]
    config = ops.DispatchConfig(GROUPS, POOL // world)
    groups, group_scales = ops.quantize_fp8(drawn(GROUPS, N, K, seed=own + 11) / K**0.5, "row")
    group_of_row = torch.arange(POOL, device="cuda") * 7919 % GROUPS
    q, k, v = drawn(1, POOL, 4, 128, seed=12), drawn(1, 2048, 4, 128, seed=13), drawn(1, 2048, 4, 128, seed=14)

    def part(rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(world)[rank]

    def codes(a: torch.Tensor) -> Results:
        return ops.quantize_fp8(a, "row")

    def routed(rows: torch.Tensor) -> Results:
        mine = part(rows)
        received, of_rows, handle = ops.dispatch(shared[mine], experts[mine], factors[mine], config)
        return (ops.combine(received, handle, of_rows),)

    def grouped(rows: torch.Tensor) -> Results:
        """Each row to its group; results in the order of ``rows``."""
        order = group_of_row[rows].argsort(stable=True)
        counted = (group_of_row[rows].unsqueeze(0) == torch.arange(GROUPS, device="cuda").unsqueeze(1)).sum(1)
        y = ops.grouped_gemm_fp8(*codes(shared[rows[order]]), groups.mT, group_scales.mT, counted.cumsum(0).int())
        return (torch.empty_like(y).index_copy_(0, order, y),)

    def attend(rows: torch.Tensor) -> Results:
        return (attention(q[:, rows], k, v, batch_invariant=batch_invariant())[0][0],)

    finish: dict[str, Any] = {"bias": bias, "activation": "silu"}
    found = {
        "all_reduce": Operator(lambda rows: (ops.all_reduce(wide[rows]),)),
        "reduce_scatter": Operator(lambda rows: (ops.reduce_scatter(wide[rows]),), parts=True),
        "gemm_all_reduce": Operator(lambda rows: (ops.gemm_all_reduce(x[rows], b, residual=residual[rows], **finish),)),
        "gemm_reduce_scatter": Operator(
            lambda rows: (ops.gemm_reduce_scatter(x[rows], b, residual=residual[part(rows)], **finish),), parts=True
        ),
        "all_gather_gemm": Operator(lambda rows: (ops.all_gather_gemm(x[rows], tall),)),
        "gemm_all_gather": Operator(lambda rows: (ops.gemm_all_gather(x[rows], b),)),
        "row_gather_gemm": Operator(lambda rows: tuple(ops.row_gather_gemm(shared[part(rows)], [b]))),
        "gemm_all_reduce_fp8": Operator(lambda rows: (ops.gemm_all_reduce_fp8(*codes(x[rows]), right.t(), scales.t()),)),
        "gemm_reduce_scatter_fp8": Operator(
            lambda rows: (ops.gemm_reduce_scatter_fp8(*codes(x[rows]), right.t(), scales.t()),), parts=True
        ),
        "row_gather_gemm_fp8": Operator(lambda rows: tuple(ops.row_gather_gemm_fp8(*codes(shared[part(rows)]), [right.t()], [scales.t()]))),
        "grouped_gemm_fp8": Operator(grouped),
        "all_reduce_rms_norm": Operator(lambda rows: ops.all_reduce_rms_norm(wide[rows], weight, added[rows])),
        "all_reduce_rms_norm_fp8": Operator(lambda rows: ops.all_reduce_rms_norm_fp8(wide[rows], weight, added[rows])),
        "reduce_scatter_rms_norm_fp8": Operator(
            lambda rows: ops.reduce_scatter_rms_norm_fp8(wide[rows], weight, added[part(rows)]), parts=True
        ),
        "dispatch, combine": Operator(routed, parts=True),
        "gated_experts": Operator(
            lambda rows: (ops.gated_experts(shared[part(rows)], experts[part(rows)], factors[part(rows)].to(BF16), *layers),), parts=True
        ),
        "attention": Operator(attend),
    }
    return found


# --- bits ---


def words(results: Results) -> list[torch.Tensor]:
    """Returns each result's rows as bytes."""
    return [value.contiguous().view(torch.uint8).view(value.shape[0], -1) for value in (one.unsqueeze(-1) for one in results)]


def reference(operator: Operator, world: int) -> list[torch.Tensor]:
    """Returns the bytes of every row of the pool, from one call with all of them in order."""
    own = words(operator.call(torch.arange(POOL, device="cuda")))
    if not operator.parts:
        return own
    whole = []
    for value in own:
        parts = [torch.empty_like(value, device="cpu") for _ in range(world)]
        dist.all_gather(parts, value.cpu())
        whole.append(torch.cat(parts).cuda())
    return whole


def differing(operator: Operator, wanted: list[torch.Tensor], m: int, rank: int, world: int) -> torch.Tensor:
    """Counts this rank's rows, of m from some row of the pool on, whose bits are not those of the reference."""
    rows = (torch.arange(m, device="cuda") + m * 997) % POOL
    got = words(operator.call(rows))
    mine = rows.chunk(world)[rank] if operator.parts else rows
    return torch.stack([(value != known[mine]).any(1) for value, known in zip(got, wanted, strict=True)]).any(0).sum()


def sweep(name: str, operator: Operator, rank: int, world: int, enabled: bool, until: float) -> Row:
    """Looks at every number of rows that ranks can share, or at as many as the seconds last for, spread evenly."""
    ops.set_batch_invariant(enabled)
    wanted = reference(operator, world)
    step = world if operator.parts or name.startswith("row_gather") else 1
    every = list(range(step, POOL + 1, step))
    tried = [every[i * len(every) // 24] for i in range(24)]
    for m in tried[::3]:  # compiles
        differing(operator, wanted, m, rank, world)
    meet()
    begin = time.monotonic()
    for m in tried:
        differing(operator, wanted, m, rank, world)
    torch.cuda.synchronize()
    each = (time.monotonic() - begin) / len(tried)
    count = torch.tensor(
        [min(len(every), WITHOUT) if not enabled else max(WITHOUT, min(len(every), int((until - time.monotonic()) / each)))]
    )
    dist.broadcast(count, 0)
    chosen = sorted({every[-1 - i * len(every) // int(count)] for i in range(int(count))})
    counted = [differing(operator, wanted, m, rank, world) for m in chosen]
    rows = torch.stack(counted).cpu()
    dist.all_reduce(rows)
    return {
        "operator": name, "batch_invariant": enabled, "numbers_of_rows": len(chosen), "of": len(every),
        "numbers_that_differ": int((rows > 0).sum()), "rows_that_differ": int(rows.sum()), "ranks": world,
    }  # fmt: skip


def tiles(rank: int, world: int) -> Iterator[Row]:
    """Bits of a product of one rank by every tiling."""
    group, a, b = group_of(), drawn(512, 4096, seed=1), drawn(4096, 512, seed=2) / 64
    results = {}
    for tiling in gemm.TILINGS:
        if tiling in gemm.tilings_for(group) or world == torch.cuda.device_count():
            results[str(tiling)] = gemm.Product(group, (512, 512, 4096), BF16, tiling=tiling)(a, b).clone()
    wanted = results[str(gemm.BATCH_INVARIANT)]
    for name, got in results.items():
        yield {"check": "tiles", "tiling": name, "words_that_differ": int((got != wanted).sum())}


# --- price ---


def price(name: str, operator: Operator) -> Iterator[Row]:
    """The time of a call with the rows' selection, off and on."""
    for m in TIMED:
        rows = torch.arange(m, device="cuda")

        def in_mode(enabled: bool) -> Call:
            def run() -> Results:
                ops.set_batch_invariant(enabled)
                return operator.call(rows)  # noqa: B023

            return run

        row: Row = {"operator": name, "m": m}
        try:
            row |= slowest_in_turn({"off_us": replay(in_mode(False)), "on_us": replay(in_mode(True))}, 20, warm_up=5)
        except Exception as error:
            row |= {"failed": f"{type(error).__name__}: {error}"}
        yield row


# --- the run ---


def rows_of(seconds: float, chosen: list[str], rank: int, world: int) -> Iterator[Row]:
    begin, every = time.monotonic(), operators(rank, world)
    names = [name for name in every if not chosen or name in chosen]
    for number, name in enumerate(names):
        now = time.monotonic()
        share = (begin + seconds - now) / (len(names) - number)
        for enabled in (False, True):
            found = sweep(name, every[name], rank, world, enabled, now + 0.7 * share)
            if enabled:
                found["wrong"] = found["rows_that_differ"] if rank == 0 else 0
            yield found
        yield from price(name, every[name])
    if not chosen or "tiles" in chosen:
        yield from tiles(rank, world)


if __name__ == "__main__":
    parser = script(__doc__, ranks=2)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--seconds", type=float, default=130)
    options = parser.parse_args()
    run_on_shared_gpus(options.ranks, options.out, rows_of, options.seconds, options.operators)
