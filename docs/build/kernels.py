"""Tables of what ``bench_kernels.py``, ``bench_layers.py`` and ``check_backend.py`` in tests/gpu measured: the kit's kernels beside NCCL,
cuBLAS and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peerlane.errors import UsageError
from peerlane.hardware.environment import node_class
from peerlane.report.mechanisms import size_text
from peerlane.report.tables import TextTable
from peerlane.words import counted


def collectives_report(path: Path) -> str:
    """Returns a table of microseconds of the kit's collectives and, behind a stroke, of NCCL's, by size."""
    document = _read(path)
    operations = list(dict.fromkeys(row["op"] for row in document["rows"]))
    columns = [name.replace("_", "-") for name in operations]
    table = TextTable(("size", *columns), right=("size", *columns))
    for size in sorted({row["bytes"] for row in document["rows"]}):
        rows = {row["op"]: row for row in document["rows"] if row["bytes"] == size}
        cells = (f"{_us(rows[name]['ours_us'])} / {_us(rows[name]['nccl_us'])}" if name in rows else "-" for name in operations)
        table.add(size_text(size), *cells)
    return f"{table.markdown()}\n{_where(document)}\n"


def backend_report(path: Path, mode: str = "graph") -> str:
    """Returns a table, by size, of microseconds of a call in a launch mode on the backend ``peerlane``, on NCCL and, where there is one, on
    the fastest operator of torch's symmetric memory; from ``tests/gpu/check_backend.py``."""
    document = _read(path, rows="table", world_size="ranks")
    rows = [row for row in document["table"] if row["mode"] == mode]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    table = TextTable(("size", *operations), right=("size", *operations))
    for size in sorted({row["bytes"] for row in rows}):
        of_size = {row["operation"]: row for row in rows if row["bytes"] == size}
        table.add(size_text(size), *(_beside(of_size[name]) if name in of_size else "-" for name in operations))
    return f"{table.markdown()}\n{_where(document, 'ranks')}\n"


def _beside(row: dict[str, Any]) -> str:
    """Returns the medians of one row of ``backend_report``."""
    times = [row[name]["median_us"] for name in ("peerlane", "nccl")]
    torch = [cell["median_us"] for name, cell in row.items() if name.startswith("torch ") and "median_us" in cell]
    return " / ".join(_us(us) for us in [*times, *([min(torch)] if torch else [])])


def fused_report(path: Path) -> str:
    """Returns a table with a row per kernel and width. *Faster by*: than cuBLAS and NCCL."""
    document = _read(path)
    columns = ("kernel", "N", "product us", "wire us", "kit us", "cuBLAS + NCCL us", "torch's operator us", "faster by", "of the bound")
    table = TextTable(columns, right=columns[1:])
    names = {"gemm_rs": "GEMM + reduce-scatter", "ag_gemm": "all-gather + GEMM"}
    names |= {"gemm_ar": "GEMM + all-reduce", "gemm_ag": "GEMM + all-gather"}
    for row in sorted(document["rows"], key=lambda row: (list(names).index(row["op"]), row["N"])):
        times = (_us(row[key]) if key in row else "-" for key in ("mm_us", "comm_us", "fused_us", "nccl_us", "torch_us"))
        table.add(names[row["op"]], str(row["N"]), *times, f"{row['ratio']:.2f}x", f"{row['of_bound']:.0%}")
    return f"{table.markdown()}\n{_where(document)}\n"


def product_report(path: Path) -> str:
    """Returns a table with a row per width of square matrices."""
    document = _read(path)
    columns = ("N", "kit us", "cuBLAS us", "TFLOP/s", "of cuBLAS")
    table = TextTable(columns, right=columns)
    for row in document["rows"]:
        table.add(str(row["N"]), _us(row["ours_us"]), _us(row["cublas_us"]), str(row["tflops"]), f"{row['of_cublas']:.0%}")
    return f"{table.markdown()}\n{_where(document)}\n"


_KINDS = {"kit": "ours", "torch": "torch", "unfused": "unfused"}
LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    "mlp": {
        "tokens": ("tokens",),
        **{f"{step}: {name}": (f"{step}_{key}_us",) for step in ("forward", "backward") for name, key in _KINDS.items()},
    },
    "gather": {
        "rows of a rank": ("m",),
        "K": ("k",),
        "N": ("n",),
        "product": ("product_us",),
        **{name: (f"{key}_us",) for name, key in _KINDS.items()},
    },
    "decode": {
        "tokens": ("tokens",),
        "kit": ("ours_us",),
        "kit, fp8": ("ours_fp8_us",),
        "kit's all-reduce, then a norm": ("kit_then_norm_us",),
        "torch": ("torch_one_shot_us", "torch_two_shot_us"),
    },
    "norm_prefill": {
        "tokens": ("tokens",),
        "kit": ("ours_us",),
        "kit, fp8": ("ours_fp8_us",),
        "unfused": ("unfused_us",),
        "no all-gather: kit": ("scatter_us",),
        "no all-gather: unfused": ("unfused_scatter_us",),
    },
    "fp8": {
        "tokens": ("tokens",),
        "inner columns": ("inner",),
        **{
            f"{step}: {name}": (f"{step}{key}_us",)
            for step in ("gather", "scatter")
            for name, key in {"kit": "", "torch": "_torch", "unfused": "_unfused", "kit in bfloat16": "_bf16"}.items()
        },
    },
    "dispatch": {
        "tokens": ("tokens",),
        "dispatch: kit": ("dispatch_us",),
        "kit, fp8": ("dispatch_fp8_us",),
        "unfused": ("unfused_dispatch_us",),
        "combine: kit": ("combine_us",),
        "unfused combine": ("unfused_combine_us",),
    },
    "all_reduce": {
        "size": ("bytes",),
        "packets": ("packets_us",),
        "stores": ("staged_us",),
        "rings": ("rings_us",),
        "torch's two shots": ("torch_two_shot_us",),
    },
}
"""Of each part of ``bench_layers.py``: its columns, and the figures of which each shows the smallest."""


def layers_report(path: Path, part: str) -> str:
    """Returns a table of microseconds of one part of ``tests/gpu/bench_layers.py``: each row is the newest of its size."""
    columns, rows = LAYERS[part], {}
    sizes = [key for keys in columns.values() for key in keys if not key.endswith("_us")]
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("bench") == part:
            rows[tuple(row[key] for key in sizes)] = row
    if not rows:
        raise UsageError(f"{path} has no row of {part!r}: expected what `bench_layers.py {part} --out FILE` of tests/gpu writes")
    table = TextTable(tuple(columns), right=tuple(columns))
    for size in sorted(rows):
        table.add(*(_least(rows[size], keys) for keys in columns.values()))
    last = rows[size]
    return f"{table.markdown()}\nNode: {last['gpus']}x {last['gpu']}; {counted(last['ranks'], 'rank')}.\n"


def _least(row: dict[str, Any], keys: tuple[str, ...]) -> str:
    """Returns a cell: a size, or the smallest of the times that the row has."""
    if keys == ("bytes",):
        return size_text(row["bytes"])
    known = [row[key] for key in keys if key in row]
    return "-" if not known else _us(min(known)) if keys[0].endswith("_us") else str(known[0])


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _where(document: dict[str, Any], world_size: str = "world_size") -> str:
    software = document["environment"]["software"]
    ranks = counted(document[world_size], "rank")
    return f"Node: {node_class(document['environment'])}; {ranks}; torch {software['torch']}, nccl {software['nccl']}."


def _read(path: Path, rows: str = "rows", world_size: str = "world_size") -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document[rows], document["environment"], document[world_size]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a measurement of kernels ({error!r}): expected what bench_kernels.py or check_backend.py of tests/gpu write"
        ) from None
    return document
