"""The Triton functions compile to PTX that obeys the rules. No GPU is needed; the interpreter can not run them."""

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from peerlane.device import triton as kit
from peerlane.device.tools.lint import lint
from peerlane.evaluate.ranks.public_helpers import triton_utils


def ptx_of(function: Any, types: dict[str, str], constants: dict[str, int]) -> str:
    """Compiles a function of arguments of these types, and behind them these constants."""
    source = ASTSource(fn=function, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return ptx


@triton.jit
def sum_of_all(table, flags, data, number, length, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0)
    kit.barrier(table, flags, slot, number, WORLD_SIZE)
    offsets = (slot * WORLD_SIZE + kit.own_rank(table)) * BLOCK + tl.arange(0, BLOCK)
    kit.all_reduce(table, data, offsets, offsets < length, tl.bfloat16, WORLD_SIZE)
    kit.barrier(table, flags, slot, number + 1, WORLD_SIZE)
    kit.signal(table, flags, (kit.own_rank(table) + 1) % WORLD_SIZE, slot, number + 2, WORLD_SIZE)


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_kernel_of_the_primitives_compiles_and_obeys_the_rules(world_size: int) -> None:
    types = {"table": "*i64", "flags": "i64", "data": "i64", "number": "i32", "length": "i32"}
    ptx = ptx_of(sum_of_all, types, {"WORLD_SIZE": world_size, "BLOCK": 1024})
    others = world_size - 1
    assert ptx.count("ld.relaxed.sys.global.u32 seen") == 2 * others
    assert ptx.count("@first st.relaxed.sys.global.u32") == 2 * others + 1
    assert ptx.count("bar.sync") >= 2 * others + 3
    assert lint(ptx) == []


@triton.jit
def barrier_of_blocks(pads, rank, WORLD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    triton_utils.blockwise_barrier(pads, None, rank, WORLD_SIZE, "acq_rel")
    triton_utils.send_signal(pads, "relaxed")


def test_the_barrier_has_one_thread_per_peer_and_a_time_limit() -> None:
    ptx = ptx_of(barrier_of_blocks, {"pads": "*i64", "rank": "i32"}, {"WORLD_SIZE": 4})
    assert ptx.count("atom.global.acq_rel.sys.cas.b32") == 2
    assert ptx.count("atom.global.relaxed.sys.cas.b32") == ptx.count("trap;") - 2 == 1
    before = ptx.partition("atom.global.acq_rel.sys.cas.b32")[0]
    assert "bra" in before and ptx.count("bar.sync") == 2
