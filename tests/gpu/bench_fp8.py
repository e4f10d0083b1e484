"""Products of e4m3 on GPUs: right beside float64, then timed beside torch's scaled products.

    PYTHONPATH=src python tests/gpu/bench_fp8.py [check] [tilings] [product] [grouped] [quantise] [--ranks 2] [--out FILE]

``check``: every kind of scales, alone, grouped and fused over ranks of this process, which may share a GPU. ``product``: beside
torch._scaled_mm with and without its fast accumulation. ``grouped``: beside torch._scaled_grouped_mm. ``quantise``: beside a copy.
``tilings``: every tiling, so that a better choice shows. Without a name, all but ``tilings``. Times are medians of replayed graphs that
take turns, each with several sets of random operands. Prints a line for each case; ``--out`` gets them as JSON lines. Exits with 1 where a
result is wrong.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # queues, so that ranks that share a GPU do not wait for each other

import torch
from bench_grouped import SHAPES
from harness import BF16, Row, graph_times, report, script
from local_ranks import LocalRanks

from peerlane.device.host.group import Group
from peerlane.device.products import fp8, gemm
from peerlane.device.products.gemm_all_reduce import gemm_all_reduce
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.device.products.quantised import E4M3, Quantised, opened, packed, quantise, quantise_rows, quantise_squares
from peerlane.device.products.row_gather_gemm import row_gather_gemm

LIMIT_S = 420.0
KINDS = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "blocks": ("block", "square")}
CASES = [("tensor", False), ("row", False), ("tensor", True), ("row", True), ("blocks", True)]
L2_BYTES = 120 << 20


def drawn(by: str, m: int, n: int, k: int) -> tuple[Quantised, Quantised]:
    left, right = KINDS[by]
    return quantise(torch.randn(m, k, device="cuda"), left), quantise(torch.randn(n, k, device="cuda"), right)  # type: ignore[arg-type]


def torch_product(a: Quantised, b: Quantised, fast: bool) -> Callable[[], torch.Tensor]:
    """Returns torch's product of a (m, k) and b (n, k), with scales laid out as it wants them."""
    left, right = a.scales, b.scales
    if left.numel() == right.numel() == 1:
        left, right = left.reshape(()), right.reshape(())
    elif left.shape[1] == 1:
        left, right = left.contiguous(), right.t().contiguous()
    else:
        left, right = left.t().contiguous().t(), right.contiguous().t()
    values = a.values.contiguous()
    return lambda: torch._scaled_mm(values, b.values.t(), left, right, out_dtype=BF16, use_fast_accum=fast)


# --- checks ---


def error_of(y: torch.Tensor, a: Quantised, b: Quantised) -> float:
    """The largest error beside float64, less what rounding to bfloat16 may cost, in parts of the sum of absolute products."""
    left, right = a.float().double(), b.float().double().t()
    exact, sums = left @ right, left.abs() @ right.abs()
    return float((((y.double() - exact).abs() - 2**-8 * exact.abs()).clamp(min=0) / sums).max())


def limit_of(promoted: bool, k: int) -> float:
    """Of ``error_of``: the matrix units cut a sum off at 2^-13 with each 32 of k, and a random sum is about a root of its terms'
    absolute sum, a few times that at worst; promoted, after four of these."""
    length = min(k, 128) if promoted else k
    return 2**-11 * (1 + length / 32) / max(1.0, (0.4 * length) ** 0.5)


def check_products(ranks: LocalRanks) -> Iterator[Row]:
    group = ranks.groups[0]
    for by, promoted in CASES:
        for m, n, k in ((72, 136, 272), (1, 8, 16), (1024, 1024, 1024), (1000, 520, 2064), (2048, 2304, 8192)):
            a, b = drawn(by, m, n, k)
            error, limit = error_of(fp8.product(group, a, b.t(), promoted=promoted), a, b), limit_of(promoted, k)
            row: Row = {"check": "product", "by": by, "promoted": promoted, "mnk": (m, n, k), "error": error, "limit": limit}
            try:
                row["torch_error"] = error_of(torch_product(a, b, not promoted)(), a, b)
            except Exception as refusal:
                row["torch_error"] = f"{type(refusal).__name__}: {str(refusal).splitlines()[0][:80]}"
            yield row | {"wrong": int(not error <= limit)}


def integers(by: str, rows: int, k: int, seed: int, device: torch.device) -> Quantised:
    """Whose sums are exact in bfloat16, whatever their order."""
    draw = torch.Generator().manual_seed(seed)
    parts = {"tensor": (rows, k), "row": (1, k), "block": (1, 128), "square": (128, 128)}[by]
    values = (torch.rand(rows, k, generator=draw) < 0.1).float() * torch.randint(-1, 2, (rows, k), generator=draw)
    scales = 2.0 ** torch.randint(0, 2, [-(-size // part) for size, part in zip((rows, k), parts, strict=True)], generator=draw)
    return Quantised(values.to(E4M3).to(device), scales.to(device))


def fused_calls(group: Group, a: Quantised, b: Quantised, promoted: bool) -> dict[str, Callable[[], Any]]:
    """Calls that only launch: a kernel that is loaded while another rank's waits on the same GPU would wait for it."""
    left, right, epilogue, terms = fp8.prepared(a, b.t(), {"promoted": promoted})
    (m, k), n, rows = left.shape, right.shape[1], packed(a, epilogue.scaling, BF16)
    scatter, reduce = gemm_reduce_scatter(group, m, n, BF16, epilogue), gemm_all_reduce(group, m, n, BF16, epilogue)
    gather = row_gather_gemm(group, m, k, BF16, epilogue, True)
    gather._bound((n,), "k")
    return {
        "gemm_reduce_scatter": lambda: scatter(left, right, **terms),
        "gemm_all_reduce": lambda: reduce(left, right, **terms),
        "row_gather_gemm": lambda: gather(rows, [right], b_scales=[terms["b_scales"]]),
    }


def check_fused(ranks: LocalRanks) -> Iterator[Row]:
    """Exact answers, call after call, with late ranks."""
    world, device = len(ranks.groups), ranks.groups[0].device
    for (by, promoted), (m, n, k) in itertools.product(CASES, ((40 * world, 72, 272), (1024, 1280, 2048))):
        left, right = KINDS[by]
        wrong = dict.fromkeys(("gemm_reduce_scatter", "gemm_all_reduce", "row_gather_gemm"), 0)
        for call in range(4):
            operands = [
                (integers(left, m, k, 100 * call + rank, group.device), integers(right, n, k, 100 * call + 50 + rank, group.device))
                for rank, group in enumerate(ranks.groups)
            ]
            exact = [(a.float().to(device), b.float().to(device)) for a, b in operands]
            total, whole = torch.stack([a @ b.t() for a, b in exact]).sum(0), torch.cat([a for a, _ in exact])
            wanted = {
                "gemm_reduce_scatter": total.chunk(world),
                "gemm_all_reduce": [total] * world,
                "row_gather_gemm": [whole @ b.t() for _, b in exact],
            }
            ranks.synchronize_gpus()  # operands were made on other streams
            calls = [fused_calls(group, *operands[group.rank], promoted) for group in ranks.each()]
            for name in wrong:
                ranks.synchronize_gpus()
                got: list[Any] = []
                for group in ranks.each():
                    if call % 2:
                        torch.cuda._sleep(200_000 * ((group.rank + call) % world))  # type: ignore[no-untyped-call, unused-ignore]
                    got.append(calls[group.rank][name]())
                ranks.synchronize()
                for out, want in zip(got, wanted[name], strict=True):
                    result = out[0] if name == "row_gather_gemm" else out
                    wrong[name] += int((result.float().to(device) != want.bfloat16().float()).sum())
                    if name == "row_gather_gemm":
                        kept = opened(out[1], "fp8_blocks" if by == "blocks" else "fp8", -(-k // 128) if by == "blocks" else 1)
                        wrong[name] += int((kept.float().to(device) != whole).sum())
        for name, count in wrong.items():
            yield {"check": name, "by": by, "promoted": promoted, "mnk": (m, n, k), "ranks": world, "gpus": ranks.gpus, "wrong": count}


def check_grouped(ranks: LocalRanks) -> Iterator[Row]:
    group, (n, k) = ranks.groups[0], (520, 1040)
    for by, promoted in CASES:
        counts = (67, 0, 9, 300)
        left, right = KINDS[by]
        a = quantise(torch.randn(sum(counts) + 5, k, device="cuda"), left)  # type: ignore[arg-type]
        b = quantise(torch.randn(len(counts), n, k, device="cuda"), right)  # type: ignore[arg-type]
        y = fp8.grouped(group, a, b.t(), torch.tensor(counts).cumsum(0).int().cuda(), promoted=promoted)
        error, first = 0.0, 0
        for g, count in enumerate(counts):
            if count:
                rows = slice(first, first + count)
                of_rows = Quantised(a.values[rows], a.scales[rows] if len(a.scales) > 1 else a.scales)
                error = max(error, error_of(y[rows], of_rows, Quantised(b.values[g], b.scales[g])))
            first += count
        yield {"check": "grouped", "by": by, "promoted": promoted, "error": error, "wrong": int(not error <= limit_of(promoted, k))}


def check_quantised(ranks: LocalRanks) -> Iterator[Row]:
    """The kernels beside torch: the same bits."""
    group = ranks.groups[0]
    for rows, k in ((9, 528), (1, 16), (1000, 7168), (304, 4112)):
        x = torch.randn(rows, k, device="cuda", dtype=BF16)
        for by in ("row", "block"):
            found, wanted = quantise_rows(group, x, by), quantise(x, by)  # type: ignore[arg-type]
            wrong = int((found.values.view(torch.uint8) != wanted.values.view(torch.uint8)).sum() + (found.scales != wanted.scales).sum())
            yield {"check": "quantise", "by": by, "shape": (rows, k), "wrong": wrong}
        (found, turned), wanted = quantise_squares(group, x, transposes=rows % 16 == 0), quantise(x, "square")
        wrong = int((found.values.view(torch.uint8) != wanted.values.view(torch.uint8)).sum() + (found.scales != wanted.scales).sum())
        wrong += 0 if turned is None else int((turned.float() != wanted.float().mT).sum())
        yield {"check": "quantise", "by": "square", "shape": (rows, k), "transposed": turned is not None, "wrong": wrong}


# --- times ---


def microseconds(calls: dict[str, Callable[[int], object]], sets: int, stretch_us: float) -> tuple[dict[str, float], dict[str, str]]:
    """The median time of one call of each kind, and why others cannot be called. Graphs have a call for each set of operands."""
    whole = {name: lambda call=call: [call(i) for i in range(sets)] for name, call in calls.items()}  # type: ignore[misc]
    return graph_times(whole, stretch_us, sets)


def product(ranks: LocalRanks) -> Iterator[Row]:
    """Torch's fast accumulation beside sums in the matrix units; without it, beside promoted ones."""
    group = ranks.groups[0]
    for size, by in itertools.product((2048, 4096, 8192), KINDS):
        sets = max(2, -(-L2_BYTES // (4 * size * size)))
        operands = [drawn(by, size, size, size) for _ in range(sets)]
        calls: dict[str, Callable[[int], object]] = {}
        for promoted in (True,) if by == "blocks" else (False, True):
            theirs = [torch_product(a, b, not promoted) for a, b in operands]
            name = "promoted" if promoted else "fast"
            calls[f"kit {name}"] = lambda i, promoted=promoted: fp8.product(group, operands[i][0], operands[i][1].t(), promoted=promoted)  # type: ignore[misc]  # noqa: B023
            calls[f"torch {name}"] = lambda i, theirs=theirs: theirs[i]()  # type: ignore[misc]
        if by == "blocks":  # torch has a cuBLAS kernel for it from CUDA 12.9 on; rows without fast accumulation are what it has otherwise
            rows = [drawn("row", size, size, size) for _ in range(2)]
            rowwise = [torch_product(a, b, False) for a, b in rows]
            calls["torch rows"] = lambda i: rowwise[i % 2]()  # noqa: B023
        us, refused = microseconds(calls, sets, 2e4)
        row: Row = {"bench": "product", "size": size, "by": by, "us": us, "refused": refused}
        row["tflops"] = {name: round(2 * size**3 / known / 1e6) for name, known in us.items()}
        for name, target in (("fast", 0.85 if size < 4096 else 0.90), ("promoted", 0.85)):
            theirs_us = us.get(f"torch {name}", us.get("torch rows"))
            if f"kit {name}" in us and theirs_us:
                row[f"of_torch_{name}"], row[f"target_{name}"] = round(theirs_us / us[f"kit {name}"], 3), target
        yield row


def quantised(ranks: LocalRanks) -> Iterator[Row]:
    """Bytes read and written in a second, beside a copy of as many bytes."""
    group = ranks.groups[0]
    for rows, k in ((4096, 7168), (16384, 8192)):
        x = [torch.randn(rows, k, device="cuda", dtype=BF16) for _ in range(3)]
        calls: dict[str, Callable[[int], object]] = {
            "rows": lambda i: quantise_rows(group, x[i], "row"),  # noqa: B023
            "blocks": lambda i: quantise_rows(group, x[i], "block"),  # noqa: B023
            "gated blocks": lambda i: quantise_rows(group, x[i], "block", gated=True),  # noqa: B023
            "squares": lambda i: quantise_squares(group, x[i]),  # noqa: B023
            "squares, transposed": lambda i: quantise_squares(group, x[i], transposes=True),  # noqa: B023
            "copy of bf16": lambda i: x[i].clone(),  # noqa: B023
            "torch": lambda i: quantise(x[i], "block"),  # noqa: B023
        }
        us, refused = microseconds(calls, 3, 5e3)
        moved = {"rows": 3, "blocks": 3, "gated blocks": 2.5, "squares": 3, "squares, transposed": 4, "copy of bf16": 4, "torch": 3}
        rate = {name: round(moved[name] * rows * k / known / 1e3) for name, known in us.items()}
        yield {"bench": "quantise", "shape": (rows, k), "us": us, "gb_per_s": rate, "refused": refused}


def tilings(ranks: LocalRanks) -> Iterator[Row]:
    group = ranks.groups[0]
    for size, (by, promoted) in itertools.product((2048, 4096, 8192), (("row", False), ("row", True), ("blocks", True))):
        operands = [drawn(by, size, size, size) for _ in range(3)]
        prepared = [fp8.prepared(a, b.t(), {"promoted": promoted}) for a, b in operands]
        calls: dict[str, Callable[[int], object]] = {}
        for tiling in gemm.TILINGS[:4]:
            one = gemm.Product(group, (size, size, size // 2), BF16, prepared[0][2], tiling)
            calls[f"{tiling.rows}x{tiling.columns}/{tiling.blocks}"] = lambda i, one=one: one(*prepared[i][:2], **prepared[i][3])  # type: ignore[misc]  # noqa: B023
        us, refused = microseconds(calls, 3, 1e4)
        yield {"bench": "tilings", "size": size, "by": by, "promoted": promoted, "us": us, "refused": refused}


def grouped(ranks: LocalRanks) -> Iterator[Row]:
    for shape in SHAPES:
        yield of_groups(ranks.groups[0], *shape)


def of_groups(group: Group, name: str, groups: int, rows: int, n: int, k: int) -> Row:
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups).tolist()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).cuda()
    x, w = torch.randn(rows, k, device="cuda"), torch.randn(groups, n, k, device="cuda", dtype=BF16)
    a, b = quantise(x, "row"), by_matrix(w, "row")
    blocks = quantise(x, "block"), by_matrix(w, "square")
    del x, w
    values, of_rows, of_columns = a.values.contiguous(), a.scales.flatten().contiguous(), b.scales.flatten(1).contiguous()
    columns = [scales.t().contiguous() for scales in b.scales]
    parts = list(zip(values.split(counts), a.scales.contiguous().split(counts), b.values, columns, strict=True))

    def loop(i: int) -> None:
        for part, scales, matrix, of_matrix in parts:
            if len(part):
                torch._scaled_mm(part, matrix.t(), scales, of_matrix, out_dtype=BF16, use_fast_accum=True)

    def theirs(fast: bool) -> Callable[[int], object]:
        return lambda i: torch._scaled_grouped_mm(values, b.values.mT, of_rows, of_columns, offs=ends, out_dtype=BF16, use_fast_accum=fast)

    calls: dict[str, Callable[[int], object]] = {
        "kit fast": lambda i: fp8.grouped(group, a, b.t(), ends),
        "torch fast": theirs(True),
        "torch loop": loop,
        "kit promoted": lambda i: fp8.grouped(group, a, b.t(), ends, promoted=True),
        "torch promoted": theirs(False),
        "kit blocks": lambda i: fp8.grouped(group, blocks[0], blocks[1].t(), ends),
    }
    us, refused = microseconds(calls, 1, 1e4)
    best = [us[who] for who in ("torch fast", "torch loop") if who in us]
    row: Row = {"bench": "grouped", "name": name, "groups": groups, "rows": rows, "n": n, "k": k, "us": us, "refused": refused}
    if best and "kit fast" in us:
        row["of_torch_fast"] = round(min(best) / us["kit fast"], 3)
    if {"torch promoted", "kit promoted"} <= us.keys():
        row["of_torch_promoted"] = round(us["torch promoted"] / us["kit promoted"], 3)
    return row


def by_matrix(w: torch.Tensor, by: str) -> Quantised:
    """As ``quantise``, one matrix at a time, for it works in float32."""
    made = [quantise(matrix, by) for matrix in w]  # type: ignore[arg-type]
    return Quantised(torch.stack([one.values for one in made]), torch.stack([one.scales for one in made]))


STEPS = {
    "check": (check_products, check_grouped, check_quantised, check_fused), "quantise": (quantised,), "product": (product,),
    "tilings": (tilings,), "grouped": (grouped,),
}  # fmt: skip

if __name__ == "__main__":
    parser = script(__doc__, ranks=2)
    parser.add_argument("what", nargs="*", choices=[*STEPS, []], help="all but tilings by default")
    options = parser.parse_args()
    torch.manual_seed(0)
    alone, several = LocalRanks(1), LocalRanks(options.ranks)
    chosen = options.what or [name for name in STEPS if name != "tilings"]
    steps = [step(several if step is check_fused else alone) for name in STEPS if name in chosen for step in STEPS[name]]
    report(steps, options.out, LIMIT_S)
