"""Host side of ``peerlane/moe/dispatch.cuh``: tokens to the ranks of their experts, and sums of rows home, in one launch each way.

    send, add = token_dispatch(group, *sizes), token_combine(group, *sizes)    the first calls for a size are collective
    received = send(x, topk_idx, topk_weights, routing)                        received.x (capacity, H), by expert
    y = add(rows, received.sources, topk_idx, routing)                         (tokens, H): of each token the sum of its rows

No count leaves the device: launches have one shape whatever the routes are, so they can be captured in a graph.

Dispatch. Bound: bytes that a rank takes in, H elements for each pair of a token and a rank that has experts of it, over the port's rate.
What limits it: below some hundred tokens the numbering, one meeting of all ranks and two trips over the link, for a row's route and for
the row; above that loads in flight, 4 KiB for each of 16 warps of an SM. Registers: 64 a thread, in blocks of 512. Device lines: 210.
Arena: 2 T (H elements + 8 k) bytes of T tokens.

Combine. Bound: the same bytes, out instead of in, and k H elements for each token from memory. What limits it: below some hundred tokens
two trips over the link; above that loads in flight, 1 KiB for each warp. Registers: 64 a thread, in blocks of 512. Device lines: 130.
Arena: W T H elements.

No speed of either has been measured yet.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from peerlane.device.host.declare import U32, BoundKernel, Buffer, DeclaredKernel, Epochs, Flags, Pointer
from peerlane.device.host.element_types import element_type
from peerlane.device.host.group import Group, per_group
from peerlane.device.products.capacity import with_room
from peerlane.errors import UsageError

MAX_EXPERTS, MAX_SLOTS, MAX_TOKENS = 1023, 32, (1 << 22) - 1
"""Experts of all ranks, slots of a token, tokens of a rank; of dispatch.cuh."""
MAX_THREADS = 512  # of the sources
DTYPES = torch.bfloat16, torch.float16, torch.float32
FP8, SCALE_COLUMNS = torch.float8_e4m3fn, 128  # of dispatch.cuh
FP8_DTYPES = torch.bfloat16, torch.float16
"""The dtypes of tokens that may travel as fp8."""

DISPATCH = r"""
#include <peerlane/moe/dispatch.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    token_dispatch(const __grid_constant__ Arena arena, const __grid_constant__ TokenDispatch args) {
    __shared__ ReceivedRows<WORLD_SIZE> received;
    Dispatch<WORLD_SIZE, TokenDispatch, QUANTISED>(args, arena).run<ROUTED>(received);
}
"""
TOKEN_DISPATCH = DeclaredKernel(
    "token_dispatch", DISPATCH, x=Pointer("const char*"), topk_idx=Pointer("const long long*"), topk_weights=Pointer("const float*"),
    recv_x=Pointer(), **dict.fromkeys(("recv_weights", "recv_scales"), Pointer("float*")), sources=Pointer("u32*"),
    **dict.fromkeys(("ends", "dropped"), Pointer("int*")),
    rows=Buffer(), routes=Buffer(), weights=Buffer(), counts=Buffer(), flags=Flags(), epochs=Epochs(),
    **dict.fromkeys(("tokens", "most", "room", "k", "own", "row_bytes", "stride", "capacity", "alignment"), U32),
)  # fmt: skip

COMBINE = r"""
#include <peerlane/moe/dispatch.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    token_combine(const __grid_constant__ Arena arena, const __grid_constant__ TokenCombine args) {
    Combine<ELEMENT, WORLD_SIZE, TokenCombine>(args, arena).run();
}
"""
TOKEN_COMBINE = DeclaredKernel(
    "token_combine", COMBINE, x=Pointer("const char*"), weights=Pointer("const float*"), scalars=Pointer("const float*"),
    sources=Pointer("const u32*"), topk_idx=Pointer("const long long*"), y=Pointer(), slot_scalars=Pointer("float*"),
    home=Buffer(), home_scalars=Buffer(), flags=Flags(), epochs=Epochs(),
    **dict.fromkeys(("tokens", "most", "room", "k", "own", "columns"), U32),
)  # fmt: skip


@dataclass(frozen=True)
class Routing:
    """The sizes of a call, the same on all ranks."""

    num_local_experts: int
    num_max_tokens: int
    """tokens of any rank at most"""
    capacity: int
    """rows that a rank takes at most"""
    alignment: int = 1
    """rows of an expert begin at multiples of it"""
    num_sms: int = 0
    """blocks; 0: as many as are usual"""


class Received(NamedTuple):
    """Rows that a rank receives, and where they lie."""

    x: torch.Tensor
    """(capacity, H): rows by own expert, source and slot. Rows behind an expert's last are zero up to its end, and undefined behind the
    last expert's end."""
    weights: torch.Tensor | None
    """(capacity), float32: of each row its slot's weight"""
    ends: torch.Tensor
    """(own experts), int32: expert e has rows [ends[e - 1], ends[e])"""
    dropped: torch.Tensor
    """(1), int32: rows that were for this rank and above its capacity"""
    sources: torch.Tensor
    """(W, num_max_tokens, k), int32: the row of every rank's slots here, -1 for those of other ranks' experts, -2 for dropped ones"""
    scales: torch.Tensor | None = None
    """(capacity, H / 128), float32, of quantised rows: each 128 columns of x times theirs are the token's"""


class TokenDispatch:
    """Memory and launches of dispatch for up to ``room`` tokens of a rank, with ``k`` slots and rows of ``row_bytes``.

    Creating one is collective. Calls in one stream, of any sizes, need no barrier between them and can be captured in a graph."""

    def __init__(self, group: Group, room: int, k: int, own: int, row_bytes: int) -> None:
        _check(group, room, k, own, row_bytes)
        self.group, self.room, self.k, self.own, self.row_bytes = group, room, k, own, row_bytes
        slots = 2 * 4 * room * k
        sizes = {"rows": 2 * room * row_bytes, "routes": slots, "weights": slots, "counts": 2 * 4 * group.world_size * (own + 1)}
        self._reserved = TOKEN_DISPATCH.reserve(group, sizes={**sizes, "flags": group.waiting_blocks})
        self._bind = functools.cache(self._bound)

    def __call__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, routing: Routing, *, fp8: bool = False
    ) -> Received:
        """Sends x (tokens, H) to the experts of topk_idx (tokens, k), int64, with topk_weights (tokens, k), float32.

        ``fp8``: as float8_e4m3fn, by a scale for each 128 columns; x is bfloat16 or float16, H a multiple of 128."""
        sources = torch.empty((self.group.world_size, routing.num_max_tokens, self.k), dtype=torch.int32, device=x.device)
        ends, dropped = sources.new_empty(self.own), sources.new_empty(1)
        recv_x = x.new_empty((routing.capacity, x.shape[1]), dtype=FP8 if fp8 else x.dtype)
        recv_scales = ends.new_empty((routing.capacity, x.shape[1] // SCALE_COLUMNS), dtype=torch.float32) if fp8 else None
        recv_weights = None if topk_weights is None else topk_weights.new_empty(routing.capacity)
        routes = {"topk_idx": topk_idx, "topk_weights": topk_weights, "recv_weights": recv_weights, "ends": ends, "dropped": dropped}
        self._bind(True, _blocks(self.group, routing), x.dtype if fp8 else None)(
            x=_vectors(x), recv_x=recv_x, recv_scales=recv_scales, sources=sources, **routes, tokens=x.shape[0],
            most=routing.num_max_tokens, capacity=routing.capacity, alignment=routing.alignment,
        )  # fmt: skip
        return Received(recv_x, recv_weights, ends, dropped, sources, recv_scales)

    def again(self, x: torch.Tensor, sources: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Returns the rows (capacity, H) of x (tokens, H), of as many tokens, where another dispatch has put its rows. No other row is
        written."""
        recv_x = x.new_empty((routing.capacity, x.shape[1]))
        self._bind(False, _blocks(self.group, routing), None)(
            x=_vectors(x), recv_x=recv_x, sources=sources, tokens=x.shape[0], most=routing.num_max_tokens, capacity=routing.capacity
        )
        return recv_x

    def load(self) -> None:
        """Compiles what tokens that are not quantised need."""
        for routed in (True, False):
            self._bind(routed, self.group.waiting_blocks, None)

    def _bound(self, routed: bool, grid: int, quantised: torch.dtype | None) -> BoundKernel:
        """``quantised``: the dtype of tokens that travel as fp8."""
        defines = {"ROUTED": "true" if routed else "false", "QUANTISED": "AsTheyAre" if quantised is None else element_type(quantised)}
        return self._reserved.bind(
            grid=grid, block=min(MAX_THREADS, self.group.max_threads), defines=defines, resident=True, room=self.room, k=self.k,
            own=self.own, row_bytes=self.row_bytes // (1 if quantised is None else quantised.itemsize), stride=self.row_bytes,
        )  # fmt: skip


class TokenCombine:
    """Memory and launches of combine, as those of :class:`TokenDispatch`."""

    def __init__(self, group: Group, room: int, k: int, own: int, row_bytes: int) -> None:
        _check(group, room, k, own, row_bytes)
        self.group, self.room, self.k, self.own = group, room, k, own
        sizes = {"home": group.world_size * room * row_bytes, "home_scalars": 4 * room * k, "flags": 1 + group.waiting_blocks}
        self._reserved = TOKEN_COMBINE.reserve(group, sizes=sizes)
        self._bind = functools.cache(self._bound)

    def __call__(
        self,
        x: torch.Tensor,
        sources: torch.Tensor,
        topk_idx: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor | None = None,
        scalars: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns of each token the sum of its rows of x (capacity, H), each times its weight, and its slots' scalars (tokens, k).

        ``weights`` and ``scalars``: (capacity), float32. A rank's rows of a token are added in fp32 and rounded once, and so are all ranks'
        sums, in rank order. Dropped rows and their scalars are zero."""
        y = x.new_empty((topk_idx.shape[0], x.shape[1]))
        slot_scalars = None if scalars is None else scalars.new_empty(tuple(topk_idx.shape))
        self._bind(x.dtype, _blocks(self.group, routing))(
            x=x, weights=weights, scalars=scalars, sources=sources, topk_idx=topk_idx, y=y, slot_scalars=slot_scalars,
            tokens=topk_idx.shape[0], most=routing.num_max_tokens, columns=x.shape[1],
        )  # fmt: skip
        return y, slot_scalars

    def load(self, dtype: torch.dtype) -> None:
        """Compiles what rows of this dtype need."""
        self._bind(dtype, self.group.waiting_blocks)

    def _bound(self, dtype: torch.dtype, grid: int) -> BoundKernel:
        return self._reserved.bind(
            grid=grid, block=min(MAX_THREADS, self.group.max_threads), defines={"ELEMENT": element_type(dtype)}, resident=True,
            room=self.room, k=self.k, own=self.own,
        )  # fmt: skip


def _check(group: Group, room: int, k: int, own: int, row_bytes: int) -> None:
    """Raises UsageError for sizes without a kernel."""
    experts = group.world_size * own
    if not 1 <= experts <= MAX_EXPERTS or not 1 <= k <= MAX_SLOTS or row_bytes % 16 or not row_bytes or room > MAX_TOKENS + 1:
        raise UsageError(
            f"dispatch of {room} tokens of {row_bytes} bytes with {k} slots to {experts} experts: expected at most {MAX_TOKENS} tokens, a "
            f"multiple of 16 bytes, 1 to {MAX_SLOTS} slots, 1 to {MAX_EXPERTS} experts of all ranks"
        )


def _blocks(group: Group, routing: Routing) -> int:
    return min(routing.num_sms or group.waiting_blocks, group.waiting_blocks)


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """Returns x where vectors of 16 bytes can be read: itself, or a copy."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


_of_dispatch, _of_combine = per_group(TokenDispatch), per_group(TokenCombine)


def token_dispatch(group: Group, num_max_tokens: int, k: int, own: int, row_bytes: int) -> TokenDispatch:
    """Returns the group's dispatch with room for so many tokens of a rank; the first call for each power of two of them is collective."""
    return with_room(_of_dispatch, group, max(1, num_max_tokens), k, own, row_bytes)


def token_combine(group: Group, num_max_tokens: int, k: int, own: int, row_bytes: int) -> TokenCombine:
    """Returns the combine with the arguments of :func:`token_dispatch`."""
    return with_room(_of_combine, group, max(1, num_max_tokens), k, own, row_bytes)
