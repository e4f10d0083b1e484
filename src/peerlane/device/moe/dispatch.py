"""Host side of ``peerlane/dispatch.cuh``: tokens to the ranks of their experts, and sums of rows home, in one launch each way.

    exchange = token_exchange(group, sizes)                                the first call for a size is collective
    received = exchange.dispatch(x, topk_idx, topk_weights, routing)       received.x (capacity, H), by expert
    y = exchange.combine(rows, received.sources, topk_idx, routing)        (tokens, H): of each token the sum of its rows

No count leaves the device: launches have one shape whatever the routes are, so they can be captured in a graph.

Dispatch. Bound: bytes that a rank takes in, H elements for each pair of a token and a rank that has experts of it, over the port's rate.
What limits it: below some hundred tokens the numbering, one meeting of all ranks and two trips over the link, for a row's route and for
the row; above that loads in flight, 4 KiB for each of 16 warps of an SM. Registers: 64 a thread, in blocks of 512. Device lines: 200.
Arena: 2 T (H elements + 8 k) bytes of T tokens.

Combine. Bound: the same bytes, out instead of in, and k H elements for each token from memory. What limits it: below some hundred tokens
two trips over the link; above that loads in flight, 1 KiB for each warp. Registers: 64 a thread, in blocks of 512. Device lines: 90.
Arena: W T H elements.

No speed of either has been measured yet.
"""

from __future__ import annotations

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
_DEFAULT_SMS = 32

DISPATCH = r"""
#include <peerlane/dispatch.cuh>
using namespace peerlane;

extern "C" __global__ void __launch_bounds__(512)
    token_dispatch(const __grid_constant__ Arena arena, const __grid_constant__ TokenDispatch args) {
    __shared__ ReceivedRows<WORLD_SIZE> received;
    Dispatch<WORLD_SIZE, TokenDispatch>(args, arena).run<ROUTED>(received);
}
"""
TOKEN_DISPATCH = DeclaredKernel(
    "token_dispatch", DISPATCH, x=Pointer("const char*"), topk_idx=Pointer("const long long*"), topk_weights=Pointer("const float*"),
    recv_x=Pointer(), recv_weights=Pointer("float*"), sources=Pointer("u32*"), ends=Pointer("int*"), dropped=Pointer("int*"),
    rows=Buffer(), routes=Buffer(), weights=Buffer(), counts=Buffer(), flags=Flags(), epochs=Epochs(),
    **dict.fromkeys(("tokens", "most", "room", "k", "own", "row_bytes", "stride", "capacity", "alignment"), U32),
)  # fmt: skip

COMBINE = r"""
#include <peerlane/dispatch.cuh>
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
    """What a rank receives."""

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


class TokenExchange:
    """Memory and launches of dispatch and combine for up to ``room`` tokens of a rank, ``k`` slots, and rows of ``row_bytes``.

    Creating one is collective. Calls in one stream, of any sizes, need no barrier between them and can be captured in a graph."""

    def __init__(self, group: Group, room: int, k: int, own: int, row_bytes: int) -> None:
        experts = group.world_size * own
        if not 1 <= experts <= MAX_EXPERTS or not 1 <= k <= MAX_SLOTS or row_bytes % 16 or not row_bytes or room > MAX_TOKENS + 1:
            raise UsageError(
                f"dispatch of {room} tokens of {row_bytes} bytes with {k} slots to {experts} experts: expected at most {MAX_TOKENS} "
                f"tokens, a multiple of 16 bytes, 1 to {MAX_SLOTS} slots, 1 to {MAX_EXPERTS} experts of all ranks"
            )
        self.group, self.room, self.k, self.own, self.row_bytes = group, room, k, own, row_bytes
        slots, most_blocks = 4 * room * k, group.waiting_blocks
        self._dispatch = TOKEN_DISPATCH.reserve(
            group,
            sizes={
                "rows": 2 * room * row_bytes, "routes": 2 * slots, "weights": 2 * slots,
                "counts": 8 * group.world_size * (own + 1), "flags": most_blocks,
            },
        )  # fmt: skip
        home = {"home": group.world_size * room * row_bytes, "home_scalars": slots, "flags": 1 + most_blocks}
        self._combine = TOKEN_COMBINE.reserve(group, sizes=home)
        self._bind_dispatch, self._bind_combine = functools.cache(self._dispatch_launch), functools.cache(self._combine_launch)

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, routing: Routing) -> Received:
        """Sends x (tokens, H) to the experts of topk_idx (tokens, k), int64, with topk_weights (tokens, k), float32."""
        sources = torch.empty((self.group.world_size, routing.num_max_tokens, self.k), dtype=torch.int32, device=x.device)
        ends, dropped = sources.new_empty(self.own), sources.new_empty(1)
        recv_x = x.new_empty((routing.capacity, x.shape[1]))
        recv_weights = None if topk_weights is None else topk_weights.new_empty(routing.capacity)
        routes = {"topk_idx": topk_idx, "topk_weights": topk_weights, "recv_weights": recv_weights, "ends": ends, "dropped": dropped}
        self._bind_dispatch(True, self._blocks(routing))(
            x=_vectors(x), recv_x=recv_x, sources=sources, **routes, tokens=x.shape[0],
            most=routing.num_max_tokens, capacity=routing.capacity, alignment=routing.alignment,
        )  # fmt: skip
        return Received(recv_x, recv_weights, ends, dropped, sources)

    def dispatch_again(self, x: torch.Tensor, sources: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Returns the rows (capacity, H) of x (tokens, H), of as many tokens, where another dispatch has put its rows. No other row is
        written."""
        recv_x = x.new_empty((routing.capacity, x.shape[1]))
        self._bind_dispatch(False, self._blocks(routing))(
            x=_vectors(x), recv_x=recv_x, sources=sources, tokens=x.shape[0], most=routing.num_max_tokens, capacity=routing.capacity
        )
        return recv_x

    def combine(
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
        self._bind_combine(x.dtype, self._blocks(routing))(
            x=x, weights=weights, scalars=scalars, sources=sources, topk_idx=topk_idx, y=y, slot_scalars=slot_scalars,
            tokens=topk_idx.shape[0], most=routing.num_max_tokens, columns=x.shape[1],
        )  # fmt: skip
        return y, slot_scalars

    def _blocks(self, routing: Routing) -> int:
        return min(routing.num_sms or _DEFAULT_SMS, self.group.waiting_blocks)

    def _common(self, grid: int) -> dict[str, int]:
        return {"grid": grid, "block": min(MAX_THREADS, self.group.max_threads), "room": self.room, "k": self.k, "own": self.own}

    def _dispatch_launch(self, routed: bool, grid: int) -> BoundKernel:
        defines = {"ROUTED": "true" if routed else "false"}
        sizes = {"row_bytes": self.row_bytes, "stride": self.row_bytes}
        return self._dispatch.bind(**self._common(grid), **sizes, defines=defines, resident=True)

    def _combine_launch(self, dtype: torch.dtype, grid: int) -> BoundKernel:
        return self._combine.bind(**self._common(grid), defines={"ELEMENT": element_type(dtype)}, resident=True)


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """Returns x where vectors of 16 bytes can be read: itself, or a copy."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


@per_group
def _exchange(group: Group, room: int, k: int, own: int, row_bytes: int) -> TokenExchange:
    return TokenExchange(group, room, k, own, row_bytes)


def token_exchange(group: Group, num_max_tokens: int, k: int, own: int, row_bytes: int) -> TokenExchange:
    """Returns the group's exchange with room for so many tokens of a rank; the first call for each power of two of them is collective."""
    return with_room(_exchange, group, max(1, num_max_tokens), k, own, row_bytes)
