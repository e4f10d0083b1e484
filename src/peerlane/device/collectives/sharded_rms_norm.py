"""RMSNorm between a reduce-scatter and an all-gather of rows, in one launch: what sequence-parallel layers do between their products.

    norm = sharded_rms_norm(group_of())                  the first call is collective; the memory is the communicator's
    y, total, scales = norm(x, weight, residual, reduces=True, gathers=True, epsilon=1e-6)

``reduces``: a rank gets its rows of the sum of all ranks' x; else x has this rank's rows already. It adds the residual's rows, which gives
``total``, and normalises them. ``gathers``: every rank gets all ranks' normalised rows; else its own. A gathered norm in fp8 travels with
its scales, so the gathering moves half the bytes.

The way is that of a large all-reduce (``relay.cuh``): tiles of some whole rows go to their owner through one set of rings, warps add them
and pass what they make of them on through another set. The norm is taken between the two, by warps that share a row and keep it in
registers. So the argument there that nobody can lock anybody holds here. Sums are taken in rank order in fp32, the residual behind them,
and are rounded once; the norm is that of the rounded sum, as in torch.

Bound: the port, (W - 1) / W of x's bytes for the sum and as many of y's for the gathering, in opposite directions at each port at a time.
Registers: at most 186 a thread, in blocks of 352.
"""

import functools
from pathlib import Path
from typing import Literal

import torch

from peerlane.device.collectives import workspace
from peerlane.device.collectives.communicator import Communicator, communicator
from peerlane.device.host.declare import F32, U32, BoundKernel, DeclaredKernel, Pointer, structure
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.errors import UsageError

DTYPES = torch.bfloat16, torch.float16
BLOCK_COLUMNS = 128
MOST_ROWS_OF_A_TILE = 8
Quantisation = Literal["none", "row", "block"]
"""How y is quantised to e4m3: not; by a scale for every row; by one for every 128 columns of a row."""

SHARDED_RMS_NORM = DeclaredKernel(
    "sharded_rms_norm", Path(__file__).with_name("sharded_rms_norm.cuh"), space=structure("CollectiveWorkspace", workspace.Workspace),
    **dict.fromkeys(("x", "residual", "weight"), Pointer("const char*")), **dict.fromkeys(("total", "y", "scales"), Pointer()),
    rows=U32, epsilon=F32,
)  # fmt: skip


def serves(columns: int, dtype: torch.dtype, quantisation: Quantisation, tile_bytes: int = workspace.RINGS.tile_bytes) -> bool:
    """Tells whether the kernel takes rows of so many elements: whole vectors that fit a tile, and whole blocks where these have scales."""
    fits = columns > 0 and not columns % 8 and 2 * columns <= tile_bytes
    return dtype in DTYPES and fits and (quantisation != "block" or not columns % BLOCK_COLUMNS)


class ShardedRmsNorm:
    """``call(x, weight, residual, reduces=, gathers=)`` for rows of any width that ``serves`` takes.

    x (W rows, columns) if it ``reduces``, else (rows, columns); residual (rows, columns) or None; weight (columns), the same on all ranks;
    all in one dtype, bfloat16 or float16. ``rows`` is the same on all ranks. Calls, in one stream, need no barrier between them and can be
    captured in a graph. The memory is that of ``kit``."""

    def __init__(self, kit: Communicator) -> None:
        self.kit, self.group = kit, kit.group
        self._reserved = SHARDED_RMS_NORM.inside(kit.group, kit.arena)
        self._bound = functools.cache(self._bind)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        reduces: bool,
        gathers: bool,
        epsilon: float = 1e-6,
        quantisation: Quantisation = "none",
        batch_invariant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns y, (W rows, columns) if it ``gathers``, else (rows, columns); total (rows, columns); and y's scales, (rows of y) or (rows
        of y, columns / 128), by which y times its scale is the norm. ``batch_invariant``: a row has as many warps for any rows."""
        rows = self._check(x, weight, residual, reduces, quantisation)
        columns, of_y = x.shape[1], rows * (self.group.world_size if gathers else 1)
        y = x.new_empty((of_y, columns), dtype=x.dtype if quantisation == "none" else torch.float8_e4m3fn)
        total = x.new_empty((rows, columns))
        shape = {"none": (), "row": (of_y,), "block": (of_y, columns // BLOCK_COLUMNS)}[quantisation]
        scales = x.new_empty(shape, dtype=torch.float32) if shape else None
        if rows:
            tile_rows = self._tile_rows(None if batch_invariant else rows, columns)
            launch = self._bound(x.dtype, columns, tile_rows, reduces, gathers, quantisation)
            given = {"x": x, "weight": weight, "residual": residual}
            read = {name: None if value is None else _aligned(value) for name, value in given.items()}
            launch(**read, total=total, y=y, scales=scales, rows=rows, epsilon=epsilon)
        return y, total, scales

    def _tile_rows(self, rows: int | None, columns: int) -> int:
        """Returns how many rows a tile has: what a place of a ring holds, and fewer where blocks would have no tile. None: of any."""
        rings, found = self.kit.machine.rings, 1
        most = min(rings.tile_bytes // (2 * columns), rings.summing_warps, MOST_ROWS_OF_A_TILE)
        most = most if rows is None else min(most, rows // self._grid)
        while 2 * found <= most and rings.summing_warps % (2 * found) == 0:
            found *= 2
        return found

    @property
    def _grid(self) -> int:
        machine = self.kit.machine
        return min(machine.rings.exchange_blocks(machine.world_size), machine.sm_count)

    def _bind(
        self, dtype: torch.dtype, columns: int, tile_rows: int, reduces: bool, gathers: bool, quantisation: Quantisation
    ) -> BoundKernel:
        rings = self.kit.machine.rings
        return self._reserved.bind(
            grid=self._grid,
            block=rings.relay_threads,
            shared_bytes=rings.relay_shared_bytes if gathers else rings.reduce_shared_bytes,
            resident=True,
            defines={
                **rings.defines(),
                "PEERLANE_TILE_BYTES": tile_rows * columns * 2,
                "X_TYPE": element_type(dtype),
                "COLUMNS": columns,
                "TILE_ROWS": tile_rows,
                "REDUCES": int(reduces),
                "GATHERS": int(gathers),
                "QUANTISATION": ("none", "row", "block").index(quantisation),
            },
            space=self.kit.workspace,
        )

    def _check(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, reduces: bool, quantisation: Quantisation
    ) -> int:
        """Returns the rows of a rank. Raises UsageError for what the kernel does not take."""
        parts = self.group.world_size if reduces else 1
        rows, columns = (x.shape[0] // parts, x.shape[1]) if x.dim() == 2 and not x.shape[0] % parts else (-1, 0)
        given, wanted = [x, weight], [(parts * rows, columns), (columns,)]
        if residual is not None:
            given, wanted = [*given, residual], [*wanted, (rows, columns)]
        right = all(tuple(value.shape) == size and value.dtype == x.dtype for value, size in zip(given, wanted, strict=True))
        if rows < 0 or not right or not serves(columns, x.dtype, quantisation, self.kit.machine.rings.tile_bytes):
            raise UsageError(
                f"RMSNorm of sharded rows got x, weight and residual of {[tuple(value.shape) for value in given]} in "
                f"{[value.dtype for value in given]}, quantisation {quantisation!r}: expected ({parts} x rows, columns), (columns,) and "
                f"(rows, columns) in bfloat16 or float16, columns a multiple of 8 (of 128 for 'block') and rows of at most "
                f"{self.kit.machine.rings.tile_bytes} bytes; use reduce_scatter, torch.nn.functional.rms_norm and all_gather otherwise"
            )
        return rows


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor contiguous, at an address of whole vectors."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@per_group
def _norm(group: Group) -> ShardedRmsNorm:
    return ShardedRmsNorm(communicator(group))


def sharded_rms_norm(group: Group) -> ShardedRmsNorm:
    """The group's one :class:`ShardedRmsNorm`; the first call is collective."""
    return _norm(group)
