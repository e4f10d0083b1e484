"""Host side of ``peerlane/products/gemm.cuh``: which tiles for which size, the maps of the operands, and the plain product."""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack

import torch

from peerlane.device.host import tune
from peerlane.device.host.declare import F32, U32, BoundKernel, Field, LocalKernel, Map, Pointer, roles_source, structure
from peerlane.device.host.group import Group, per_group
from peerlane.device.host.roles import GROUP_THREADS
from peerlane.device.host.tensor_map import TensorMapSpec, TensorPlace
from peerlane.device.host.tensor_maps import TensorMaps, tensor_maps
from peerlane.device.products.capacity import capacity, with_room
from peerlane.device.products.scales import OperandScales, Scaling, scales_at
from peerlane.errors import UsageError

Option = TypeVar("Option")
Major = Literal["k", "mn"]
"""Which dimension of an operand is contiguous: k, or the other one."""

ELEMENT_TYPES: Mapping[torch.dtype, str] = {torch.bfloat16: "peerlane::BFloat16", torch.float16: "peerlane::Float16"}
ELEMENT_BYTES = 2
TYPICAL_SM_COUNT = 132
"""What tiles are chosen for when all ranks have to choose the same."""
PANEL = 64
"""Elements in a row of a swizzled tile; k of one step."""

# Priors of the model that picks tiles, for an H100: an SM's matrix units at the rate a large product reaches, operands from L2 for one SM
# and for all of them, and what a tile costs besides (first loads, last stores). Kernels are compared by them, nothing else.
_FLOPS_PER_US = 5.3e6
_SM_BYTES_PER_US = 1e5
_L2_BYTES_PER_US = 5.9e6
_TILE_OVERHEAD_US = 1.5


class GroupedTiles(ctypes.Structure):
    """Mirrors ``peerlane::GroupedTiles``."""

    _fields_ = (("rows", ctypes.c_uint32), ("columns", ctypes.c_uint32), ("group_rows", ctypes.c_uint32))


FIELDS: Mapping[str, Field] = {
    **{name: Map() for name in ("a", "b", "residual")},
    "tiles": structure("GroupedTiles", GroupedTiles),
    **dict.fromkeys(("n", "k"), U32),
    "scale": F32,
    "bias": Pointer("const char*"),
    **dict.fromkeys(("a_scales", "b_scales"), structure("OperandScales", OperandScales)),
}
"""The fields of every product: its operands, its tiles and what its epilogue may have."""


Activation = Literal["none", "relu", "silu", "gelu", "gelu_tanh"]


class Terms(TypedDict, total=False):
    """What a call gives its kernel's :class:`Epilogue`."""

    bias: torch.Tensor | None
    residual: torch.Tensor | None
    scale: float
    a_scales: torch.Tensor | None
    b_scales: torch.Tensor | None


@dataclass(frozen=True)
class Epilogue:
    """What a sum becomes before it is rounded: ``activation(scale * sum + bias) + residual``. It is part of a kernel; which bias, residual
    and scale, each call says. ``relu_gradient`` adds no residual: where that, a relu's result, is not positive, the sum becomes zero.
    ``difference`` subtracts it."""

    activation: Activation | Literal["relu_gradient", "difference"] = "none"
    bias: bool = False
    """for each column, in the operands' dtype"""
    residual: bool = False
    """as large as the result, in the operands' dtype"""
    scale: bool = False
    batch_invariant: bool = False
    """a row has the same bits whatever m is and wherever it stands: one tile shape; ranks' parts are rounded and added in rank order"""
    scaling: Scaling = "none"
    """unless none, operands hold e4m3: both lie along k, two numbers pass for an element, and a call gives their scales (``scales_at``)"""
    column_sums: bool = False
    """a :class:`Product` also writes sums of each column of 16 rows, before these are rounded"""

    @property
    def cpp(self) -> str:
        parts = ", ".join("true" if part else "false" for part in (self.bias, self.residual, self.scale))
        last = f", {str(self.batch_invariant).lower()}, true" if self.column_sums else ", true" if self.batch_invariant else ""
        return f"peerlane::Epilogue<peerlane::Activation::{self.activation}, {parts}, peerlane::Scaling::{self.scaling}{last}>"

    def fields(
        self,
        maps: TensorMaps,
        shape: tuple[int, int],
        block_rows: int,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
        a_scales: torch.Tensor | None = None,
        b_scales: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """The kernel's fields for a call whose result has this shape; raises UsageError unless it gives what there is, and nothing else."""
        scales = {
            name: scales_at(maps.group, given) for name, given in (("a_scales", a_scales), ("b_scales", b_scales)) if given is not None
        }
        if len(scales) != (0 if self.scaling == "none" else 2):
            raise UsageError(f"a product with the epilogue {self}: got {sorted(scales)}; expected scales of both operands of e4m3, or none")
        if bias is None and residual is None and scale == 1 and not (self.bias or self.residual or self.scale):
            return scales
        for name, wanted, given in (("bias", self.bias, bias), ("residual", self.residual, residual)):
            size = shape if name == "residual" else shape[1:]
            if wanted != (given is not None) or (given is not None and tuple(given.shape) != size):
                got = "none" if given is None else f"one of {tuple(given.shape)}"
                raise UsageError(f"a product with the epilogue {self}: got {name} {got}; expected {f'one of {size}' if wanted else 'none'}")
        if scale != 1 and not self.scale:
            raise UsageError(f"a product with the epilogue {self}: got the scale {scale}; create it with Epilogue(scale=True)")
        fields: dict[str, Any] = scales | ({"scale": scale} if self.scale else {})
        if bias is not None:
            fields["bias"] = bias
        if residual is not None:
            fields["residual"] = maps(aligned(residual), (block_rows, PANEL))
        return fields


PLAIN = Epilogue()


class LaunchShape(TypedDict):
    """What a launch has besides its macros and its fields."""

    grid: int
    block: int
    cluster: int
    shared_bytes: int


@dataclass(frozen=True)
class Tiling:
    """One instance of ``peerlane::GemmShape``: tiles of ``columns`` columns by clusters of ``blocks`` blocks, each of which has
    64 ``groups`` rows of it, with ``slots`` steps of 64 k in flight."""

    groups: int
    columns: int
    slots: int
    blocks: int = 1

    @property
    def block_rows(self) -> int:
        return 64 * self.groups

    @property
    def rows(self) -> int:
        return self.block_rows * self.blocks

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def shared_bytes(self) -> int:
        """``sizeof(RoleMemory)``: both rings' buffers, and their barriers in the last 1024 bytes."""
        return (self.slots * (self.block_rows + self.columns) + self.groups * 2 * 64) * PANEL * ELEMENT_BYTES + 1024

    def b_box(self, major: Major) -> tuple[int, int]:
        """What a block loads of the right operand at a time."""
        return operand_box(major, self.columns // self.blocks)

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Row and column tiles of an (m, n) result."""
        return -(-m // self.rows), -(-n // self.columns)

    def whole(self, blocks: int) -> int:
        """The largest grid of at most ``blocks`` blocks."""
        return blocks // self.blocks * self.blocks

    def shape(self, blocks: int) -> LaunchShape:
        """The launch of the largest grid of at most ``blocks`` blocks."""
        return {"grid": self.whole(blocks), "block": self.threads, "cluster": self.blocks, "shared_bytes": self.shared_bytes}

    def grouped(self, m: int, n: int, *, parts: int = 1) -> GroupedTiles:
        """The order of the tiles of ``parts`` results of (m, n) that are computed side by side: such that a wave of tiles, on all SMs,
        reads as many rows of A as columns of B, which is the least."""
        rows, columns = self.grid(m, n)
        group_rows = round(math.sqrt(TYPICAL_SM_COUNT / self.blocks * self.columns / self.rows) / parts)
        return GroupedTiles(rows=rows, columns=columns, group_rows=max(1, min(group_rows, rows)))

    def defines(self, dtype: torch.dtype, a: Major, b: Major, epilogue: Epilogue | None = None) -> dict[str, str | int]:
        return {
            "SHAPE": f"peerlane::GemmShape<{ELEMENT_TYPES[dtype]}, {self.groups}, {self.columns}, {self.slots}, "
            f"peerlane::Major::{a}, peerlane::Major::{b}, {self.blocks}, {(epilogue or PLAIN).cpp}>"
        }


TILINGS = (
    Tiling(2, 256, 4, blocks=2),
    Tiling(2, 128, 6, blocks=2),
    Tiling(2, 256, 4),
    Tiling(2, 128, 6),
    Tiling(2, 64, 8),
    Tiling(1, 64, 8),
)
BATCH_INVARIANT = Tiling(2, 128, 6)
"""The tiles of batch-invariant products, for all sizes."""


def choose_tiling(m: int, n: int, k: int, sm_count: int, parts: int = 1, tilings: Sequence[Tiling] = TILINGS) -> Tiling:
    """The tiling whose waves of tiles take least time in the model, for ``parts`` results of (m, n). Depends on its arguments alone, so
    ranks that must agree pass the same."""
    return rank_tilings(m, n, k, sm_count, parts, tilings)[0]


def tile_count(tiling: Tiling, m: int, n: int) -> int:
    """Tiles of an (m, n) result."""
    return math.prod(tiling.grid(m, n))


def rank_tilings(
    m: int,
    n: int,
    k: int,
    sm_count: int,
    parts: int = 1,
    tilings: Sequence[Tiling] = TILINGS,
    count: Callable[[Tiling, int, int], int] = tile_count,
) -> list[Tiling]:
    """Tilings by their time in the model, the best first. ``count``: how many tiles of an (m, n) result are computed."""

    def time_us(tiling: Tiling) -> float:
        tiles, clusters = parts * count(tiling, m, n), sm_count // tiling.blocks
        flops = 2 * tiling.block_rows * tiling.columns * k
        loaded = (tiling.block_rows + tiling.columns / tiling.blocks) * k * ELEMENT_BYTES
        loading_us = loaded * max(1 / _SM_BYTES_PER_US, min(tiles, clusters) * tiling.blocks / _L2_BYTES_PER_US)
        return -(-tiles // clusters) * (max(flops / _FLOPS_PER_US, loading_us) + _TILE_OVERHEAD_US)

    return sorted((tiling for tiling in tilings if tiling.blocks <= sm_count), key=time_us)


def operand_map(place: TensorPlace, major: Major, span: int) -> TensorMapSpec:
    """The map of A or B, (parts, outer, k) or (parts, k, outer), for what a block loads of a ``peerlane::Operand``: ``span`` of its
    rows (A) or columns (B)."""
    return place.map(operand_box(major, span))


def result_map(place: TensorPlace) -> TensorMapSpec:
    """The map of a result (parts, m, n), for pieces of 64 x 64."""
    return place.map((64, PANEL))


def tilings_for(group: Group, batch_invariant: bool = False) -> Sequence[Tiling]:
    """Those of one block where ranks share a GPU: all blocks have to be resident, and how many clusters a share holds nobody says. One of
    them if a product is to be ``batch_invariant``."""
    if batch_invariant:
        return [BATCH_INVARIANT]
    return TILINGS if group.ranks_per_device == 1 else [tiling for tiling in TILINGS if tiling.blocks == 1]


TUNED_ELEMENTS = 1 << 18
"""The fewest elements of a result that is tuned. Smaller ones take the model's choice."""
_TUNED_OPTIONS = 5


class Multiplier(Protocol):
    """A kernel of one size, with memory of its own."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...

    def close(self) -> None: ...


def tuned(
    group: Group,
    kernel: str,
    operands: tuple[tuple[int, int], tuple[int, int]],
    dtype: torch.dtype,
    options: Sequence[Option],
    make: Callable[[Option], Multiplier],
) -> Option:
    """Collective: the option by which a product of operands of these shapes takes least time. Options come best first by the model. Rows of
    the first and columns of the second operand are the same on all ranks."""
    if operands[0][0] * operands[1][1] < TUNED_ELEMENTS:
        return options[0]
    drawn: list[torch.Tensor] = []

    def made(option: Option) -> tuple[Callable[[], object], Callable[[], None]]:
        if not drawn:
            drawn.extend(aligned(torch.randn(shape, device=group.device).to(dtype)) for shape in operands)
        multiply = make(option)
        return lambda: multiply(*drawn), multiply.close

    return tune.choose(group, kernel, (*operands[0], operands[1][1], str(dtype)), options[:_TUNED_OPTIONS], made)


TYPICAL_DEPTH = 2048
"""The depth for which tiles are chosen where ranks share a product, whatever k is: k may differ from rank to rank, the tiles may not."""


Sharded = TypeVar("Sharded")
Room = TypeVar("Room")


def kept_products(
    make: Callable[..., Sharded], kernel: str, memory: Callable[[Group, int, int, torch.dtype], Room], *, in_parts: bool = False
) -> tuple[Callable[..., Sharded], Callable[[Group, int, int, torch.dtype], Room]]:
    """Returns ``product(group, m, n, dtype, epilogue=PLAIN)``, the group's one of this size, and ``memory_of(group, rows, n, dtype)``.

    The first call of more rows than all before is collective: memory has room for sizes of up to ``rows`` rows of a rank, all m of them, or
    ``in_parts`` a share. k is no part of it: ranks may differ. A product has the tiling that was measured to be best, if one was."""
    memory_of = per_group(memory)

    @per_group
    def tiling_of(group: Group, rows: int, n: int, dtype: torch.dtype) -> Tiling | None:
        parts = group.world_size if in_parts else 1
        options = rank_tilings(rows, n, TYPICAL_DEPTH, group.sm_count, parts, tilings_for(group))
        of_tiling: Any = lambda tiling: make(parts * rows, n, dtype, group, tiling=tiling)  # noqa: E731
        fastest = tuned(group, kernel, ((parts * rows, TYPICAL_DEPTH), (TYPICAL_DEPTH, n)), dtype, options, of_tiling)
        return None if fastest == options[0] else fastest  # the model is then to be trusted with smaller sizes of this capacity too

    @per_group
    def product(group: Group, m: int, n: int, dtype: torch.dtype, epilogue: Epilogue = PLAIN) -> Sharded:
        rows = m // group.world_size if in_parts else m
        room = with_room(memory_of, group, rows, n, dtype)
        tiling = None if epilogue.batch_invariant else tiling_of(group, capacity(rows), n, dtype)
        return make(m, n, dtype, group, epilogue=epilogue, tiling=tiling, memory=room)

    return product, memory_of


def operand_box(major: Major, span: int) -> tuple[int, int]:
    return (span if major == "k" else PANEL, PANEL)


def row_stride(columns: int) -> int:
    """Elements from one row to the next that give rows a multiple of 16 bytes."""
    return -(-columns // 8) * 8


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor (rows, columns) itself, or a copy, whose rows are as far apart as ``row_stride`` says and begin at multiples of 16
    bytes."""
    rows, columns = tensor.shape
    stride = row_stride(columns)
    if tensor.stride() == (stride, 1) and tensor.data_ptr() % 16 == 0:
        return tensor
    return empty_aligned(rows, columns, tensor).copy_(tensor)


def fits_map(matrix: torch.Tensor) -> bool:
    """Whether copies can read the matrix as it lies: rows are contiguous and begin at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.stride(0) >= matrix.shape[1] and matrix.data_ptr() % 16 == 0


def stored(b: torch.Tensor) -> tuple[torch.Tensor, Major]:
    """A right operand (k, n) as it lies in memory, and which dimension is contiguous there: itself, or its transpose (n, k), which is what
    ``torch.nn.Linear`` keeps as weight. Copies it only if rows of neither begin at multiples of 16 bytes."""
    if fits_map(b):
        return b, "mn"
    return (b.T, "k") if fits_map(b.T) else (aligned(b), "mn")


def empty_aligned(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((rows, row_stride(columns)))[:, :columns]


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise UsageError unless there is a kernel for this product: A (m, k), B (k, n)."""
    if a.dtype not in ELEMENT_TYPES or b.dtype != a.dtype:
        raise UsageError(f"a product of {a.dtype} and {b.dtype}: expected both bfloat16 or both float16; convert the operands")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or 0 in a.shape or 0 in b.shape:
        raise UsageError(f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)}: expected (m, k) and (k, n), none of them 0")


SOURCE = roles_source("gemm", "products/gemm.cuh", "GemmRoles", local=True)
GEMM = LocalKernel("gemm", SOURCE, c=Map(), sums=Pointer("float*"), m=U32, **FIELDS)


def bind(group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tiling: Tiling | None = None) -> BoundKernel:
    """The launch of ``out = a @ b`` on a rank of ``group``: a (m, k), b (k, n), all ``aligned``. It holds addresses, not tensors."""
    check_operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    tiling = tiling or choose_tiling(m, n, k, group.sm_count)
    bound = _bound(group, (m, n, k), a.dtype, PLAIN, tiling)
    bound.set(**specs(group.place(a), group.place(b), group.place(out), tiling))
    return bound


def _bound(
    group: Group, shape: tuple[int, int, int], dtype: torch.dtype, epilogue: Epilogue, tiling: Tiling, major: Major = "mn"
) -> BoundKernel:
    m, n, k = shape
    tiles = tiling.grouped(m, n)
    blocks = min(tiles.rows * tiles.columns * tiling.blocks, group.sm_count)
    return GEMM.bind(group, **tiling.shape(blocks), defines=tiling.defines(dtype, "k", major, epilogue), tiles=tiles, m=m, n=n, k=k)


class Product:
    """``call(a, b)`` for one shape: ``a @ b`` with an epilogue, on a rank of ``group`` alone. a (m, k) ``aligned``, b (k, n) as it lies,
    see ``stored``; ``sums`` (m / 16, rounded up, n; float32) of an epilogue with ``column_sums``."""

    def __init__(
        self, group: Group, shape: tuple[int, int, int], dtype: torch.dtype, epilogue: Epilogue = PLAIN, tiling: Tiling | None = None
    ) -> None:
        self.shape, self.epilogue, self.maps = shape, epilogue, tensor_maps(group)
        self.tiling = tiling or choose_tiling(*shape, group.sm_count, tilings=tilings_for(group, epilogue.batch_invariant))
        self._bind: Callable[[Major], BoundKernel] = functools.cache(functools.partial(_bound, group, shape, dtype, epilogue, self.tiling))

    def __call__(self, a: torch.Tensor, b: torch.Tensor, *, sums: torch.Tensor | None = None, **terms: Unpack[Terms]) -> torch.Tensor:
        check_operands(a, b)
        m, n, k = self.shape
        wanted = (-(-m // 16), n, torch.float32) if self.epilogue.column_sums else None
        if (given := None if sums is None else (*sums.shape, sums.dtype)) != wanted:
            raise UsageError(f"a product with the epilogue {self.epilogue}: got sums {given}; expected {wanted}")
        if (*a.shape, b.shape[1]) != (m, k, n):
            raise UsageError(
                f"operands {tuple(a.shape)} and {tuple(b.shape)}: expected ({m}, {k}) and ({k}, {n}); create a Product for each size"
            )
        out, maps, tiling, (right, major) = empty_aligned(m, n, a), self.maps, self.tiling, stored(b)
        last = self.epilogue.fields(maps, (m, n), tiling.block_rows, **terms)
        a_map, b_map = maps(a, operand_box("k", tiling.block_rows)), maps(right, tiling.b_box(major))
        self._bind(major)(a=a_map, b=b_map, c=maps(out, (64, PANEL)), sums=sums, **last)
        return out


@per_group
def product(group: Group, m: int, n: int, k: int, dtype: torch.dtype, epilogue: Epilogue = PLAIN) -> Product:
    """The group's one :class:`Product` of this size."""
    return Product(group, (m, n, k), dtype, epilogue)


def specs(
    a: TensorPlace, b: TensorPlace, out: TensorPlace, tiling: Tiling, a_major: Major = "k", b_major: Major = "mn"
) -> dict[str, TensorMapSpec]:
    """All maps of a launch, by the field they go to, for matrices as they lie in memory."""
    return {
        "a": operand_map(a.split(1), a_major, tiling.block_rows),
        "b": operand_map(b.split(1), b_major, tiling.columns // tiling.blocks),
        "c": result_map(out.split(1)),
    }
