"""Columns of the tables of what scripts in tests/gpu measured: the kit's kernels and operators beside NCCL, cuBLAS and torch."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs.build.tables import Row, by_operation, cell, measured, read_rows, table, where

_OF_TORCH = ", ".join(f"torch {name}_us" for name in ("one_shot", "two_shot", "low_contention"))
backend_table = partial(by_operation, operation="operation", figures=f"peerlane_us / nccl_us / {_OF_TORCH}")
collectives_table = partial(by_operation, operation="op", figures="ours_us / nccl_us")
_WAYS = {"one trip": "all_reduce_one_shot", "two trips": "all_reduce_two_shot", "staged": "all_reduce_staged", "ring": "all_reduce_relay"}


def _way(name: str) -> Callable[[Row], str]:
    return lambda row: f"**{cell(row, f'{name}_us')}**" if name == row["plan"] else cell(row, f"{name}_us")


ways_table = partial(
    measured,
    key="bytes",
    columns={
        "size": "bytes",
        **{title: _way(name) for title, name in {**_WAYS, "NCCL": "nccl", "torch two shots": "torch two_shot"}.items()},
    },
)
_KERNELS = {
    "gemm_rs": "GEMM + reduce-scatter",
    "ag_gemm": "all-gather + GEMM",
    "gemm_ar": "GEMM + all-reduce",
    "gemm_ag": "GEMM + all-gather",
}
fused_table = partial(
    measured,
    key="op N",
    words=("kernel",),
    columns={
        "kernel": lambda row: _KERNELS[row["op"]],
        "N": "N",
        "product us": "mm_us",
        "wire us": "comm_us",
        "kit us": "fused_us",
        "cuBLAS + NCCL us": "nccl_us",
        "torch's operator us": "torch_us",
        "faster by": lambda row: f"{row['ratio']:.2f}x",
        "of the bound": lambda row: f"{row['of_bound']:.0%}",
    },
)
product_table = partial(
    measured,
    key="N",
    columns={
        "N": "N",
        "kit us": "ours_us",
        "cuBLAS us": "cublas_us",
        "TFLOP/s": "tflops",
        "of cuBLAS": lambda row: f"{row['of_cublas']:.0%}",
    },
)
_SIDES = {"kit": "ours_us", "torch": "torch_us", "unfused": "unfused_us"}
LAYERS: dict[str, tuple[str, Mapping[str, str]]] = {
    "mlp": (
        "tokens",
        {"tokens": "tokens", **{f"{step}: {side}": f"{step}_{key}" for step in ("forward", "backward") for side, key in _SIDES.items()}},
    ),
    "gather": ("m k n", {"rows of a rank": "m", "K": "k", "N": "n", "product": "product_us", **_SIDES}),
    "decode": (
        "tokens",
        {
            "tokens": "tokens",
            "kit": "ours_us",
            "kit, fp8": "ours_fp8_us",
            "kit's all-reduce, then a norm": "kit_then_norm_us",
            "torch": "torch_one_shot_us, torch_two_shot_us",
        },
    ),
    "norm_prefill": (
        "tokens",
        {
            "tokens": "tokens",
            "kit": "ours_us",
            "kit, fp8": "ours_fp8_us",
            "unfused": "unfused_us",
            "no all-gather: kit": "scatter_us",
            "no all-gather: unfused": "unfused_scatter_us",
        },
    ),
    "fp8": (
        "tokens inner",
        {
            "tokens": "tokens",
            "inner columns": "inner",
            **{
                f"{step}: {name}": f"{step}{key}_us"
                for step in ("gather", "scatter")
                for name, key in {"kit": "", "torch": "_torch", "unfused": "_unfused", "kit in bfloat16": "_bf16"}.items()
            },
        },
    ),
    "dispatch": (
        "tokens",
        {
            "tokens": "tokens",
            "dispatch: kit": "dispatch_us",
            "kit, fp8": "dispatch_fp8_us",
            "unfused": "unfused_dispatch_us",
            "combine: kit": "combine_us",
            "unfused combine": "unfused_combine_us",
        },
    ),
    "all_reduce": (
        "bytes",
        {"size": "bytes", "packets": "packets_us", "stores": "staged_us", "rings": "rings_us", "torch's two shots": "torch_two_shot_us"},
    ),
}
"""What distinguishes the rows of each part of ``bench_layers.py``, and its columns."""


def _ratio(over: str, under: str) -> Callable[[Row], str]:
    return lambda row: f"{row[over] / row[under]:.2f}" if {over, under} <= row.keys() else "-"


def _tflops(side: str, *others: str) -> Callable[[Row], str]:
    """Returns a column: the largest rate of the sides whose names begin so, in TFLOP/s."""
    return lambda row: f"{max(value for name, value in row['tflops'].items() if name in others or name.startswith(side)):.0f}"


_FP8: Mapping[str, str | Callable[[Row], str]] = {
    "kit fast": "kit fast_us",
    "torch fast": "torch fast_us",
    "torch / kit": _ratio("torch fast_us", "kit fast_us"),
    "kit promoted": "kit promoted_us",
    "torch promoted": "torch promoted_us",
    "torch / kit, promoted": _ratio("torch promoted_us", "kit promoted_us"),
}
_SEQUENCE: Mapping[str, str | Callable[[Row], str]] = {
    "depth": "depth",
    "tokens": "length",
    "causal": lambda row: "yes" if row["causal"] else "no",
}
serving_table = partial(
    measured,
    key="tokens",
    bench="serving",
    columns={
        "tokens": "tokens",
        "kit": "fused_us",
        "kit, batch-invariant": "fused_invariant_us",
        "kit, e4m3 by blocks": "fused_block_fp8_us",
        "kit's sum, then a norm": "communicator_then_norm_us",
        "torch one shot, then a norm": "torch_one_shot_then_norm_us",
        "torch two shots, then a norm": "torch_two_shot_then_norm_us",
    },
)
ON_ONE_GPU: Mapping[str, tuple[str, Callable[[Path], str]]] = {
    "product": (
        "h200x1/layers_product.jsonl",
        partial(
            measured,
            key="size",
            columns={"size": "size", "cuBLAS": "cublas_us", "kit": "k_major_us", "cuBLAS / kit": lambda row: f"{row['of_cublas']:.2f}"},
        ),
    ),
    "grouped": (
        "h100x1/grouped.json",
        partial(
            measured,
            key="name rows",
            words=("shape",),
            columns={
                "shape": "name",
                "groups": "groups",
                "rows x n x k": lambda row: f"{row['rows']} x {row['n']} x {row['k']}",
                "cuBLAS loop": "cublas_loop_us",
                "torch grouped": "torch_grouped_us",
                "kit": "ours_us",
                "loop / kit": _ratio("cublas_loop_us", "ours_us"),
            },
        ),
    ),
    "fp8": (
        "h200x1/fp8.jsonl",
        partial(measured, key="size by", words=("scales",), columns={"square": "size", "scales": "by", **_FP8}, bench="product"),
    ),
    "fp8_grouped": (
        "h200x1/fp8.jsonl",
        partial(measured, key="name rows", words=("shape",), columns={"shape": "name", "rows": "rows", **_FP8}, bench="grouped"),
    ),
    "attention": (
        "h100x1/attention.json",
        partial(
            measured,
            key="depth length causal",
            words=("causal",),
            columns={
                **_SEQUENCE,
                "kit": _tflops("AttentionTiling"),
                "torch": _tflops("flash", "cudnn"),
                "share": lambda row: f"{row['share_of_best_torch']:.2f}",
            },
        ),
    ),
    "attention_gradients": (
        "h200x1/attention_backward.json",
        partial(
            measured,
            key="depth length causal",
            words=("causal",),
            columns={
                **_SEQUENCE,
                "one kernel": lambda row: f"{row['tflops']['kit fused']:.0f}",
                "two kernels": lambda row: f"{row['tflops']['kit']:.0f}",
                "torch": _tflops("flash", "cudnn"),
                "share": lambda row: f"{row['tflops']['kit fused'] / max(row['tflops']['flash'], row['tflops']['cudnn']):.2f}",
            },
        ),
    ),
}
"""Tables of single kernels on one GPU: name -> its file below ``results``, and what makes the table."""


def layers_table(part: str) -> Callable[[Path], str]:
    key, columns = LAYERS[part]
    return partial(measured, key=key, columns=columns, bench=part)


def batch_invariance_table(path: Path) -> str:
    """Returns what ``check_batch_invariance.py`` found for each operator, without the mode and in it; or that there was no run."""
    if not path.is_file():
        return "No run is recorded here.\n"
    found, rows = dict[str, Row](), [row for row in read_rows(path) if "operator" in row]
    for row in rows:
        told = {f"m{row['m']} {key}": value for key, value in row.items()} if "m" in row else {}
        if "batch_invariant" in row:
            told = {f"differ {'on' if row['batch_invariant'] else 'off'}": f"{row['numbers_that_differ']} of {row['numbers_of_rows']}"}
        found.setdefault(row["operator"], {"operator": f"`{row['operator']}`"}).update(told)
    columns = {"operator": "operator", **{f"differ, {mode}": f"differ {mode}" for mode in ("off", "on")}}
    columns |= {f"{m} rows, off / on": f"m{m} off_us / m{m} on_us" for m in (8, 512, 4096)}
    return f"{table(found.values(), columns, words=('operator',))}\n{where(next(row for row in rows if 'ranks' in row))}\n"


def training_table(path: Path) -> str:
    """Returns the newest run of each example and model that trains: milliseconds a step, as median and quartiles, and losses."""

    def times(side: str) -> Callable[[Row], str]:
        return lambda row: "{1:.1f} ({0:.1f} to {2:.1f})".format(*row["sides"][side]["quartiles_ms"])

    def losses(side: str) -> Callable[[Row], str]:
        return lambda row: "{:.3f} to {:.3f}".format(*(row["sides"][side]["losses"][place] for place in (0, -1)))

    def difference(row: Row) -> str:
        pairs = zip(*(row["sides"][side]["losses"] for side in sides), strict=True)
        return f"{max(abs(x - y) / y for x, y in pairs):.1e}"

    sides = ("peerlane", "torch.distributed")
    rows = [row for row in read_rows(path) if all("quartiles_ms" in row["sides"][side] for side in sides)]
    newest = {(row["example"], row["model"]): row for row in rows}
    columns: Mapping[str, Any] = {
        **{name: name for name in ("example", "model", "steps")},
        **{f"{side}: ms a step": times(side) for side in sides},
        **{f"{side}: loss": losses(side) for side in sides},
        "largest difference": difference,
    }
    return f"{table([newest[key] for key in sorted(newest)], columns, ('example', 'model'))}\n{where(rows[-1])}\n"
