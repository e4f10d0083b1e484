"""All-reduce, residual, RMSNorm and quantisation to fp8 of a few tokens in one launch: what decoding does twice a layer.

    norm = all_reduce_rms_norm(group_of(), columns, torch.bfloat16)        the first call is collective; one arena for all numbers of tokens
    y, total = norm(x, weight, residual, epsilon=1e-6)

A block takes a token. Everything travels in packets, twelve bytes and their epoch in one store: no fence, no barrier, no flag. In one shot
every rank pushes its tokens to all others, and adds all of them itself: one trip, (W - 1) times the bytes. In two shots a rank adds its
part of every token, and pushes the sum: two trips, 2 (W - 1) / W times the bytes. The host chooses by size (``one_shot_rows``). Sums are
taken in rank order in fp32, the residual behind them, and are rounded once: all ranks get the same bits. Every rank computes the norm of
that sum itself.

A place has one writer for ever, and each packet that is pushed is waited for. Packets of one shot are double-buffered by the launch's
epoch: to finish a launch a rank needs a packet of it from every other rank, so whoever begins launch e + 2 knows that all others have
finished launch e. Those of two shots need one buffer. Whoever begins a launch has had the sums of the one before from all ranks, which had
then used its parts; whoever sends a sum has had parts of the same launch from all others, which had then finished the one before.

Bound: bytes over the port's rate, a third more than the data for the epochs, and a trip of a packet, about 2 us each. Up to some ten tokens
of 8,192 columns the trips and the launch limit it, and above that the port. Device lines: 160. Registers: at most 88 a thread, in blocks of
up to 704. Arena: (2 W r + 2 T) H 8/3 bytes for T = 512 tokens of H columns, of which r go in one shot; 28 MB for 8,192 columns on 4 ranks.
"""

import functools
from pathlib import Path
from typing import Literal

import torch

from peerlane.device.host.declare import F32, PACKET_BYTES, U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Pointer
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.errors import UsageError

MAX_ROWS = 512
"""Tokens of a launch."""
PACKET_ELEMENTS = 6
MOST_TEAMS = 2  # of a block, which work on a token each where blocks have several
DTYPES = torch.bfloat16, torch.float16
_SECOND_TRIP_BYTES = 3 * 343_000 * 3 // 4
"""Data that a port takes in, as packets, while a second trip is on its way: 3 us at 343 GB/s."""
Quantisation = Literal["none", "tensor", "token", "block"]
"""How y is quantised: not; by the caller's scale; by a scale that the kernel finds for every token, or for 128 columns of one."""
BLOCK_COLUMNS, MOST_BLOCK_COLUMNS = 128, 1 << 15
"""Columns of a block, and of a token whose blocks have scales: what shared memory holds."""

ALL_REDUCE_RMS_NORM = DeclaredKernel(
    "all_reduce_rms_norm", Path(__file__).with_name("rms_norm.cuh"), epochs=Epochs(), tokens=Buffer(), parts=Buffer(), sums=Buffer(),
    **dict.fromkeys(("x", "residual", "weight"), Pointer("const char*")), total=Pointer(), y=Pointer(), scale=Pointer("const float*"),
    scales=Pointer("float*"), **dict.fromkeys(("rows", "columns", "one_shot_rows", "most_rows"), U32),
    epsilon=F32, weight_offset=F32,
)  # fmt: skip


def one_shot_rows(columns: int, world_size: int) -> int:
    """Returns how many tokens go in one shot at most: as long as what two shots save takes less than the second trip."""
    if world_size == 2:
        return MAX_ROWS  # two shots save nothing
    saved = (world_size - 1) * (1 - 2 / world_size)  # of the tokens' bytes
    return max(1, min(MAX_ROWS, int(_SECOND_TRIP_BYTES / saved / (2 * columns))))


def serves_blocks(columns: int) -> bool:
    """Tells whether a token of so many columns may have a scale for every 128 of them."""
    return columns % BLOCK_COLUMNS == 0 and columns <= MOST_BLOCK_COLUMNS


def threads_of(packets: int, teams: int, most: int = 1024) -> int:
    """Returns the threads of a block of so many teams, of which each takes a token at a time. One team has two packets for each thread, as
    long as that leaves them enough registers; several share a block of that size."""
    threads = -(-packets // 64) * 32
    return max(32, min(threads if threads <= 704 else 512, most) // teams // 32 * 32) * teams


class AllReduceRmsNorm:
    """``call(x, weight, residual)`` for tokens of ``columns``: ``total``, the sum over ranks of x, plus residual, and its RMSNorm y.

    x and residual (tokens, columns), as many on all ranks; a launch takes 512; weight (columns); columns a multiple of 8; all contiguous,
    in bfloat16 or float16; residual and weight the same on all ranks. y is of x's dtype, or e4m3. Creating one is collective.
    Calls of any numbers of tokens, in one stream, need no barrier between them and can be captured in a graph."""

    def __init__(self, group: Group, columns: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPES or columns % 8 or columns < 8 * group.world_size or group.world_size < 2:
            raise UsageError(
                f"all-reduce and RMSNorm of {columns} columns in {dtype} on {group.world_size} ranks: expected bfloat16 or float16, a "
                f"multiple of 8, at least 8 for each of at least 2 ranks; use all_reduce and torch.nn.functional.rms_norm otherwise"
            )
        self.group, self.columns, self.dtype = group, columns, dtype
        world, packets = group.world_size, -(-columns // PACKET_ELEMENTS)
        self.one_shot_rows = one_shot_rows(columns, world)
        two_shot_rows = MAX_ROWS if self.one_shot_rows < MAX_ROWS else 1
        places = {
            "tokens": 2 * world * self.one_shot_rows * packets,
            "parts": world * two_shot_rows * -(-packets // world),
            "sums": two_shot_rows * packets,
        }
        self._most_rows = two_shot_rows
        self.reserved = ALL_REDUCE_RMS_NORM.reserve(group, sizes={name: PACKET_BYTES * count for name, count in places.items()})
        self._packets = packets
        self._bound = functools.cache(self._bind)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        epsilon: float = 1e-6,
        quantisation: Quantisation = "none",
        scale: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        batch_invariant: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns y, total and the scales that it found, (tokens) of quantisation by token, (tokens, columns / 128) by block; y times its
        scale is the norm. ``scale`` is that of quantisation by tensor: one float32. ``weight_offset`` is added to ``weight``, 1 for
        Gemma's. ``batch_invariant``: squares are added in one order, whatever the number of tokens."""
        self._check(x, weight, residual, quantisation, scale)
        y = torch.empty_like(x, dtype=x.dtype if quantisation == "none" else torch.float8_e4m3fn)
        total = torch.empty_like(x)
        shape = {"token": (len(x),), "block": (len(x), self.columns // BLOCK_COLUMNS)}.get(quantisation)
        scales = None if shape is None else x.new_empty(shape, dtype=torch.float32)
        given = {"x": x, "residual": residual, "total": total, "y": y, "scales": scales}
        for first in range(0, len(x), MAX_ROWS):
            end, part = first + MAX_ROWS, given
            if len(x) > MAX_ROWS:
                part = {name: None if value is None else value[first:end] for name, value in given.items()}
            rows = min(len(x) - first, MAX_ROWS)
            grid = min(rows, self.group.waiting_blocks)
            launch = self._bound(rows > self.one_shot_rows, quantisation, grid, 1 if rows <= grid or batch_invariant else MOST_TEAMS)
            launch(**part, weight=weight, scale=scale, rows=rows, epsilon=epsilon, weight_offset=weight_offset)
        return y, total, scales

    def close(self) -> None:
        """Give the memory back, once no rank's calls use it."""
        self.reserved.close()

    def _bind(self, two_shot: bool, quantisation: Quantisation, grid: int, teams: int) -> BoundKernel:
        threads = threads_of(self._packets, teams, self.group.max_threads)
        return self.reserved.bind(
            grid=grid,
            block=threads,
            resident=True,
            defines={
                "X_TYPE": element_type(self.dtype),
                "THREADS": threads,
                "TEAMS": teams,
                "PACKETS": -(-self._packets * teams // threads),
                "TWO_SHOT": int(two_shot),
                "QUANTISATION": ("none", "tensor", "token", "block").index(quantisation),
            },
            columns=self.columns,
            one_shot_rows=self.one_shot_rows,
            most_rows=self._most_rows,
        )

    def _check(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, quantisation: Quantisation, scale: torch.Tensor | None
    ) -> None:
        shape = x.shape[0] if x.dim() == 2 else -1, self.columns
        given = [x, weight, *([] if residual is None else [residual])]
        wanted = [shape, (self.columns,), shape]
        if shape[0] < 0 or any(tuple(value.shape) != size or value.dtype != self.dtype for value, size in zip(given, wanted, strict=False)):
            raise UsageError(
                f"all-reduce and RMSNorm got x, weight and residual of {[tuple(value.shape) for value in given]} in "
                f"{[value.dtype for value in given]}: expected (tokens, {self.columns}), ({self.columns},), (tokens, {self.columns}), in "
                f"{self.dtype}"
            )
        if quantisation == "block" and not serves_blocks(self.columns):
            raise UsageError(
                f"quantisation by block of {self.columns} columns: expected a multiple of {BLOCK_COLUMNS}, at most {MOST_BLOCK_COLUMNS}"
            )
        if (quantisation == "tensor") != (scale is not None) or (
            scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32)
        ):
            got = "no scale" if scale is None else f"a scale of {tuple(scale.shape)} in {scale.dtype}"
            raise UsageError(f"quantisation by {quantisation!r} got {got}: expected one float32 for 'tensor', and none otherwise")


all_reduce_rms_norm = per_group(AllReduceRmsNorm)
"""The group's one :class:`AllReduceRmsNorm` of this width; the first call is collective."""
