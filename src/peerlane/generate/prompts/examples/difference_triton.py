"""Every rank returns its tensor minus its left neighbour's: one Triton kernel that writes to the right and waits for the left."""

import os

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

BLOCK = 1024
_state = {}  # (number of elements, dtype) -> symmetric memory, its addresses by rank, epochs


@triton.jit
def wait_for(flag, number, LIMIT: tl.constexpr):
    """Returns when the flag has come to the number; gives up after LIMIT reads, so that a lost signal is a wrong result and not a hang."""
    reads = 0
    while (tl.atomic_add(flag, 0, sem="acquire", scope="sys") < number) & (reads < LIMIT):
        reads += 1


@triton.jit
def difference(x, out, epochs, data, pads, left, right, rank, count, programs, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    """data and pads hold every rank's addresses. Flag p: data has come from the left; flag programs + p: the right has read it."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1  # lives on the device, so a captured graph can be replayed
    own_data = tl.load(data + rank).to(tl.pointer_type(x.dtype.element_ty))
    right_data = tl.load(data + right).to(tl.pointer_type(x.dtype.element_ty))
    own_pad = tl.load(pads + rank).to(tl.pointer_type(tl.int32))
    left_pad = tl.load(pads + left).to(tl.pointer_type(tl.int32))
    right_pad = tl.load(pads + right).to(tl.pointer_type(tl.int32))

    wait_for(own_pad + programs + program, epoch - 1, LIMIT)  # the right neighbour has read what was sent before
    tl.debug_barrier()
    place = program * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(x + place, mask=place < count)
    tl.store(right_data + place, mine, mask=place < count)
    tl.debug_barrier()  # all threads have stored before one of them signals
    tl.atomic_xchg(right_pad + program, epoch, sem="release", scope="sys")
    wait_for(own_pad + program, epoch, LIMIT)
    tl.debug_barrier()
    theirs = tl.load(own_data + place, mask=place < count, cache_modifier=".cv")
    tl.store(out + place, mine - theirs, mask=place < count)
    tl.debug_barrier()
    tl.atomic_xchg(left_pad + programs + program, epoch, sem="release", scope="sys")
    tl.store(epochs + program, epoch)


def state_of(x, programs):
    key = (x.numel(), x.dtype)
    if key not in _state:
        data = symm_mem.empty(x.numel(), dtype=x.dtype, device=x.device)
        flags = symm_mem.empty(2 * programs, dtype=torch.int32, device=x.device).zero_()
        handles = [symm_mem.rendezvous(memory, dist.group.WORLD) for memory in (data, flags)]
        tables = [torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=x.device) for handle in handles]
        epochs = torch.zeros(programs, dtype=torch.int32, device=x.device)
        handles[1].barrier(channel=0)  # nobody signals before all flags are zero
        _state[key] = (data, flags, handles), tables, epochs
    return _state[key]


def solution(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = x.contiguous()
    programs = triton.cdiv(x.numel(), BLOCK)
    _, (data, pads), epochs = state_of(x, programs)
    out = torch.empty_like(x)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    difference[(programs,)](x, out, epochs, data, pads, left, right, rank, x.numel(), programs, BLOCK=BLOCK, LIMIT=10_000_000)
    return out
