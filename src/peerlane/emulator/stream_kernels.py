"""Kernels in the place of what a stream does without one of the candidate's: signals, waits for words, copies and memsets."""

from peerlane.emulator.ptx_front_end import Ptx

BARRIER, WRITE, WAIT = "symmetric_memory_barrier", "symmetric_memory_write", "stream_wait_value"
# As torch's kernel: thread t signals rank t by changing 0 to 1 in its pad, and takes rank t's signal by changing 1 to 0 in its own.
# A write of no count comes behind a fence, as cuStreamWriteValue32 promises; with a count it is a memset.
# The wait is that of cuStreamWaitValue32: until the word is greater or equal, equal, has a bit of the value, or lacks one of both.
SIGNALS = Ptx(
    f"""
.version 8.0
.target sm_90
.address_size 64
.file 1 "a barrier of symmetric memory, or words of a stream"
.visible .entry {BARRIER}(
    .param .u64 pads, .param .u32 first, .param .u32 rank, .param .u32 ranks, .param .u32 target, .param .u32 source)
{{
    .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    .loc 1 1 0
    ld.param.b64 %rd1, [pads];
    ld.param.b32 %r1, [first];
    ld.param.b32 %r2, [rank];
    ld.param.b32 %r3, [ranks];
    mov.u32 %r4, %tid.x;
    setp.ge.u32 %p1, %r4, %r3;
    @%p1 bra DONE;
    setp.eq.u32 %p1, %r4, %r2;
    @%p1 bra DONE;
    ld.param.b32 %r5, [target];
    setp.ne.u32 %p1, %r5, %r4;
    setp.ne.and.u32 %p1, %r5, -1, %p1;
    @%p1 bra PUT_DONE;
    mul.wide.u32 %rd2, %r4, 8;
    add.s64 %rd2, %rd1, %rd2;
    ld.global.b64 %rd3, [%rd2];
    add.s32 %r6, %r1, %r2;
    mul.wide.u32 %rd4, %r6, 4;
    add.s64 %rd3, %rd3, %rd4;
PUT:
    atom.release.sys.global.cas.b32 %r7, [%rd3], 0, 1;
    setp.ne.u32 %p1, %r7, 0;
    @%p1 bra PUT;
PUT_DONE:
    ld.param.b32 %r5, [source];
    setp.ne.u32 %p1, %r5, %r4;
    setp.ne.and.u32 %p1, %r5, -1, %p1;
    @%p1 bra DONE;
    mul.wide.u32 %rd5, %r2, 8;
    add.s64 %rd5, %rd1, %rd5;
    ld.global.b64 %rd6, [%rd5];
    add.s32 %r6, %r1, %r4;
    mul.wide.u32 %rd7, %r6, 4;
    add.s64 %rd6, %rd6, %rd7;
WAIT:
    atom.acquire.sys.global.cas.b32 %r8, [%rd6], 1, 0;
    setp.ne.u32 %p1, %r8, 1;
    @%p1 bra WAIT;
DONE:
    ret;
}}
.visible .entry {WRITE}(.param .u64 at, .param .u32 value, .param .u32 count)
{{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<2>;
    .loc 1 2 0
    ld.param.b64 %rd1, [at];
    ld.param.b32 %r1, [value];
    ld.param.b32 %r2, [count];
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra NEXT;
    fence.acq_rel.sys;
    st.relaxed.sys.global.b32 [%rd1], %r1;
    ret;
NEXT:
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra WRITTEN;
    st.global.b32 [%rd1], %r1;
    add.s64 %rd1, %rd1, 4;
    sub.s32 %r2, %r2, 1;
    bra NEXT;
WRITTEN:
    ret;
}}
.visible .entry {WAIT}(.param .u64 at, .param .u32 value, .param .u32 condition)
{{
    .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<2>;
    .loc 1 3 0
    ld.param.b64 %rd1, [at];
    ld.param.b32 %r1, [value];
    ld.param.b32 %r2, [condition];
NEXT:
    ld.acquire.sys.global.b32 %r3, [%rd1];
    sub.s32 %r4, %r3, %r1;
    and.b32 %r5, %r3, %r1;
    or.b32 %r6, %r3, %r1;
    not.b32 %r7, %r6;
    setp.ge.s32 %p1, %r4, 0;
    setp.eq.and.u32 %p1, %r2, 0, %p1;
    @%p1 bra WAITED;
    setp.eq.u32 %p1, %r4, 0;
    setp.eq.and.u32 %p1, %r2, 1, %p1;
    @%p1 bra WAITED;
    setp.ne.u32 %p1, %r5, 0;
    setp.eq.and.u32 %p1, %r2, 2, %p1;
    @%p1 bra WAITED;
    setp.ne.u32 %p1, %r7, 0;
    setp.eq.and.u32 %p1, %r2, 3, %p1;
    @%p1 bra WAITED;
    bra NEXT;
WAITED:
    ret;
}}
"""
)

ALL, NONE = 0xFFFFFFFF, 0xFFFFFFFE
"""the ranks that a barrier's kernel signals, or waits for, beside numbers of one rank"""
MOVING_THREADS = 128
_MOVES_HEAD = """
.version 8.0
.target sm_90
.address_size 64
.file 1 "{}"
"""
_MOVE = """
.visible .entry {name}(
    .param .u64 to, .param .u64 to_pitch, .param .u64 from, .param .u64 from_pitch, .param .u64 width, .param .u64 count, .param .u64 value)
{{
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %rd<16>;
    .loc 1 1 0
    ld.param.b64 %rd1, [to];
    ld.param.b64 %rd2, [from];
    ld.param.b64 %rd3, [count];
    ld.param.b64 %rd8, [width];
    ld.param.b64 %rd9, [to_pitch];
    ld.param.b64 %rd10, [from_pitch];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd4, %r1, {width};
NEXT:
    setp.ge.u64 %p1, %rd4, %rd3;
    @%p1 bra DONE;
    div.u64 %rd11, %rd4, %rd8;
    rem.u64 %rd12, %rd4, %rd8;
    mul.lo.s64 %rd13, %rd11, %rd9;
    mul.lo.s64 %rd14, %rd11, %rd10;
    add.s64 %rd5, %rd1, %rd12;
    add.s64 %rd6, %rd2, %rd12;
    add.s64 %rd5, %rd5, %rd13;
    add.s64 %rd6, %rd6, %rd14;
    {load}
    st.global.{kind} [%rd5], {word};
    add.s64 %rd4, %rd4, {step};
    bra NEXT;
DONE:
    ret;
}}
"""


def moves(what: str, *, copies: bool) -> Ptx:
    """Returns PTX that copies, or else sets, rows of bytes by one block, in words of 1, 4 and 8 bytes; findings call it ``what``."""
    return Ptx(_MOVES_HEAD.format(what) + "".join(_move(what, copies, width) for width in (1, 4, 8)))


def _move(what: str, copies: bool, width: int) -> str:
    kind, word = {1: ("u8", "%r4"), 4: ("b32", "%r4"), 8: ("b64", "%rd7")}[width]
    load = f"ld.global.{kind} {word}, [%rd6];" if copies else f"ld.param.{kind} {word}, [value];"
    return _MOVE.format(name=f"{what}_{width}", load=load, kind=kind, word=word, width=width, step=width * MOVING_THREADS)
