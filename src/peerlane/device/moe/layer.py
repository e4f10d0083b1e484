"""Host side of ``peerlane/moe/moe_layer.cuh``: the experts of a mixture on their ranks, in two launches."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from peerlane.device.collectives.communicator import communicator
from peerlane.device.host.declare import (
    U32,
    Address,
    BoundKernel,
    Buffer,
    DeclaredKernel,
    Epochs,
    Field,
    Flags,
    Map,
    Pointer,
    compile_ahead,
)
from peerlane.device.host.group import MAX_RANKS, Group, per_group
from peerlane.device.host.tensor_map import TensorMapSpec
from peerlane.device.host.tensor_maps import TensorMaps
from peerlane.device.host.waits import ENDED_AT
from peerlane.device.moe.exchange import room_for
from peerlane.device.moe.router import MOST_EXPERTS, route
from peerlane.device.products import gemm
from peerlane.device.products.gemm import ELEMENT_BYTES, PANEL, Tiling
from peerlane.errors import UsageError

UNIT_ROWS, PIECE_ROWS, MAX_GROUPS = 64, 8, 512  # of moe_layer.cuh
TILINGS = (Tiling(2, 256, 3), Tiling(2, 128, 5), Tiling(1, 128, 6))
"""They leave shared memory for the layout."""

_SOURCE = r"""
#include <peerlane/moe/moe_layer.cuh>
using namespace peerlane;
using Shape = SHAPE;

extern "C" __global__ void __launch_bounds__(Shape::roles.threads(), 1)
    NAME(const __grid_constant__ Arena arena, const __grid_constant__ STRUCT args) {
    __shared__ ExpertLayout<WORLD_SIZE> layout;
    run_roles(ROLES<Shape, WORLD_SIZE, STRUCT>(args, arena, layout));
}
"""
UP_SOURCE = _SOURCE.replace("NAME", "moe_up").replace("STRUCT", "MoeUp").replace("ROLES", "ExpertsUp")
DOWN_SOURCE = _SOURCE.replace("NAME", "moe_down").replace("STRUCT", "MoeDown").replace("ROLES", "ExpertsDown")
_SIZES: dict[str, Field] = dict.fromkeys(("tokens", "k", "h", "inner", "own", "share", "first"), U32)
MOE_UP = DeclaredKernel(
    "moe_up", UP_SOURCE, rows=Map(), gate=Map(), up=Map(), act=Map(), x=Pointer("const char*"), experts=Pointer("const long long*"),
    weights=Pointer("const char*"), gate_bias=Pointer("const char*"), up_bias=Pointer("const char*"), places=Pointer("u32*"),
    sums=Pointer("float*"), row_memory=Buffer(align=1024), table=Buffer(), list=Buffer(), flags=Flags(), epochs=Epochs(), **_SIZES,
)  # fmt: skip
MOE_DOWN = DeclaredKernel(
    "moe_down", DOWN_SOURCE, act=Map(), down=Map(), back=Map(MAX_RANKS), counts=Pointer("const u32*"), places=Pointer("const u32*"),
    sums=Pointer("const float*"), ended=Address("const u32*"), experts=Pointer("const long long*"), down_bias=Pointer("const char*"),
    y=Pointer(), home=Buffer(align=1024), flags=Flags(), epochs=Epochs(), **_SIZES,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertSizes:
    """A token's ``k`` experts, in groups of ``share`` with one set of weights; ``own`` groups on each rank, numbered over all ranks.
    Tokens are those of this rank at most, the rest is the same on all ranks."""

    tokens: int
    k: int
    h: int
    inner: int
    own: int
    share: int
    dtype: torch.dtype
    batch_invariant: bool = False
    """one tile shape for all numbers of tokens"""

    def check(self, world_size: int) -> None:
        """Raises UsageError unless there are kernels for these."""
        if self.dtype not in gemm.ELEMENT_TYPES or self.h % 8 or self.inner % 8 or world_size * self.own > MAX_GROUPS:
            raise UsageError(
                f"experts of {self.h} and {self.inner} features in {self.dtype}, {self.own} groups on each of {world_size} ranks: expected "
                f"multiples of 8 features, bfloat16 or float16, and at most {MAX_GROUPS} groups on all ranks"
            )


class ExpertLayer:
    """The experts of a layer: ``call(tokens, experts, weights, ...)`` gives for every token the weighted sum of what its experts' groups
    make of it.

    Creating one is collective. Calls in one stream need no barrier between them and can be captured in a graph. ``among_products``: a
    library's matrix products may run on some ranks while the layer waits on others. Where ranks share a GPU it leaves SMs to them."""

    def __init__(self, group: Group, sizes: ExpertSizes, timeout_s: float | None = None, *, among_products: bool = True) -> None:
        sizes.check(group.world_size)
        self.group, self.sizes, self.maps = group, sizes, TensorMaps(group)
        tokens: list[int] = group.exchange(sizes.tokens)
        h, inner, own, groups = sizes.h, sizes.inner, sizes.own, sizes.own * group.world_size
        most, at_rank = max(tokens), sum(tokens) * min(sizes.k, own)
        blocks = group.waiting_blocks if among_products else group.sm_count
        up, down = (gemm.choose_tiling(max(1, at_rank), n, k, blocks, tilings=TILINGS) for n, k in ((2 * inner, h), (h, inner)))
        if sizes.batch_invariant:
            up = down = TILINGS[1]
        tile_rows = max(up.rows, down.rows)
        up, down = (tiling if tiling.rows == tile_rows else TILINGS[1] for tiling in (up, down))  # tiles of rows are the same in both
        self.tilings = up, down
        self.rows = at_rank + UNIT_ROWS * groups + tile_rows * own  # of a rank at most: units and tiles are filled up
        home_units = most * min(sizes.k, groups) // UNIT_ROWS + groups
        same = {name: getattr(sizes, name) for name in _SIZES if name != "first"}
        common = {"timeout_s": timeout_s, "resident": True, **same}
        up_defines, down_defines = (tiling.defines(sizes.dtype, "k", "k") for tiling in (up, down))
        compile_ahead(group, ((MOE_UP, up_defines), (MOE_DOWN, down_defines)))
        self.up: BoundKernel = MOE_UP.bind(
            group, grid=blocks, block=up.threads, shared_bytes=up.shared_bytes, defines=up_defines,
            sizes={
                "row_memory": self.rows * h * ELEMENT_BYTES,
                "table": 2 * group.world_size * groups * 4,
                "list": 4 * max(1, most * sizes.k),
                "flags": 1 + 2 * blocks + self.rows // PIECE_ROWS,
            },
            **common,
        )  # fmt: skip
        self.down: BoundKernel = MOE_DOWN.bind(
            group, grid=blocks, block=down.threads, shared_bytes=down.shared_bytes, defines=down_defines,
            sizes={"home": home_units * UNIT_ROWS * h * ELEMENT_BYTES, "flags": home_units * -(-h // down.columns)},
            **common,
        )  # fmt: skip
        device = group.device
        self.act = torch.empty((self.rows, inner), dtype=sizes.dtype, device=device)
        self.places = torch.empty((sizes.tokens, sizes.k), dtype=torch.int32, device=device)
        self.sums = torch.empty((sizes.tokens, sizes.k), dtype=torch.float32, device=device)

        def matrix(address: int, rows: int, box_rows: int) -> TensorMapSpec:
            return TensorMapSpec(address, sizes.dtype, (1, rows, h), (rows * h, h, 1), (1, box_rows, PANEL))

        self.up.set(
            rows=matrix(self.up.addresses("row_memory")[group.rank], self.rows, up.block_rows),
            act=self.maps(self.act, (UNIT_ROWS, PANEL)),
            places=self.places,
            sums=self.sums,
        )
        self.down.set(
            act=self.maps(self.act, (down.block_rows, PANEL)),
            back=[matrix(address, home_units * UNIT_ROWS, UNIT_ROWS) for address in self.down.addresses("home")],
            counts=self.up.tensor("table", (2 * group.world_size * groups,), torch.int32),
            places=self.places,
            sums=self.sums,
            ended=self.up.arena.view.base[group.rank] + ENDED_AT,
        )

    def __call__(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        layers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
        first: int = 0,
    ) -> torch.Tensor:
        """Returns the tokens' outputs. tokens (T, H); experts (T, k), int64, different ones for a token; weights (T, k). ``layers`` are
        gate, up (own inner, H) and down (own H, inner) of this rank's groups one below the other, ``biases`` theirs. Everything but experts
        in one dtype. Experts of this rank's tokens are numbered from group ``first`` on."""
        sizes, (gate, up, down), (up_tiling, down_tiling) = self.sizes, layers, self.tilings
        count = tokens.shape[0]
        wanted = (sizes.own * sizes.inner, sizes.h), (sizes.own * sizes.inner, sizes.h), (sizes.own * sizes.h, sizes.inner)
        if count > sizes.tokens or tokens.shape[1] != sizes.h or tuple(tuple(layer.shape) for layer in layers) != wanted:
            raise UsageError(
                f"tokens {tuple(tokens.shape)} and layers {[tuple(layer.shape) for layer in layers]}: expected at most {sizes.tokens} "
                f"tokens of {sizes.h} and {list(wanted)}; create an ExpertLayer for each size"
            )
        y = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        half, gate_bias, up_bias, down_bias = (up_tiling.columns // 2, PANEL), *biases
        self.up(
            tokens=count, first=first,
            x=tokens.contiguous(), experts=experts.contiguous(), weights=weights.contiguous(), gate_bias=gate_bias, up_bias=up_bias,
            gate=self.maps(gemm.aligned(gate), half, sizes.own), up=self.maps(gemm.aligned(up), half, sizes.own),
        )  # fmt: skip
        self.down(
            tokens=count,
            first=first,
            down=self.maps(gemm.aligned(down), (down_tiling.columns, PANEL), sizes.own),
            down_bias=down_bias,
            experts=experts.contiguous(),
            y=y,
        )
        return y


@per_group
def expert_layer(group: Group, sizes: ExpertSizes, *, among_products: bool = True) -> ExpertLayer:
    """Returns the group's one :class:`ExpertLayer` of this kind; the first call is collective."""
    return ExpertLayer(group, sizes, among_products=among_products)


class Weights(NamedTuple):
    """A linear layer that is no module: weight (out, in), bias (out,)."""

    weight: torch.Tensor
    bias: torch.Tensor | None


Layer = torch.nn.Linear | Weights


def gated_experts(
    group: Group,
    tokens: torch.Tensor,
    router: tuple[torch.Tensor, torch.Tensor | None],
    layers: tuple[Layer, Layer, Layer],
    top_k: int,
    owners: range | None = None,
) -> torch.Tensor:
    """Computes a mixture whose experts on a rank are one function, down(silu(gate) * up), as problems 31, 32 and 49 to 51 have it.

    ``owners``: the ranks of the group that hold the experts of this rank's tokens, this one among them; all of them if None. float32 and
    sizes that are no multiples of 8 are exchanged by all-to-alls between products, and wait for the device."""
    owners = range(group.world_size) if owners is None else owners
    experts_of_all, (inner, h) = router[0].shape[0], layers[0].weight.shape
    share = experts_of_all // len(owners)
    if experts_of_all % len(owners):
        raise UsageError(f"got {experts_of_all} experts on {len(owners)} ranks: expected a multiple of the number of ranks")
    routes = group.world_size > 1 and experts_of_all <= MOST_EXPERTS and tokens.dtype in gemm.ELEMENT_TYPES
    if routes:
        weights, experts = route(group, tokens, *router, top_k)
    else:
        weights, experts = F.linear(tokens, *router).softmax(dim=-1).topk(top_k, dim=-1)
    gate, up, down = (layer.weight.detach() for layer in layers)
    gate_bias, up_bias, down_bias = (None if layer.bias is None else layer.bias.detach() for layer in layers)

    def expert(rows: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(rows, gate, gate_bias)) * F.linear(rows, up, up_bias), down, down_bias)

    if len(owners) == 1:
        return expert(tokens) * weights.sum(1, keepdim=True)
    if tokens.dtype in gemm.ELEMENT_TYPES and not h % 8 and not inner % 8:
        sizes = ExpertSizes(room_for(group, tokens.shape[0]), top_k, h, inner, 1, share, tokens.dtype)
        layer = expert_layer(group, sizes, among_products=not routes)  # no other product runs here
        return layer(tokens, experts, weights, (gate, up, down), (gate_bias, up_bias, down_bias), owners.start)
    sent_to = owners.start + experts.flatten() // share
    order = sent_to.argsort(stable=True)
    sent = torch.bincount(sent_to, minlength=group.world_size)
    received = torch.empty_like(sent)
    exchange = communicator(group).all_to_all_single
    exchange(received, sent)
    parts, arriving = sent.tolist(), received.tolist()
    rows = tokens[order // top_k]
    arrived, returned = tokens.new_empty((sum(arriving), h)), torch.empty_like(rows)
    exchange(arrived, rows, arriving, parts)
    exchange(returned, expert(arrived), parts, arriving)
    return torch.zeros_like(tokens).index_add_(0, order // top_k, returned * weights.flatten()[order].unsqueeze(1))
