"""Products of Newton-Schulz iterations on a GPU: right beside float64, then timed beside torch's products in TensorFloat32 and float16.

    PYTHONPATH=src python tests/gpu/bench_newton_schulz.py [--ranks 2] [--out FILE]

Checks the Gram matrix summed over ranks of this process, which may share a GPU, its polynomial, and X in two parts, with ragged sizes too.
Then times the last two at sizes of real models on one GPU, by medians of replayed graphs. TensorFloat32 is switched on for torch's products
alone. Prints a line for each case; ``--out`` gets them as JSON lines. Takes under a minute. Exits with 1 where a result is wrong.
"""

import os
from collections.abc import Iterator

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch
from harness import Call, Row, graph_times, report, script
from local_ranks import LocalRanks

from peerlane.device.host.group import Group
from peerlane.device.products import gemm
from peerlane.device.products import newton_schulz as ns

HALF = torch.float16
SIZES = ((2048, 5632), (4096, 7168), (4096, 5504))
ROUNDED = 2.0**-10
"""Of the largest entry: what rounding a part and a sum to float16 may cost, twice over."""
STRETCH_US = 1e4
A, B, C = 4.0848, -6.8946, 2.9270


def symmetric(m: int, device: torch.device) -> torch.Tensor:
    x = torch.randn(m, 2 * m, device=device)
    return gemm.aligned((x @ x.T / (2 * m)).half())


def in_parts(m: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(m, n, device=device)
    return gemm.aligned(x.half()), gemm.aligned((x - x.half().float()).half())


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def check_gram(ranks: LocalRanks) -> Iterator[Row]:
    """Call after call, with late ranks."""
    world = len(ranks.groups)
    for m, depth in ((136, 72), (1000, 520), (2048, 1024)):
        for call in range(3):
            shards = [gemm.aligned(torch.randn(m, depth, device=group.device).half()) for group in ranks.groups]
            exact = sum(x.double().to(ranks.groups[0].device) @ x.double().to(ranks.groups[0].device).T for x in shards)
            kernels = [ns.gram_all_reduce(group, m, HALF) for group in ranks.each()]
            for gpu in range(ranks.gpus):
                torch.cuda.synchronize(gpu)
            got = []
            for group in ranks.each():
                torch.cuda._sleep(200_000 * ((group.rank + call) % world))  # type: ignore[no-untyped-call, unused-ignore]
                got.append(kernels[group.rank](shards[group.rank]))
            ranks.synchronize()
            same = [g.to(ranks.groups[0].device) for g in got]
            error = max(error_of(g, torch.as_tensor(exact)) for g in same)
            alike = all(torch.equal(g, same[0]) and torch.equal(g, g.T) for g in same)
            yield {"check": "gram", "m": m, "depth": depth, "ranks": world, "error": error, "wrong": int(not (alike and error <= ROUNDED))}


def check_alone(group: Group) -> Iterator[Row]:
    for m, n in ((136, 72), (1000, 520), (2048, 5632)):
        g, (high, low) = symmetric(m, group.device), in_parts(m, n, group.device)
        p = ns.symmetric_product(group, m, HALF)(g, C, B)
        error = error_of(p, C * (g.double() @ g.double()) + B * g.double())
        yield {"check": "polynomial", "m": m, "error": error, "wrong": int(not (torch.equal(p, p.T) and error <= ROUNDED))}
        exact = g.double() @ high.double() + A * (high.double() + low.double())
        parts = ns.parts_product(group, m, n, HALF)(g, (high, low), 1.0, A)
        error = error_of(parts[0].double() + parts[1].double(), exact)
        yield {"check": "parts", "m": m, "n": n, "error": error, "wrong": int(not error <= 2.0**-14)}
        rounded, _ = ns.parts_product(group, m, n, HALF, torch.bfloat16)(g, (high, low), 1.0, A)
        error = error_of(rounded, exact)
        yield {"check": "last", "m": m, "n": n, "error": error, "wrong": int(not error <= 2.0**-8)}


def in_tf32(call: Call) -> Call:
    """Returns the call with torch's products in TensorFloat32."""

    def run() -> None:
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        try:
            call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return run


def times(group: Group) -> Iterator[Row]:
    for m, n in SIZES:
        g, (high, low) = symmetric(m, group.device), in_parts(m, n, group.device)
        wide, x = g.float(), high.float()
        polynomial, parts = ns.symmetric_product(group, m, HALF), ns.parts_product(group, m, n, HALF)
        us, _ = graph_times(
            {
                "polynomial": lambda: polynomial(g, C, B),  # noqa: B023
                "polynomial by torch in float16": lambda: torch.addmm(g, g, g, beta=B, alpha=C),  # noqa: B023
                "polynomial by torch in tf32": in_tf32(lambda: torch.addmm(wide, wide, wide, beta=B, alpha=C)),  # noqa: B023
                "parts": lambda: parts(g, (high, low), 1.0, A),  # noqa: B023
                "X by torch in float16": lambda: torch.addmm(high, g, high, beta=A),  # noqa: B023
                "X by torch in tf32": in_tf32(lambda: torch.addmm(x, wide, x, beta=A)),  # noqa: B023
            },
            STRETCH_US,
        )
        yield {"bench": "products", "m": m, "n": n, "us": us, "tiles": (str(polynomial.tiling), str(parts.tiling))}


def tilings(group: Group) -> Iterator[Row]:
    """Every tiling of the symmetric product, so that a better choice shows."""
    m = 4096
    g = symmetric(m, group.device)
    kernels = {f"{t.rows}x{t.columns}/{t.blocks}": ns.SymmetricProduct(group, m, HALF, t) for t in gemm.TILINGS}
    us, _ = graph_times({name: lambda one=one: one(g, C, B) for name, one in kernels.items()}, STRETCH_US)  # type: ignore[misc]
    yield {"bench": "tilings", "m": m, "us": us}


if __name__ == "__main__":
    options = script(__doc__, ranks=2).parse_args()
    torch.manual_seed(0)
    alone = LocalRanks(1).groups[0]
    report((check_gram(LocalRanks(options.ranks)), check_alone(alone), times(alone), tilings(alone)), options.out)
