"""Reductions of the collectives: which there are, and their results by packets and by rings under the emulator."""

import ctypes

import pytest
import torch

from device.runs import require_clean
from device.test_collective_protocols import BLOCKS, PACKET_BUFFER_BYTES, RINGS, take_workspace
from peerlane.device import compile_cubin
from peerlane.device.collectives import messages
from peerlane.device.collectives.kernels import KERNELS, kernel_source
from peerlane.device.collectives.messages import Member
from peerlane.device.collectives.reductions import INTEGERS, OPERATIONS, Reduction, fills_packets, reduced_type, refusal
from peerlane.device.collectives.workspace import Messages, Workspace
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.emulator import Scenario
from peerlane.errors import UsageError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    *((Reduction(name, 0.3 if name == "premul_sum" else 1.0), dtype) for name in OPERATIONS for dtype in FLOATS),
    *((Reduction(name), dtype) for name in ("sum", "max", "min") for dtype in INTEGERS),
]


def reduced(terms: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """The reduction in exact arithmetic, rounded once."""
    dtype = terms[0].dtype
    wide = torch.stack([term.to(torch.float64 if dtype.is_floating_point else torch.int64) for term in terms])
    if reduction.name in ("max", "min"):
        return getattr(wide, f"a{reduction.name}")(0).to(dtype)  # type: ignore[no-any-return]
    total = wide.sum(0)
    if reduction.name == "avg":
        total = total / len(terms)
    if reduction.name == "premul_sum":
        total = (total.float() * torch.tensor(reduction.factor)).double()
    return total.to(dtype)


def terms_of(dtype: torch.dtype, count: int, ranks: int, seed: int) -> list[torch.Tensor]:
    """Numbers whose sums are exact in float; of integers any bits, so that sums wrap around and signs matter."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randint(-40, 41, (count,), generator=generator).div(4).to(dtype) for _ in range(ranks)]
    drawn = [torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8) for _ in range(ranks)]
    return [bits.view(dtype) for bits in drawn]


def add(scenario: Scenario, arena: object, workspace: Workspace, name: str, case: tuple[Reduction, torch.dtype], count: int) -> None:
    """One launch of the kernel called ``name``, on tensors of ``count`` elements."""
    (reduction, dtype), ranks = case, scenario.world_size
    own = Workspace.from_buffer_copy(workspace)
    own.factor = reduction.factor
    scatters = "reduce" in name.split("_")[:1]
    terms = terms_of(dtype, count * (ranks if scatters else 1), ranks, count)
    total = reduced(terms, reduction)
    wanted = list(total.view(ranks, -1)) if scatters else [total] * ranks
    source = scenario.buffer(f"in of {name}", terms)
    right = [part.contiguous().view(torch.uint8) for part in wanted]
    target = scenario.buffer(f"out of {name}", [torch.zeros_like(part) for part in right], right)
    nbytes = count * dtype.itemsize
    tables = [messages.reduce_scatter(Member(rank, ranks), nbytes) if scatters else Messages() for rank in range(ranks)]
    block, shared_bytes = (64, 0)
    if "relay" in name:
        block, shared_bytes = RINGS.relay_threads, RINGS.relay_shared_bytes
    elif "ring" in name:
        block, shared_bytes = RINGS.reduce_threads, RINGS.reduce_shared_bytes
    arguments = (arena, own, tables.__getitem__, source, target, ctypes.c_uint64(nbytes), ctypes.c_int(0))
    scenario.launch(name, BLOCKS, block, arguments, shared_bytes=shared_bytes)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_reductions_round_once_by_packets_and_by_rings(ranks: int) -> None:
    texts, launches = [], []
    for number, case in enumerate(CASES):
        reduction, dtype = case
        packets = ("all_reduce_one_shot", "reduce_packets") if fills_packets(dtype) else ("reduce_ring",)
        further = {0: ("all_reduce_relay",), 1: ("all_reduce_staged",)}.get(number % 4, ())
        for kernel in (packets[number % len(packets)], *further):
            name = f"{kernel}_{number}"
            texts.append(KERNELS[kernel].text(name).replace("ELEMENT", reduced_type(reduction.name, dtype)))
            launches.append((name, case))
    scenario = Scenario("reductions", "".join(texts), ranks, defines={"WORLD_SIZE": ranks, **RINGS.defines()})
    usual, staged = (take_workspace(scenario, ranks, PACKET_BUFFER_BYTES, RINGS) for _ in range(2))
    for name, case in launches:
        add(scenario, *(staged if "staged" in name else usual), name, case, 67)
    require_clean(scenario, schedules=2)


@pytest.mark.parametrize(
    ("kernel", "name", "dtype"),
    [
        ("all_reduce_one_shot", "max", torch.int8),
        ("all_reduce_two_shot", "avg", torch.float16),
        ("reduce_packets", "premul_sum", torch.bfloat16),
        ("reduce_ring", "min", torch.int64),
        ("all_reduce_relay", "sum", torch.int64),
    ],
    ids=str,
)
def test_kernels_of_reductions_compile_for_gpus(kernel: str, name: str, dtype: torch.dtype) -> None:
    source, defines = kernel_source(kernel, 3, dtype, reduction=name)
    assert compile_cubin(source, arch="sm_90a", defines=defines).path.stat().st_size > 0


def test_reductions_that_do_not_exist_are_refused_with_a_reason() -> None:
    assert all(refusal("sum", dtype) == "" for dtype in (*ELEMENT_TYPES, *INTEGERS))
    assert refusal("product", torch.float32) == "the reduction product; the kit reduces with sum, max, min, avg, premul_sum"
    assert refusal("avg", torch.int32) == "the reduction avg of torch.int32; the kit has it for floating point"
    for dtype in (torch.float64, torch.bool):
        with pytest.raises(UsageError, match=f"a reduction of {dtype}; the kit reduces bfloat16, float16, "):
            reduced_type("sum", dtype)
