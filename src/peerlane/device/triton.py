"""The primitives that Triton can express, with the names and the order that ``peers.cuh`` gives them, on the same arena and flags.

    table = arena_table(arena)                                  int64 on the device; pass it as a pointer
    @triton.jit
    def kernel(table, flags, ...):
        barrier(table, flags, tl.program_id(0), number, WORLD_SIZE)

A team is a program. What Triton lacks is bulk copies that wait for more than their source: ``store_async``, ``store_add_async`` and
``load_async`` are for CUDA C++; here ordinary stores through :func:`peer_pointer` take their place. The functions hold PTX, which Triton's
interpreter can not run: these kernels compile anywhere, and run on GPUs.
"""

# Device functions have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import torch
import triton
import triton.language as tl

from peerlane.device.host.arena import Arena
from peerlane.device.host.group import MAX_RANKS

_RANK: tl.constexpr = tl.constexpr(MAX_RANKS)
_STOP: tl.constexpr = tl.constexpr(MAX_RANKS + 1)
_FAULT: tl.constexpr = tl.constexpr(MAX_RANKS + 2)


def arena_table(arena: Arena) -> torch.Tensor:
    """Returns base addresses of all ranks, own rank, addresses of the stop word and of the wait record."""
    view = arena.view
    arena.stay()
    return torch.tensor([*view.base, view.rank, view.stop, view.fault], dtype=torch.int64, device=arena.device)


@triton.jit
def own_rank(table):
    """Returns the caller's rank."""
    return tl.load(table + _RANK).to(tl.int32)


@triton.jit
def peer_pointer(table, peer, offset, dtype: tl.constexpr):
    """Returns the address at which ``offset`` bytes into rank ``peer``'s arena are mapped here, as a pointer to ``dtype``."""
    return (tl.load(table + peer) + offset).to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def _flag(table, flags, rank, slot, source, WORLD_SIZE: tl.constexpr):
    return tl.load(table + rank) + flags + (slot * WORLD_SIZE + source).to(tl.int64) * 128


@triton.jit
def _store_flag(address, number):
    # One thread, behind the barrier of the program: one release fence for all that the program's threads have done.
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first fence.proxy.async;
        @first fence.acq_rel.sys;
        @first st.relaxed.sys.global.u32 [$1], $2;
        mov.u32 $0, $2;
        }""",
        "=r,l,r",
        [address, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def signal(table, flags, peer, slot, number, WORLD_SIZE: tl.constexpr):
    """Signals ``number`` to rank ``peer``. What this program has stored and read before comes before what follows the matching wait there.
    Release, system scope."""
    tl.debug_barrier()
    _store_flag(_flag(table, flags, peer, slot, own_rank(table), WORLD_SIZE), number)


@triton.jit
def signal_all(table, flags, slot, number, WORLD_SIZE: tl.constexpr):
    """Signals every other rank."""
    tl.debug_barrier()
    rank = own_rank(table)
    for step in tl.static_range(1, WORLD_SIZE):
        _store_flag(_flag(table, flags, (rank + step) % WORLD_SIZE, slot, rank, WORLD_SIZE), number)


@triton.jit
def wait(table, flags, source, slot, number, WORLD_SIZE: tl.constexpr):
    """Waits until rank ``source`` has signalled ``number`` or later here. Acquire, system scope; ends at the arena's time limit, with a
    record, or when the group stops. Then nothing may have come: take no address from it."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 seen, gap, block, end, tries;
        .reg .u64 now, begin, limit;
        mov.u64 begin, %globaltimer;
        mov.u32 tries, 0;
        POLL:
        ld.relaxed.sys.global.u32 seen, [$1];
        sub.u32 gap, seen, $2;
        setp.ge.s32 p, gap, 0;
        @p bra DONE;
        add.u32 tries, tries, 1;
        and.b32 gap, tries, 1023;
        setp.ne.u32 p, gap, 0;
        @p bra POLL;
        mov.u32 end, 2;
        ld.relaxed.sys.global.u32 gap, [$3];
        setp.ne.u32 p, gap, 0;
        @p bra GIVE_UP;
        ld.relaxed.sys.global.u64 limit, [$4+32];
        mov.u64 now, %globaltimer;
        sub.u64 now, now, begin;
        setp.le.u64 p, now, limit;
        @p bra POLL;
        mov.u32 end, 1;
        GIVE_UP:
        mov.u32 block, %ctaid.x;
        st.relaxed.sys.global.u32 [$4+4], $5;
        st.relaxed.sys.global.u32 [$4+8], 0;
        st.relaxed.sys.global.u32 [$4+12], $6;
        st.relaxed.sys.global.u32 [$4+16], block;
        st.relaxed.sys.global.u32 [$4+20], $7;
        st.relaxed.sys.global.u32 [$4+24], $2;
        st.relaxed.sys.global.u32 [$4+28], seen;
        fence.acq_rel.sys;
        st.relaxed.sys.global.u32 [$4], end;
        fence.acq_rel.sys;
        st.relaxed.sys.global.u32 [$3], 1;
        ld.relaxed.sys.global.u32 gap, [$4+40];
        and.b32 gap, gap, end;
        setp.ne.u32 p, gap, 0;
        @p trap;
        DONE:
        fence.acq_rel.sys;
        fence.proxy.async;
        mov.u32 $0, seen;
        }""",
        "=r,l,r,l,l,r,r,r",
        [
            _flag(table, flags, own_rank(table), slot, source, WORLD_SIZE),
            number,
            tl.load(table + _STOP),
            tl.load(table + _FAULT),
            own_rank(table),
            source,
            slot,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def wait_all(table, flags, slot, number, WORLD_SIZE: tl.constexpr):
    """Waits until every other rank has signalled."""
    rank = own_rank(table)
    for step in tl.static_range(1, WORLD_SIZE):
        wait(table, flags, (rank + step) % WORLD_SIZE, slot, number, WORLD_SIZE)


@triton.jit
def barrier(table, flags, slot, number, WORLD_SIZE: tl.constexpr):
    """Waits until every rank's program has come to this slot: what each did before comes before what any does after."""
    signal_all(table, flags, slot, number, WORLD_SIZE)
    wait_all(table, flags, slot, number, WORLD_SIZE)


@triton.jit
def reduce(table, source, offsets, mask, dtype: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Elements ``offsets`` of the range at ``source`` of all ranks, summed in rank order, as fp32. Behind a wait for all."""
    total = tl.zeros(offsets.shape, tl.float32)
    for rank in tl.static_range(WORLD_SIZE):
        total += tl.load(peer_pointer(table, rank, source, dtype) + offsets, mask=mask, other=0).to(tl.float32)
    return total


@triton.jit
def all_reduce(table, range_at, offsets, mask, dtype: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """Sums elements ``offsets``, which are this rank's share, and stores the sum to all ranks. Between two barriers."""
    total = reduce(table, range_at, offsets, mask, dtype, WORLD_SIZE).to(dtype)
    for rank in tl.static_range(WORLD_SIZE):
        tl.store(peer_pointer(table, rank, range_at, dtype) + offsets, total, mask=mask)
