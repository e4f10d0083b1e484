"""The table of what the operators of ``peerlane.ops`` support."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Replicate, Shard

from peerlane.ops.sharding import SHARDINGS, Sharding
from peerlane.ops.support import SUPPORT, Support
from peerlane.report.tables import TextTable

COLUMNS = (
    "operator",
    "one kernel in",
    "other dtypes",
    "layout of DTensors",
    "kit's ranks",
    "CUDA graph",
    "gradient",
    "`torch.compile`",
    "autocast",
    "the kit's memory",
)


def operators_table() -> str:
    """Returns a row for each operator, in Markdown."""
    table = TextTable(COLUMNS)
    for name, support in SUPPORT.items():
        table.add(*_row(name, support))
    return table.markdown()


def _row(name: str, support: Support) -> list[str]:
    fused = support.fused if isinstance(support.fused, str) else ", ".join(str(dtype).removeprefix("torch.") for dtype in support.fused)
    cast = "casts as `torch.mm`" if support.casts else "leaves dtypes"
    layout = _layout(SHARDINGS[name]) if name in SHARDINGS else "none"
    return [f"`{name}`", fused, support.others or "-", layout, "1 to 8", support.graph, support.gradient, "yes", cast, support.memory]


def _layout(sharding: Sharding) -> str:
    inputs = [_letter(placement) for placement in sharding.inputs]
    shown = f"{len(inputs)} x {inputs[0]}" if len(inputs) > 2 and len({*inputs}) == 1 else ", ".join(inputs)
    return f"{shown} to {_letter(sharding.result)}"


def _letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if isinstance(placement, Replicate) else "P"
