"""Host code on torch's symmetric memory with a kernel in Triton: ``BROKEN`` 0 is right, each other number has one fault."""

# Device functions have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl


@triton.jit
def sum_of_all(buffers, out, length, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD_SIZE):
        peer = tl.load(buffers + rank).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(peer + offsets, mask=inside, other=0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def doubled(x, length, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Differs between ranks: each has a program of its own."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    tl.store(x + offsets, tl.load(x + offsets, mask=inside) * 2 + 0 * RANK, mask=inside)


def solution(broken: int, barrier: str = "handle") -> Any:
    """Returns a function of one rank that sums a tensor of all ranks, twice over. ``barrier``: what orders the ranks."""
    kept: list[Any] = []

    def meet(handle: Any, channel: int) -> None:
        if barrier == "handle":
            handle.barrier(channel=channel)
        elif barrier == "dist.barrier":
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1))

    def call(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(symm_mem.empty(x.numel(), dtype=x.dtype, device=x.device))
            kept.append(symm_mem.rendezvous(kept[0], dist.group.WORLD))
            kept.append(torch.tensor(kept[1].buffer_ptrs, dtype=torch.int64))
        buffer, handle, pointers = kept
        buffer.copy_(x)
        if broken != 1:  # the others may not have copied
            meet(handle, 0)
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 64),)
        sum_of_all[grid](pointers, out, x.numel(), dist.get_world_size(), 64, num_warps=1)
        if broken != 2:  # the next copy may come while others read
            meet(handle, 1)
        doubled[grid](out, out.numel(), dist.get_rank(), 64, num_warps=1)
        return out.mul_(0.5)

    return call


def outputs_by_turns(buffers: int) -> Any:
    """Returns a function of one rank that changes its neighbour's output, in as many buffers by turns; one is too few for one barrier."""
    handles: list[tuple[torch.Tensor, Any]] = []
    calls = iter(range(99))

    def call(x: torch.Tensor) -> torch.Tensor:
        while len(handles) < buffers:
            memory = symm_mem.empty(x.numel()).fill_(1.0)
            handles.append((memory, symm_mem.rendezvous(memory, dist.group.WORLD)))
            handles[-1][1].barrier(channel=0)
        memory, handle = handles[next(calls) % buffers]
        peer = handle.get_buffer((dist.get_rank() + 1) % dist.get_world_size(), (x.numel(),), torch.float32)
        doubled[(1,)](peer, x.numel(), 0, 64, num_warps=1)
        handle.barrier(channel=0)
        return memory

    return call


def different_launches(root: int, what: str) -> Any:
    """Returns a function of one rank in which ``root`` launches what others do not; the sum of all ranks' tensors on it."""

    @torch.inference_mode()
    def call(x: torch.Tensor) -> torch.Tensor:
        memory = symm_mem.empty(x.numel()).copy_(x)
        handle = symm_mem.rendezvous(memory, dist.group.WORLD)
        pointers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64)
        handle.barrier(channel=0)
        if dist.get_rank() == root:
            sum_of_all[(1,)](pointers, x, x.numel(), dist.get_world_size(), 64, num_warps=1)
        elif what == "race":
            doubled[(1,)](memory, x.numel(), 0, 64, num_warps=1)
        elif what == "deadlock":
            handle.wait_signal(root)
        if what != "deadlock":
            handle.barrier(channel=1)
        x.record_stream(torch.cuda.Stream())
        return x

    return call


def by_operators(what: str, broken: int) -> Any:
    """Returns a function of one rank in which operators of torch read or write the others' memory: of three ranks, the next one's and the
    one's behind. ``broken`` 1 lacks the barrier in front of what others read, 2 the one behind it."""
    kept: list[Any] = []

    def call(x: torch.Tensor) -> Any:
        rank, ranks, count = dist.get_rank(), dist.get_world_size(), x.numel()
        if not kept:
            memory = symm_mem.empty(2, ranks * count).zero_()
            kept.extend((memory, symm_mem.rendezvous(memory, dist.group.WORLD)))
        memory, handle = kept
        peers = [handle.get_buffer(peer, memory.shape, memory.dtype) for peer in range(ranks)]
        after, behind = peers[(rank + 1) % ranks], peers[(rank + 2) % ranks]
        own = slice(count * rank, count * (rank + 1))
        if what in ("copy_", "index_put_", "scatter_", "out="):  # every rank has columns of its own in each peer's memory
            for peer in (after, behind):
                columns = torch.arange(*own.indices(9**9)[:2] if broken != 3 else (1, count + 1))
                if what == "copy_":
                    peer[:, columns[0] : columns[-1] + 1].copy_(x)
                elif what == "index_put_":
                    peer[torch.tensor([[0], [1]]), columns] = x
                elif what == "scatter_":
                    peer.scatter_(1, columns.expand(2, -1), x.expand(2, -1))
                else:
                    torch.add(x, 1, out=peer[0, columns[0] : columns[-1] + 1])
            memory[:, own] = x
        else:
            memory[0].copy_(x.repeat(ranks))
        if broken != 1:
            handle.barrier(channel=0)
        if what == "cat":
            out = torch.cat([peer[0] for peer in peers])
        elif what == "replayed":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = torch.cat([peer[0] for peer in peers])
            graph.replay()
        elif what == "indexed":
            out = after[0, torch.tensor([0, 5])]
        elif what == "tolist":
            out = torch.tensor(behind[0].tolist())
        elif what == "beside":  # nobody writes this row, nor these shapes
            out = after[torch.tensor([1])].sum() + after.view(-1)[: after.shape[0]].numel() + torch.zeros_like(after).sum()
        else:
            out = memory.clone()
        if broken != 2:
            handle.barrier(channel=1)
        return out

    return call


def behind_one_byte(x: torch.Tensor) -> torch.Tensor:
    """Returns all ranks' bytes, which lie in memory of the others behind one more: read by an operator, and by a collective."""
    count, ranks = x.numel(), dist.get_world_size()
    memory = symm_mem.empty(1 + count, dtype=x.dtype)
    handle = symm_mem.rendezvous(memory, dist.group.WORLD)
    memory[1:] = x
    handle.barrier(channel=0)
    read = torch.cat([handle.get_buffer(peer, (1 + count,), x.dtype)[1:] for peer in range(ranks)])
    gathered = torch.empty_like(read)
    dist.all_gather_into_tensor(gathered, memory[1:])
    assert torch.equal(read, gathered)
    return read
