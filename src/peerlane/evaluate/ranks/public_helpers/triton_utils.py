"""``utils.triton_utils``: thread numbers, and signals between ranks on the signal pads of torch's symmetric memory.

A signal is a 32-bit word in a pad: it is sent by changing 0 to 1, and received by changing 1 to 0. Both wait, for 20 seconds at most; then
the kernel traps. The functions hold PTX, which Triton's interpreter cannot run.
"""

# Device functions have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"

import triton
import triton.language as tl


@triton.jit
def get_tid():
    """The thread's number within its block, as (x, y, z). It differs between the threads of a program."""
    asm: tl.constexpr = "mov.u32 $0, %tid.x; mov.u32 $1, %tid.y; mov.u32 $2, %tid.z;"
    return tl.inline_asm_elementwise(asm, "=r,=r,=r", [], dtype=(tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def get_ntid():
    """The block's threads, as (x, y, z)."""
    asm: tl.constexpr = "mov.u32 $0, %ntid.x; mov.u32 $1, %ntid.y; mov.u32 $2, %ntid.z;"
    return tl.inline_asm_elementwise(asm, "=r,=r,=r", [], dtype=(tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1)


@triton.jit
def get_flat_tid():
    """The thread's number within its block, x fastest."""
    x, y, z = get_tid()
    columns, rows, _ = get_ntid()
    return x + columns * (y + rows * z)


@triton.jit
def get_flat_bid():
    """The program's number within its grid, x fastest."""
    return tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))


@triton.jit
def sync_threads():
    """A barrier of the program's threads."""
    tl.debug_barrier()


_EXCHANGE = """{
    .reg .pred p;
    .reg .u32 seen;
    .reg .u64 now, end;
    mov.u64 end, %globaltimer;
    add.u64 end, end, 20000000000;
    AGAIN:
    atom.global.ORDER.sys.cas.b32 seen, [$1], $2, $3;
    setp.eq.u32 p, seen, $2;
    @p bra DONE;
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra AGAIN;
    trap;
    DONE:
    mov.u32 $0, seen;
}"""
# Whatever other order is asked for, acquire and release together give it.
_RELAXED, _ORDERED = tl.constexpr(_EXCHANGE.replace("ORDER", "relaxed")), tl.constexpr(_EXCHANGE.replace("ORDER", "acq_rel"))


@triton.jit
def _exchange_word(address, expected, new, sem: tl.constexpr):
    asm: tl.constexpr = _RELAXED if sem == "relaxed" else _ORDERED
    tl.inline_asm_elementwise(asm, "=r,l,r,r", [address, expected, new], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def send_signal(addrs, sem: tl.constexpr):
    """Sets the words at ``addrs``, each when the signal before it has been received. ``sem``: ``relaxed``, ``release`` or ``acq_rel``."""
    _exchange_word(addrs, 0, 1, sem)


@triton.jit
def wait_signal(addrs, sem: tl.constexpr):
    """Receives the signals at ``addrs``. ``sem``: ``relaxed``, ``acquire`` or ``acq_rel``."""
    _exchange_word(addrs, 1, 0, sem)


@triton.jit
def blockwise_barrier(signal_pad_ptrs, block_id, rank, world_size: tl.constexpr, sem: tl.constexpr):
    """A barrier of the blocks that have this ``block_id`` on all ranks; None: the block's number in its grid.

    ``signal_pad_ptrs``: the device's table of the ranks' pads, ``signal_pad_ptrs_dev`` of a symmetric memory handle. A pad holds a word for
    every block and sender, block-major. ``world_size`` is a power of two.
    """
    if block_id is None:
        block_id = get_flat_bid()
    peers = tl.arange(0, world_size)
    pads = signal_pad_ptrs.to(tl.pointer_type(tl.uint64))
    theirs = tl.load(pads + peers).to(tl.pointer_type(tl.uint32))
    own = tl.load(pads + rank).to(tl.pointer_type(tl.uint32))
    sync_threads()
    if get_flat_tid() < world_size:  # each of these threads has one peer
        send_signal(theirs + block_id * world_size + rank, sem)
        wait_signal(own + block_id * world_size + peers, sem)
    sync_threads()
