"""Layers of sharded models on GPUs: right against exact answers, and how fast beside torch's fused operators and unfused kernels.

    PYTHONPATH=src python tests/gpu/bench_layers.py check [--ranks 4]        exits with 1 where a result is wrong
    PYTHONPATH=src python tests/gpu/bench_layers.py product                  one rank: weights as nn.Linear keeps them, beside cuBLAS
    PYTHONPATH=src python tests/gpu/bench_layers.py mlp|norm_prefill|fp8|dispatch|gather [--ranks 4]

With PEERLANE_BENCH=quick two cases of each. Times are of replayed graphs: the slowest rank's median of five stretches. Ranks share GPUs
where there are fewer GPUs than ranks: then times are a virtual node's, whose links are its memory. Every line of output is a JSON object;
``--out FILE`` appends them to a file."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import BF16, Call, Row, meet, microseconds, note_failure, run_on_shared_gpus, script, small

from peerlane import ops
from peerlane.device import communicator, group_of
from peerlane.device.collectives.rms_norm import all_reduce_rms_norm
from peerlane.device.collectives.sharded_rms_norm import sharded_rms_norm
from peerlane.device.products import fp8, gemm
from peerlane.device.products.gemm_reduce_scatter import gemm_reduce_scatter
from peerlane.device.products.quantised import quantise_rows, quantise_squares
from peerlane.device.products.row_gather_gemm import row_gather_gemm


def quick() -> bool:
    return os.environ.get("PEERLANE_BENCH") == "quick"


def few(*cases: Any) -> tuple[Any, ...]:
    """Returns the cases, or the first two of a quick look."""
    return cases[:2] if quick() else cases


# --- checks ---


def check_products(rank: int, world: int) -> Iterator[Row]:
    group = group_of()
    for m, k, widths in few(
        (72, 136, [72, 8, 130]), (1024, 2048, [4096]), (8, 64, [64]), (256, 1024, [512, 256, 256]), (33, 4096, [1000, 24])
    ):
        for major in ("k", "mn"):
            wrong = 0
            kernel = row_gather_gemm(group, m, k, BF16, keeps=True)
            for call in range(4):
                seed = 1000 * call + m
                whole = small(world * m, k, seed=seed)
                bs = [small(k, n, seed=seed + 10 * rank + i + 1) for i, n in enumerate(widths)]
                given = [gemm.aligned(b.t().contiguous()).t() if major == "k" else gemm.aligned(b) for b in bs]
                if call % 2:
                    torch.cuda._sleep(200_000 * ((rank + call) % world))
                *outs, kept = kernel(gemm.aligned(whole[rank * m : (rank + 1) * m].contiguous()), given)
                wrong += sum(
                    int((out.float() != (whole.float() @ b.float()).bfloat16().float()).sum()) for out, b in zip(outs, bs, strict=True)
                )
                wrong += int((kept != whole).sum())
            yield {"check": "row_gather_gemm", "m": m, "k": k, "widths": widths, "major": major, "wrong": wrong}
            n, wrong = sum(widths), 0
            for call in range(4):
                seed = 1000 * call + m
                a, b = small(world * m, k, seed=seed + rank), small(k, n, seed=seed + 50 + rank)
                right = gemm.aligned(b.t().contiguous()).t() if major == "k" else gemm.aligned(b)
                out = gemm_reduce_scatter(group, world * m, n, BF16)(gemm.aligned(a), right)
                total = sum(
                    small(world * m, k, seed=seed + q)[rank * m : (rank + 1) * m].float() @ small(k, n, seed=seed + 50 + q).float()
                    for q in range(world)
                )
                bound = total.abs() * 2**-8 + world * 2**-8 * total.abs().max()  # partial sums travel in bfloat16
                wrong += int(((out.float() - total).abs() > bound).sum())
            yield {"check": "gemm_reduce_scatter", "m": world * m, "k": k, "n": n, "major": major, "wrong": wrong}


def check_norm(rank: int, world: int) -> Iterator[Row]:
    for columns in few(8192, 4096, 64)[: 1 if quick() else 3]:
        norm = all_reduce_rms_norm(group_of(), columns, BF16)
        for tokens in few(1, 512, 2, 8, 31, 32, 64, 200):
            for quantisation in ("none", "token", "tensor"):
                wrong = 0
                for call in range(4):
                    seed = 100 * call + tokens
                    xs = [small(tokens, columns, seed=seed + q, largest=3) for q in range(world)]
                    residual, weight = small(tokens, columns, seed=seed + 50), small(columns, seed=seed + 51, largest=2)
                    if call % 2:
                        torch.cuda._sleep(100_000 * ((rank + call) % world))
                    scale = torch.full((1,), 2**-6, device="cuda") if quantisation == "tensor" else None
                    y, total, scales = norm(xs[rank], weight, residual, epsilon=1e-5, quantisation=quantisation, scale=scale)
                    want = torch.stack(xs).double().sum(0) + residual.double()
                    wrong += int((total.double() != want).sum())
                    want = want * (want.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
                    by = 1.0 if quantisation == "none" else scale.double() if scale is not None else scales.double().unsqueeze(1)
                    if quantisation == "tensor":
                        want = want.clamp(-448 * float(by), 448 * float(by))
                    near = 2**-8 if quantisation == "none" else 2**-4
                    wrong += int(((y.double() * by - want).abs() > near * want.abs() * 1.001 + 2**-9 * by * (quantisation != "none")).sum())
                yield {"check": "all_reduce_rms_norm", "columns": columns, "tokens": tokens, "quantisation": quantisation, "wrong": wrong}


def check_sharded_norm(rank: int, world: int) -> Iterator[Row]:
    """Reduce-scatter, norm and all-gather of rows of every kind of tile, in turn, so that launches of all kinds share the rings."""
    norm = sharded_rms_norm(group_of())
    kinds = (True, True, "none"), (True, True, "row"), (True, False, "row"), (False, True, "none"), (True, True, "block")
    for columns, own in few((8192, 512), (136, 3), (7168, 129), (1024, 2048)):
        for reduces, gathers, quantisation in kinds:
            if columns % 128 == 0 or quantisation != "block":
                wrong = 0
                for call in range(3):
                    seed = 100 * call + columns + own
                    shape = (own * world if reduces else own, columns)
                    xs = [small(*shape, seed=seed + q, largest=3) for q in range(world)]
                    residuals = [small(own, columns, seed=seed + 50 + q) for q in range(world)]
                    weight = small(columns, seed=seed + 99, largest=2)
                    if call % 2:
                        torch.cuda._sleep(200_000 * ((rank + call) % world))
                    given = {"reduces": reduces, "gathers": gathers, "epsilon": 1e-5, "quantisation": quantisation}
                    y, total, scales = norm(xs[rank], weight, residuals[rank], **given)
                    whole = torch.stack(xs).double().sum(0) if reduces else torch.cat(xs).double()
                    whole += torch.cat(residuals).double()
                    mine = slice(rank * own, (rank + 1) * own)
                    wrong += int((total.double() != whole[mine]).sum())
                    want = whole if gathers else whole[mine]
                    want = want * (want.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
                    if scales is None:
                        wrong += int(((y.double() - want).abs() > 2**-8 * 1.001 * want.abs()).sum())
                        continue
                    blocks = want.unflatten(1, (-1, 128 if quantisation == "block" else columns))
                    by = (blocks.abs().amax(2, keepdim=True) / 448).clamp(min=1e-12)
                    wrong += int(((scales.double().view(by.shape) - by).abs() > 1e-5 * by).sum())
                    off = (y.double().view(blocks.shape) * by - blocks).abs()
                    wrong += int((off > 2**-4 * 1.001 * blocks.abs() + 2**-9 * by).sum())
                kind = {"columns": columns, "rows": own, "reduces": reduces, "gathers": gathers, "quantisation": quantisation}
                yield {"check": "sharded_rms_norm", **kind, "wrong": wrong}


def routes(tokens: int, experts: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(k).indices.cuda()


def check_dispatch(rank: int, world: int) -> Iterator[Row]:
    """Rows that take their experts' numbers for factors and come home, beside the same sums in one place."""
    own, k, hidden = 8, 4, 1024
    for most, alignment, sms in few((128, 1, None), (1000, 16, 8), (4096, 1, None)):
        config = ops.DispatchConfig(own * world, most, expert_alignment=alignment, num_sms=sms)
        wrong = 0
        for call in range(4):
            seed = 100 * call + rank
            tokens = most - 17 * ((rank + call) % world)
            x, topk_idx, weights = (
                small(tokens, hidden, seed=seed),
                routes(tokens, own * world, k, seed),
                small(tokens, k, seed=seed).float(),
            )
            topk_idx[::7, 0] = -1
            if call % 2:
                torch.cuda._sleep(200_000 * ((rank + call) % world))
            rows, of_rows, handle = ops.dispatch(x, topk_idx, weights, config)
            expert = (torch.arange(len(rows), device="cuda").unsqueeze(1) >= handle.ends).sum(1)
            y = ops.combine(rows, handle, of_rows * (rank * own + expert % own))
            want = x.double() * (weights.double() * topk_idx.clamp(min=0)).sum(1, keepdim=True)
            wrong += int((y.double() - want).abs().gt(2**-7 * world * own * k).sum())
            wrong += int((ops.dispatch(x, handle=handle)[0] != rows)[: handle.ends[-1]][of_rows[: handle.ends[-1]] != 0].sum())
        held = [value.clone() for value in (x, topk_idx, weights)]

        def there_and_back() -> torch.Tensor:
            rows, of_rows, handle = ops.dispatch(*held, config)  # noqa: B023
            return ops.combine(rows, handle, of_rows)

        there_and_back(), meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = there_and_back()
        for call in range(3):  # other routes, other counts
            held[1].copy_(routes(tokens, own * world if call else own, k, 1000 + call + rank))
            graph.replay()
            wrong += int((y.double() - x.double() * weights.double().sum(1, keepdim=True)).abs().gt(2**-7 * k).sum())
        yield {"check": "dispatch", "tokens": most, "alignment": alignment, "sms": sms, "wrong": wrong}


def check_all_reduce(rank: int, world: int) -> Iterator[Row]:
    kit = communicator()
    for nbytes in few((4 << 20) + 6, 16 << 20, 5_000_002, 64 << 20):
        wrong = 0
        for call in range(4):
            terms = [small(nbytes // 2, seed=100 * call + q, largest=3) for q in range(world)]
            out = terms[rank].clone()
            if call % 2:
                torch.cuda._sleep(200_000 * ((rank + call) % world))
            kit.all_reduce(out)
            wrong += int((out.float() != sum(term.float() for term in terms)).sum())
        yield {"check": "all_reduce", "bytes": nbytes, "wrong": wrong}


def check(rank: int, world: int) -> Iterator[Row]:
    yield from check_all_reduce(rank, world)
    yield from check_products(rank, world)
    yield from check_norm(rank, world)
    yield from check_sharded_norm(rank, world)
    yield from check_dispatch(rank, world)


# --- times of products ---


def product(rank: int, world: int) -> Iterator[Row]:
    """``x @ weight.T`` on one rank, beside cuBLAS; every tiling, so that a better choice shows."""
    group = group_of()
    for size in (1024, 2048, 4096, 8192):
        a, weight = (torch.randn(size, size, device="cuda", dtype=BF16) for _ in range(2))
        kernel = gemm.product(group, size, size, size, BF16)
        calls: dict[str, Call] = {
            "cublas_us": lambda: torch.mm(a, weight.t()),  # noqa: B023
            "k_major_us": lambda: kernel(a, weight.t()),  # noqa: B023
            "mn_major_us": lambda: kernel(a, weight),  # noqa: B023
        }
        for tiling in gemm.TILINGS[:4]:
            one = gemm.Product(group, (size, size, size), BF16, tiling=tiling)
            calls[f"{tiling.rows}x{tiling.columns}/{tiling.blocks}"] = lambda one=one: one(a, weight.t())  # noqa: B023
        times = microseconds(calls, max(8, int(2e13 / size**3)))
        yield {"bench": "product", "size": size, **times, "of_cublas": round(times["cublas_us"] / times["k_major_us"], 3)}


def mlp(rank: int, world: int) -> Iterator[Row]:
    """Megatron's perceptron with sequence parallelism, forward and backward; all keep what the gradients of weights need."""
    hidden = 8192
    for tokens, inner in ((4096, 4 * hidden), (1024, 4 * hidden)):
        group, kit, name = group_of(), communicator(), dist.group.WORLD.group_name
        m, own = tokens // world, inner // world
        draw = torch.Generator(device="cuda").manual_seed(rank)
        x, dy = (torch.randn(m, hidden, device="cuda", generator=draw).to(BF16) for _ in range(2))
        w1, w2 = (
            (torch.randn(shape, device="cuda", generator=draw) / shape[1] ** 0.5).to(BF16) for shape in ((own, hidden), (hidden, own))
        )
        keeping, plain = (row_gather_gemm(group, m, hidden, BF16, keeps=keeps) for keeps in (True, False))
        summing = gemm_reduce_scatter(group, tokens, hidden, BF16)
        state: dict[str, tuple[torch.Tensor, ...]] = {}

        def ours_gather(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
            return keeping(a, [b])  # noqa: B023

        def torch_gather(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
            whole, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)  # noqa: B023
            return [out, whole]

        def unfused_gather(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
            whole = a.new_empty(world * a.shape[0], a.shape[1])
            kit.all_gather_into_tensor(whole, a)  # noqa: B023
            return [whole @ b, whole]

        def torch_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name)  # noqa: B023

        def unfused_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            whole = a @ b
            part = whole.new_empty(whole.shape[0] // world, whole.shape[1])
            kit.reduce_scatter_tensor(part, whole)  # noqa: B023
            return part

        kinds: dict[str, tuple[Callable[..., list[torch.Tensor]], Callable[..., torch.Tensor]]] = {
            "ours": (ours_gather, summing),
            "torch": (torch_gather, torch_sum),
            "unfused": (unfused_gather, unfused_sum),
        }

        def forward(kind: str) -> torch.Tensor:
            gather, add = kinds[kind]  # noqa: B023
            z, whole = gather(x, w1.t())  # noqa: B023
            h = F.silu(z)
            state[kind] = z, h, whole  # noqa: B023
            return add(h, w2.t())  # noqa: B023

        def backward(kind: str) -> tuple[torch.Tensor, ...]:
            gather, add = kinds[kind]  # noqa: B023
            z, h, whole = state[kind]  # noqa: B023
            dh, dys = gather(dy, w2)  # noqa: B023
            dw2 = dys.t() @ h
            dz = torch.ops.aten.silu_backward(dh, z)
            return add(dz, w1), dz.t() @ whole, dw2  # noqa: B023

        found: dict[str, tuple[torch.Tensor, ...]] = {}
        for kind in list(kinds):
            try:
                found[kind] = (forward(kind).clone(), *(value.clone() for value in backward(kind)))
            except Exception as error:
                del kinds[kind]
                note_failure(kind, error)
        errors = [
            round(float((a.float() - b.float()).norm() / b.float().norm()), 5) for a, b in zip(found["ours"], found["unfused"], strict=True)
        ]
        row: Row = {"bench": "mlp", "tokens": tokens, "hidden": hidden, "inner": inner, "ranks": world, "errors": errors}
        steps: dict[str, Call] = {}
        for kind in kinds:
            steps[f"forward_{kind}_us"] = lambda kind=kind: forward(kind)
            steps[f"backward_{kind}_us"] = lambda kind=kind: backward(kind)
            gather, add = kinds[kind]
            h = state[kind][1]
            steps[f"gather_{kind}_us"] = lambda gather=gather: gather(x, w1.t())  # noqa: B023
            steps[f"scatter_{kind}_us"] = lambda add=add, h=h: add(h, w2.t())  # noqa: B023
        steps["gather_without_rows_ours_us"] = lambda: plain(x, [w1.t()])  # noqa: B023
        whole = state["unfused"][2]
        steps["product_us"] = lambda: whole @ w1.t()  # noqa: B023
        yield row | microseconds(steps, 4)
        state.clear(), found.clear(), steps.clear()
        torch.cuda.empty_cache()


def gather(rank: int, world: int) -> Iterator[Row]:
    """Row all-gather and product of some sizes."""
    group, kit, name = group_of(), communicator(), dist.group.WORLD.group_name
    for m, k, n in few((1024, 8192, 8192), (256, 8192, 8192), (1024, 8192, 2048), (1024, 2048, 8192), (64, 4096, 4096)):
        draw = torch.Generator(device="cuda").manual_seed(rank)
        a, weight = (torch.randn(shape, device="cuda", generator=draw).to(BF16) for shape in ((m, k), (n, k)))
        whole = a.new_empty(world * m, k)
        plain, keeping = (row_gather_gemm(group, m, k, BF16, keeps=keeps) for keeps in (False, True))

        def unfused() -> torch.Tensor:
            kit.all_gather_into_tensor(whole, a)  # noqa: B023
            return whole @ weight.t()  # noqa: B023

        calls: dict[str, Call] = {
            "ours_us": lambda: plain(a, [weight.t()]),  # noqa: B023
            "keeping_us": lambda: keeping(a, [weight.t()]),  # noqa: B023
            "unfused_us": unfused,
            "product_us": lambda: whole @ weight.t(),  # noqa: B023
            "torch_us": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [weight.t()], 0, name, return_A=False),  # noqa: B023
        }
        yield {"bench": "gather", "m": m, "k": k, "n": n, "ranks": world} | microseconds(calls, 8)


def in_fp8(rank: int, world: int) -> Iterator[Row]:
    """Megatron's two products in e4m3, scaled by rows, beside those in bfloat16, torch's fused scaled products and unfused ones.
    Quantising rows is timed alone."""
    group, kit, name, hidden = group_of(), communicator(), dist.group.WORLD.group_name, 8192
    for tokens, inner in few((4096, 4 * hidden), (1024, 4 * hidden), (8192, 8192)):
        m, own, draw = tokens // world, inner // world, torch.Generator(device="cuda").manual_seed(rank)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=draw).to(BF16)  # noqa: B023

        (x, w1), (z, w2) = (drawn(m, hidden), drawn(own, hidden)), (drawn(tokens, own), drawn(hidden, own))
        x8, z8 = (quantise_rows(group, value, "row") for value in (x, z))
        w1_8, w2_8 = (quantise_rows(group, value, "row").t() for value in (w1, w2))
        blocks = quantise_rows(group, x, "block"), quantise_squares(group, w1)[0].t()
        codes, of_rows, left, of_left = (value.contiguous() for value in (x8.values, x8.scales, z8.values, z8.scales))
        right_1, right_2 = w1_8.values.t().contiguous().t(), w2_8.values.t().contiguous().t()
        of_right_1, of_right_2 = w1_8.scales.contiguous(), w2_8.scales.contiguous()
        gather, scatter = row_gather_gemm(group, m, hidden, BF16), gemm_reduce_scatter(group, tokens, hidden, BF16)
        whole, scales = codes.new_empty(tokens, hidden), of_rows.new_empty(tokens, 1)

        def unfused_gather() -> torch.Tensor:
            kit.all_gather_into_tensor(whole.view(torch.uint8), codes.view(torch.uint8))  # noqa: B023
            kit.all_gather_into_tensor(scales, of_rows)  # noqa: B023
            return torch._scaled_mm(whole, right_1, scales, of_right_1, out_dtype=BF16, use_fast_accum=True)  # noqa: B023

        def unfused_scatter() -> torch.Tensor:
            product = torch._scaled_mm(left, right_2, of_left, of_right_2, out_dtype=BF16, use_fast_accum=True)  # noqa: B023
            part = product.new_empty(m, hidden)  # noqa: B023
            kit.reduce_scatter_tensor(part, product)
            return part

        def torch_gather() -> object:
            fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
            return fused(codes, [right_1], of_rows, [of_right_1], 0, name, [None], [None], [BF16], [True])  # noqa: B023

        def torch_scatter() -> object:
            fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
            shape = [tokens, hidden]  # noqa: B023
            return fused(left, right_2, of_left, of_right_2, "sum", 0, 0, name, shape, None, None, BF16, True)  # noqa: B023

        row: Row = {"bench": "fp8", "tokens": tokens, "hidden": hidden, "inner": inner, "ranks": world}
        found = fp8.row_gather_products(group, x8, [w1_8])[0][0], fp8.product_reduce_scatter(group, z8, w2_8)
        for step, got, wanted in zip(("gather", "scatter"), found, (unfused_gather(), unfused_scatter()), strict=True):
            error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            yield {"check": f"fp8 {step}", "tokens": tokens, "error": error, "wrong": int(not error < 0.01)}
        calls: dict[str, Call] = {
            "gather_us": lambda: fp8.row_gather_products(group, x8, [w1_8]),  # noqa: B023
            "gather_blocks_us": lambda: fp8.row_gather_products(group, blocks[0], [blocks[1]]),  # noqa: B023
            "gather_bf16_us": lambda: gather(x, [w1.t()]),  # noqa: B023
            "gather_unfused_us": unfused_gather,
            "gather_torch_us": torch_gather,
            "scatter_us": lambda: fp8.product_reduce_scatter(group, z8, w2_8),  # noqa: B023
            "scatter_promoted_us": lambda: fp8.product_reduce_scatter(group, z8, w2_8, promoted=True),  # noqa: B023
            "scatter_bf16_us": lambda: scatter(z, w2.t()),  # noqa: B023
            "scatter_unfused_us": unfused_scatter,
            "scatter_torch_us": torch_scatter,
            "quantise_x_us": lambda: quantise_rows(group, x, "row"),  # noqa: B023
        }
        yield row | microseconds(calls, 8)
        torch.cuda.empty_cache()


def norm_prefill(rank: int, world: int) -> Iterator[Row]:
    """Reduce-scatter, residual, RMSNorm and all-gather, beside the kit's collectives and torch's norm; checked first."""
    wrong = 0
    for row in check_sharded_norm(rank, world):
        wrong += row["wrong"]
        yield row
    hidden, kit, sharded = 8192, communicator(), sharded_rms_norm(group_of())
    for tokens in few(8192, 512, 1024, 2048, 4096):
        own = tokens // world
        sets = max(2, min(8, (400 << 20) // (2 * tokens * hidden)))  # more than L2 holds
        xs = [torch.randn(tokens, hidden, device="cuda").to(BF16) for _ in range(sets)]
        residuals = [torch.randn(own, hidden, device="cuda").to(BF16) for _ in range(sets)]
        weight = torch.ones(hidden, device="cuda", dtype=BF16)
        whole, part = torch.empty_like(xs[0]), torch.empty_like(residuals[0])

        def each(call: Callable[..., Any]) -> Call:
            return lambda: [call(x, residual) for x, residual in zip(xs, residuals, strict=True)]  # noqa: B023

        def ours(gathers: bool, quantisation: str) -> Call:
            given: dict[str, Any] = {"reduces": True, "gathers": gathers, "quantisation": quantisation}
            return each(lambda x, residual: sharded(x, weight, residual, **given))  # noqa: B023

        def summed(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            kit.reduce_scatter_tensor(part, x)  # noqa: B023
            return F.rms_norm(part.add_(residual), (hidden,), weight, 1e-6)  # noqa: B023

        calls: dict[str, Call] = {
            "ours_us": ours(True, "none"),
            "ours_fp8_us": ours(True, "row"),
            "unfused_us": each(lambda x, residual: kit.all_gather_into_tensor(whole, summed(x, residual))),  # noqa: B023
            "scatter_us": ours(False, "none"),
            "scatter_fp8_us": ours(False, "row"),
            "unfused_scatter_us": each(summed),
            "kit_scatter_us": each(lambda x, residual: kit.reduce_scatter_tensor(part, x)),  # noqa: B023
            "kit_gather_us": each(lambda x, residual: kit.all_gather_into_tensor(whole, residual)),  # noqa: B023
        }
        times = {name: round(us / sets, 2) for name, us in microseconds(calls, max(3, 40000 // (tokens * sets))).items()}
        yield {"bench": "norm_prefill", "tokens": tokens, "hidden": hidden, "ranks": world, "checked": not wrong, **times}


def dispatch(rank: int, world: int) -> Iterator[Row]:
    """Dispatch and combine of a layer like DeepSeek-V3's, beside sorting, the kit's all-to-all with known splits, and adding."""
    hidden, experts, k, kit = 7168, 256, 8, communicator()
    for tokens in (128, 4096):
        x = torch.randn(tokens, hidden, device="cuda").to(BF16)
        topk_idx = (torch.arange(tokens * k, device="cuda") * (experts // k + 1) % experts).view(tokens, k)  # the same for each rank
        weights, capacity = torch.rand(tokens, k, device="cuda"), 2 * tokens * k
        order = topk_idx.flatten().argsort(stable=True)
        counts = torch.bincount(topk_idx.flatten() * world // experts, minlength=world).tolist()
        sent, arrived = x[order // k], x.new_empty(world * counts[rank], hidden)
        calls: dict[str, Call] = {}
        for sms in few(None, 8, 16, 64, 132):
            config = ops.DispatchConfig(experts, tokens, capacity, num_sms=sms)
            rows, of_rows, handle = ops.dispatch(x, topk_idx, weights, config)
            name = f"_{sms}_sms_us" if sms else "_us"
            calls["dispatch" + name] = lambda config=config: ops.dispatch(x, topk_idx, weights, config)  # noqa: B023
            calls["combine" + name] = lambda r=rows, h=handle, w=of_rows: ops.combine(r, h, w)
        config = ops.DispatchConfig(experts, tokens, capacity)
        handle = ops.dispatch(x, topk_idx, weights, config)[2]
        calls["dispatch_fp8_us"] = lambda: ops.dispatch_fp8(x, topk_idx, weights, config)  # noqa: B023
        calls["dispatch_again_us"] = lambda: ops.dispatch(x, handle=handle)  # noqa: B023

        def unfused() -> None:
            order = topk_idx.flatten().argsort(stable=True)  # noqa: B023
            kit.all_to_all_single(arrived, x[order // k], [counts[rank]] * world, counts)  # noqa: B023

        def unfused_back() -> torch.Tensor:
            kit.all_to_all_single(sent, arrived, counts, [counts[rank]] * world)  # noqa: B023
            weighted = sent * weights.flatten()[order].unsqueeze(1)  # noqa: B023
            return torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // k, weighted)  # noqa: B023

        calls |= {"unfused_dispatch_us": unfused, "unfused_combine_us": unfused_back}
        yield {"bench": "dispatch", "tokens": tokens, "hidden": hidden, "experts": experts, "k": k, "ranks": world} | microseconds(
            calls, 100 if tokens == 128 else 20
        )


BENCHES = {
    "gather": gather, "check": check, "product": product, "fp8": in_fp8, "mlp": mlp, "norm_prefill": norm_prefill, "dispatch": dispatch,
}  # fmt: skip


if __name__ == "__main__":
    parser = script(__doc__, ranks=4)
    parser.add_argument("what", choices=BENCHES)
    options = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    run_on_shared_gpus(1 if options.what == "product" else options.ranks, options.out, BENCHES[options.what])
