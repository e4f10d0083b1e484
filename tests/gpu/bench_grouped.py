"""Grouped products at the shapes of mixtures on one GPU, beside a cuBLAS call for each group and torch's grouped product.

    PYTHONPATH=src python tests/gpu/bench_grouped.py [--out FILE]

Each call is a CUDA graph, replayed; the three take turns, and the median of five stretches counts. The groups' rows are drawn as routing to
equally likely experts draws them. Results are compared with cuBLAS's element by element. Exits with 1 if one is wrong.
"""

from collections.abc import Iterator

import torch
from harness import BF16, Call, Row, graph_times, report, script
from local_ranks import LocalRanks

from peerlane.device.products.grouped_gemm import GroupedProduct

STRETCH_US = 2e4
SHAPES = (
    ("Mixtral 8x7B, gate and up", 8, 8192, 28672, 4096),
    ("Mixtral 8x7B, down", 8, 8192, 4096, 14336),
    ("DeepSeek-V3, 32 experts, gate and up", 32, 8192, 4096, 7168),
    ("DeepSeek-V3, 32 experts, down", 32, 8192, 7168, 2048),
    ("DeepSeek-V3, 32 experts, gate and up, many tokens", 32, 32768, 4096, 7168),
    ("DeepSeek-V3, 32 experts, down, many tokens", 32, 32768, 7168, 2048),
    ("Qwen3-30B-A3B, 128 experts, gate and up", 128, 16384, 1536, 2048),
    ("Qwen3-30B-A3B, 128 experts, down", 128, 16384, 2048, 768),
)


def measure(name: str, groups: int, rows: int, n: int, k: int) -> Iterator[Row]:
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups)
    ends = counts.cumsum(0).to(torch.int32).cuda()
    a, b = torch.randn(rows, k, device="cuda").to(BF16), (torch.randn(groups, n, k, device="cuda") / k**0.5).to(BF16)
    looped, group = a.new_empty(rows, n), LocalRanks(1).groups[0]
    parts = list(zip(torch.split(a, counts.tolist()), b, torch.split(looped, counts.tolist()), strict=True))
    ours = GroupedProduct(group, rows, (groups, n, k), BF16)

    def loop() -> None:
        for x, w, y in parts:
            torch.mm(x, w.t(), out=y)

    loop()
    error = float((ours(a, b, ends).float() - looped.float()).abs().max() / looped.float().abs().max())
    calls: dict[str, Call] = {"ours": lambda: ours(a, b, ends), "cublas_loop": loop}
    if hasattr(torch, "_grouped_mm"):
        calls["torch_grouped"] = lambda: torch._grouped_mm(a, b.transpose(1, 2), ends)
    us, _ = graph_times(calls, STRETCH_US)
    yield {
        "name": name, "groups": groups, "rows": rows, "n": n, "k": k, "tiling": str(ours.tiling), "error": round(error, 5),
        "wrong": int(not error < 0.01), "us": us, "tflops": round(2 * rows * n * k / us["ours"] / 1e6, 1),
        "of_cublas_loop": round(us["cublas_loop"] / us["ours"], 3),
    }  # fmt: skip


if __name__ == "__main__":
    report((measure(*shape) for shape in SHAPES), script(__doc__).parse_args().out)
