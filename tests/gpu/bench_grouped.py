"""Grouped products at the shapes of mixtures on one GPU, beside a cuBLAS call for each group and torch's grouped product.

    PYTHONPATH=src python tests/gpu/bench_grouped.py [--out FILE]

Each call is a CUDA graph, replayed; the three take turns, and the median of five stretches counts. The groups' rows are drawn as routing to
equally likely experts draws them. Results are compared with cuBLAS's element by element. Exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from harness import BF16, faults_told, graph_of, median_in_turn, microseconds_of
from local_ranks import LocalRanks

from peerlane.device.products.grouped_gemm import GroupedProduct
from peerlane.hardware.environment import record

STRETCH_S = 0.02
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


def measure(name: str, groups: int, rows: int, n: int, k: int) -> dict[str, object]:
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
    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours(a, b, ends), "cublas_loop": loop}
    if hasattr(torch, "_grouped_mm"):
        calls["torch_grouped"] = lambda: torch._grouped_mm(a, b.transpose(1, 2), ends)
    graphs = {who: graph_of(call) for who, call in calls.items()}
    count = {who: max(1, int(STRETCH_S * 1e6 / microseconds_of(graph, 2))) for who, graph in graphs.items()}
    medians = median_in_turn({who: lambda who=who: microseconds_of(graphs[who], count[who]) for who in graphs})  # type: ignore[misc]
    us = {who: round(median, 1) for who, median in medians.items()}
    return {
        "name": name, "groups": groups, "rows": rows, "n": n, "k": k, "tiling": str(ours.tiling), "error": round(error, 5), "us": us,
        "tflops": round(2 * rows * n * k / us["ours"] / 1e6, 1), "of_cublas_loop": round(us["cublas_loop"] / us["ours"], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options, rows = parser.parse_args(), []
    with faults_told():
        for shape in SHAPES:
            rows.append(row := measure(*shape))
            print("ok  " if row["error"] < 0.01 else "FAIL", json.dumps(row), flush=True)  # type: ignore[operator]
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": record(), "rows": rows}, indent=1))
    sys.exit(any(row["error"] >= 0.01 for row in rows))  # type: ignore[operator]


if __name__ == "__main__":
    main()
