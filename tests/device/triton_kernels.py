"""Five kernels of several ranks in Triton, each with two broken twins: ``BROKEN`` 0 is right, 1 and 2 have one fault each."""

# Device functions have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import Any

import torch
import triton
import triton.language as tl

from peerlane.device import Arena, group_of
from peerlane.device import triton as kit
from peerlane.device.host.group import Group

BLOCK, WARPS = 64, 1


@triton.jit
def one_shot(table, x, inbox, flags, out, length, number, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    """Every rank publishes its numbers, and sums those of all."""
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    mine = kit.peer_pointer(table, kit.own_rank(table), inbox, tl.bfloat16)
    tl.store(mine + offsets, tl.load(x + offsets, mask=inside), mask=inside)
    if BROKEN != 1:  # the others' numbers may not be there
        kit.barrier(table, flags, block, number, WORLD_SIZE)
    total = kit.reduce(table, inbox, offsets, inside, tl.bfloat16, WORLD_SIZE)
    tl.store(out + offsets, total.to(tl.bfloat16), mask=inside)
    if BROKEN != 2:  # the next call may overwrite what the others read
        kit.barrier(table, flags, block, number + 1, WORLD_SIZE)


@triton.jit
def two_shot(table, x, inbox, flags, out, length, number, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    """Every rank sums its share, and gives the sum to all."""
    block = tl.program_id(0)
    offsets = block * BLOCK * WORLD_SIZE + tl.arange(0, BLOCK * WORLD_SIZE)
    mine = kit.peer_pointer(table, kit.own_rank(table), inbox, tl.bfloat16)
    tl.store(mine + offsets, tl.load(x + offsets, mask=offsets < length, other=0), mask=offsets < length)
    kit.barrier(table, flags, block, number, WORLD_SIZE)
    share = (block * WORLD_SIZE + kit.own_rank(table)) * BLOCK + tl.arange(0, BLOCK)
    kit.all_reduce(table, inbox, share, share < length, tl.bfloat16, WORLD_SIZE)
    if BROKEN == 1:  # the epoch of the barrier before: nobody waits
        kit.barrier(table, flags, block, number, WORLD_SIZE)
    elif BROKEN != 2:  # without it the others' shares may be missing
        kit.barrier(table, flags, block, number + 1, WORLD_SIZE)
    tl.store(out + offsets, tl.load(mine + offsets, mask=offsets < length), mask=offsets < length)
    kit.barrier(table, flags, block, number + 2, WORLD_SIZE)


@triton.jit
def gather_gemm(
    table, x, inbox, flags, w, out, number,
    WORLD_SIZE: tl.constexpr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BROKEN: tl.constexpr,
):  # fmt: skip
    """Every rank pushes its rows to all, and multiplies those of each rank when they are there."""
    rank = kit.own_rank(table)
    rows, cols, ks = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    mine = tl.load(x + rows * K + ks[None, :])
    for step in tl.static_range(WORLD_SIZE):
        peer = (rank + step) % WORLD_SIZE
        if BROKEN == 1:  # before the rows
            kit.signal(table, flags, peer, 0, number, WORLD_SIZE)
        tl.store(kit.peer_pointer(table, peer, inbox, tl.float16) + (rank * M + rows) * K + ks[None, :], mine)
        if BROKEN != 1:
            kit.signal(table, flags, peer, 0, number, WORLD_SIZE)
    own = kit.peer_pointer(table, rank, inbox, tl.float16)
    weight = tl.load(w + ks[:, None] * N + cols)
    for step in tl.static_range(WORLD_SIZE):
        source = (rank + step) % WORLD_SIZE
        kit.wait(table, flags, rank if BROKEN == 2 else source, 0, number, WORLD_SIZE)  # broken: for itself
        a = tl.load(own + (source * M + rows) * K + ks[None, :])
        tl.store(out + (source * M + rows) * N + cols, tl.dot(a, weight).to(tl.float16))
    kit.barrier(table, flags, 1, number, WORLD_SIZE)


@triton.jit
def moe_push(
    table, x, experts, inbox, counts, flags, out, tokens, number, WORLD_SIZE: tl.constexpr, H: tl.constexpr, BROKEN: tl.constexpr
):  # fmt: skip
    """Every rank pushes its tokens to the ranks of their experts, which sum them. Slots are reserved by a counter there."""
    rank, columns = kit.own_rank(table), tl.arange(0, H)
    if tl.program_id(0) == 0:
        for token in range(tokens):
            peer = tl.load(experts + token)
            counter = kit.peer_pointer(table, peer, counts, tl.int32)
            if BROKEN == 1:  # no scope in which ranks meet
                slot = tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
            else:
                slot = tl.atomic_add(counter, 1, sem="relaxed", scope="sys")
            tl.store(kit.peer_pointer(table, peer, inbox, tl.float32) + slot * H + columns, tl.load(x + token * H + columns))
    if BROKEN == 2:  # nobody waits
        kit.signal_all(table, flags, tl.program_id(0), number, WORLD_SIZE)
    else:
        kit.barrier(table, flags, tl.program_id(0), number, WORLD_SIZE)
    counter = kit.peer_pointer(table, rank, counts, tl.int32)
    total = tl.zeros((H,), tl.float32)
    for slot in range(tl.load(counter)):
        total += tl.load(kit.peer_pointer(table, rank, inbox, tl.float32) + slot * H + columns)
    tl.store(out + columns, total)
    tl.debug_barrier()
    tl.store(counter, 0)
    kit.barrier(table, flags, tl.program_id(0), number + 1, WORLD_SIZE)


@triton.jit
def ring_sum(table, x, inbox, flags, out, number, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, BROKEN: tl.constexpr):
    """Numbers go around the ring, one rank a step; every rank adds what comes along. Steps take turns with two buffers."""
    rank, offsets = kit.own_rank(table), tl.arange(0, BLOCK)
    after, before = (rank + 1) % WORLD_SIZE, (rank + WORLD_SIZE - 1) % WORLD_SIZE
    passed = tl.load(x + offsets)
    total = passed
    for step in range(WORLD_SIZE - 1):
        buffer = 0 if BROKEN == 1 else step % 2 * BLOCK  # broken: the buffer that the rank behind may still read
        tl.store(kit.peer_pointer(table, after, inbox, tl.float32) + buffer + offsets, passed)
        kit.signal(table, flags, after, 0, number + step, WORLD_SIZE)
        kit.wait(table, flags, before, 0, number + step - (1 if BROKEN == 2 else 0), WORLD_SIZE)  # broken: for the step before
        passed = tl.load(kit.peer_pointer(table, rank, inbox, tl.float32) + buffer + offsets)
        total += passed
        if BROKEN != 1:
            kit.signal(table, flags, before, 1, number + step, WORLD_SIZE)  # the buffer of this step is free
            kit.wait(table, flags, after, 1, number + step, WORLD_SIZE)
    tl.store(out + offsets, total)
    kit.barrier(table, flags, 2, number + WORLD_SIZE, WORLD_SIZE)


class Launcher:
    """Memory of one rank for a kernel, kept from call to call."""

    def __init__(self, group: Group, inbox: int, blocks: int = 1) -> None:
        arena = Arena(1 << 16, group)
        self.inbox, self.counts = arena.take(inbox), arena.take(128)
        self.flags = arena.take(max(blocks, 3) * group.world_size * 128)
        self.table, self.size, self.number = kit.arena_table(arena), group.world_size, 1

    def next(self) -> int:
        """Returns the first of sixteen fresh epochs."""
        self.number += 16
        return self.number


def solution(name: str, broken: int) -> Any:
    """Returns a function of one rank that calls the kernel ``name`` on its inputs."""
    kept: list[Launcher] = []

    def launcher(inbox: int, blocks: int = 1) -> Launcher:
        if not kept:
            kept.append(Launcher(group_of(), inbox, blocks))
        return kept[0]

    def sums(x: torch.Tensor) -> torch.Tensor:
        kernel, width = (one_shot, BLOCK) if name == "one_shot" else (two_shot, BLOCK * group_of().world_size)
        blocks = triton.cdiv(x.numel(), width)
        own, out = launcher(2 * x.numel(), blocks), torch.zeros_like(x)
        kernel[(blocks,)](own.table, x, own.inbox, own.flags, out, x.numel(), own.next(), own.size, BLOCK, broken, num_warps=WARPS)
        return out

    def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        own = launcher(2 * x.numel() * group_of().world_size)
        out = torch.zeros(own.size * x.shape[0], w.shape[1], dtype=x.dtype)
        gather_gemm[(1,)](own.table, x, own.inbox, own.flags, w, out, own.next(), own.size, *x.shape, w.shape[1], broken, num_warps=WARPS)
        return out

    def pushed(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        own, out = launcher(4 * x.numel() * group_of().world_size), torch.zeros(x.shape[1])
        moe_push[(1,)](
            own.table, x, experts, own.inbox, own.counts, own.flags, out, len(x), own.next(), own.size, x.shape[1], broken, num_warps=WARPS
        )
        return out

    def ring(x: torch.Tensor) -> torch.Tensor:
        own, out = launcher(8 * x.numel()), torch.zeros_like(x)
        ring_sum[(1,)](own.table, x, own.inbox, own.flags, out, own.next(), own.size, x.numel(), broken, num_warps=WARPS)
        return out

    return {"one_shot": sums, "two_shot": sums, "gather_gemm": products, "moe_push": pushed, "ring_sum": ring}[name]


def inputs(name: str, ranks: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns small whole numbers for each rank, whose sums and products are exact."""
    made: list[tuple[torch.Tensor, ...]] = []
    for rank in range(ranks):
        draw = torch.Generator().manual_seed(rank)
        numbers = torch.randint(-3, 4, (16, 32), generator=draw).float()
        made.append(
            {
                "one_shot": (numbers.flatten()[:100].bfloat16(),),
                "two_shot": (numbers.flatten()[:200].bfloat16(),),
                "gather_gemm": (numbers[:, :16].half().contiguous(), torch.randint(-3, 4, (16, 32), generator=draw).half()),
                "moe_push": (numbers[:6], torch.randint(0, ranks, (6,), generator=draw, dtype=torch.int32)),
                "ring_sum": (numbers.flatten()[:64].contiguous(),),
            }[name]
        )
    return made


def expected(name: str, given: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Returns what each rank's kernel has to give."""
    first = torch.stack([arguments[0] for arguments in given])
    if name == "gather_gemm":
        return [(first.flatten(0, 1).float() @ w.float()).half() for _, w in given]
    if name == "moe_push":
        experts = torch.cat([arguments[1] for arguments in given])
        return [first.flatten(0, 1)[experts == rank].sum(0) for rank in range(len(given))]
    return [first.sum(0)] * len(given)
