"""The emulator itself: CUDA's names mean what they should, what is wrong is told in the words of the source, and runs can be repeated."""

import ctypes
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from command_line import Peerlane
from device.runs import require_clean
from peerlane.device import emulator
from peerlane.device.collectives.kernels import KERNELS
from peerlane.device.collectives.workspace import Messages, Rings, Workspace, workspace_bytes
from peerlane.device.host.jit import INCLUDE_DIR
from peerlane.emulator import Finding, Report, Scenario, build, check
from peerlane.errors import CompileError, DeviceError, LaunchError, MissingDependency, UsageError

SOURCE = Path(__file__).with_name("emulator_kernels.cu")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cuda" / "1_allreduce_cuda.py"


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def run(
    kernel: str,
    *,
    expected: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    more: Sequence[object] = (),
    block: int = 32,
    grid: int = 1,
    schedules: int = 40,
) -> Report:
    """One launch on one rank, with a buffer `out` and then ``more`` arguments."""
    scenario = Scenario(kernel, SOURCE, 1)
    start = initial if initial is not None else torch.zeros_like(expected) if expected is not None else words(*[0] * 32)
    out = scenario.buffer("out", [start], None if expected is None else [expected])
    scenario.launch(kernel, grid, block, [out, *more], shared_bytes=1024)
    return check(scenario, schedules=schedules)


def shuffled(thread: int) -> int:
    """What `shuffles` leaves: a sum of 0 to 31, the warp's last thread, and the right neighbour within half a warp."""
    lane = thread % 32
    return 496 + 1000 * (thread - lane + 31) + 100000 * (min(lane + 1, 15) if lane < 16 else 0)


def only(report: Report) -> Finding:
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


@pytest.mark.parametrize(
    ("kernel", "grid", "block", "expected", "more"),
    [
        ("reverse_in_shared", 2, 64, [100 * b + 63 - t for b in range(2) for t in range(64)], ()),
        ("shuffles", 1, 64, [shuffled(t) for t in range(64)], ()),
        ("exchange_in_warp", 1, 32, [31 - t for t in range(32)], (ctypes.c_uint32(0),)),
        ("named_barriers", 1, 64, [7] * 32, ()),
        ("some_threads_leave", 1, 64, [20] * 20, ()),
        ("passes_time", 1, 32, None, ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cuda_says_is_done(kernel: str, grid: int, block: int, expected: list[int] | None, more: Sequence[object]) -> None:
    if expected is None:
        report = run(kernel, grid=grid, block=1, expected=words(1))
    else:
        report = run(kernel, grid=grid, block=block, expected=words(*expected), more=more)
    assert report.clean, str(report)


def test_the_former_name_stands_for_the_same_modules() -> None:
    from peerlane import emulator
    from peerlane.device import emulator as former
    from peerlane.device.emulator import ranks, solution_run

    assert (former, ranks, solution_run) == (emulator, emulator.ranks, emulator.solution_run)


def test_conversions_round_as_the_gpu_does() -> None:
    expected = words(0xC0003F80, 1, 0x847E, 0x5F001800, 0xFB3C, 0xFB003C00)
    # -0.0087890625 is 4.5 steps of 2^-9: to even, 4 steps; 0x7e is 448, 0x01 is 2^-9; -1e9 is the largest of e5m2, -57344.
    report = run("numbers", block=1, expected=expected)
    assert report.clean, str(report)


def test_atomics_count_and_bytes_lie_side_by_side() -> None:
    scenario = Scenario("atomics", SOURCE, 1)
    counter = scenario.buffer("counter", [words(0)], [words(128)])
    largest = scenario.buffer("largest", [words(0)], [words(127)])
    scenario.launch("count_in_grid", 4, 32, [counter, largest])
    every = scenario.buffer("bytes", [torch.zeros(37, dtype=torch.uint8)], [torch.arange(37, dtype=torch.uint8)])
    scenario.launch("bytes_side_by_side", 1, 37, [every])
    require_clean(scenario, schedules=100)


def test_volatile_polls_and_bulk_additions_between_ranks() -> None:
    scenario = Scenario("between ranks", SOURCE, 2)
    arena = scenario.arena(4096)
    heard = scenario.buffer("heard", [words(0)] * 2, [words(6), words(5)])
    scenario.launch("volatile_flag", 1, 1, [arena, heard])
    other = scenario.arena(4096)
    total = scenario.buffer("total", [torch.zeros(32)] * 2, [2 * torch.arange(32.0)] * 2)
    scenario.launch("add_in_bulk", 1, 32, [other, total], shared_bytes=128)
    require_clean(scenario, schedules=100)


@pytest.mark.parametrize(("twin", "kinds"), [(0, set()), (1, {"proxy_fence"}), (2, {"race"})])
def test_a_pipeline_of_bulk_loads(twin: int, kinds: set[str]) -> None:
    scenario = Scenario("pipeline", SOURCE, 1)
    given = scenario.buffer("in", [torch.arange(160.0)])
    out = scenario.buffer("out", [torch.zeros(160)], [torch.arange(160.0) + 1])
    scenario.launch("pipeline", 1, 64, [given, out, ctypes.c_uint32(5), ctypes.c_uint32(twin)], shared_bytes=256)
    report = check(scenario, schedules=50)
    assert kinds <= {finding.kind for finding in report.findings}, str(report)
    assert report.caught == (50 if kinds else 0), str(report)


def test_a_race_is_told_with_both_lines() -> None:
    finding = only(run("neighbours_race"))
    lines = SOURCE.read_text().splitlines()
    assert finding.kind == "race" and finding.schedules == 40
    assert {lines[side.frames[0].line - 1].strip() for side in finding.sides} == {
        "out[threadIdx.x] = 1;",
        "if (threadIdx.x) out[threadIdx.x - 1] = 2;",
    }
    assert finding.memory.startswith("out+") and finding.memory.endswith("of rank 0")
    assert "release" in str(finding) and "emulator_kernels.cu:" in str(finding)


@pytest.mark.parametrize(
    ("kernel", "kind", "says"),
    [
        ("out_of_bounds", "illegal_address", "writes 4 bytes"),
        ("null_pointer", "crash", "memory that is nobody's"),
        ("writes_device_variable", "race", "device variables+0"),
        ("deep", "crash", "stack of a thread is full"),
        ("traps", "trap", "traps"),
        ("mbarrier_without_init", "misuse", "nobody has initialised"),
        ("torn_flag", "race", "of different sizes"),
    ],
)
def test_faults_are_findings(kernel: str, kind: str, says: str) -> None:
    report = run(kernel, block=2 if kernel == "torn_flag" else 32 + (kernel == "out_of_bounds"), schedules=5)
    assert report.caught == 5
    assert {finding.kind for finding in report.findings} == {kind}
    assert says in str(report)


def test_what_a_kernel_prints_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prints", block=2, schedules=1).clean and run("prints", block=2, schedules=3).clean
    assert sorted(capsys.readouterr().err.splitlines()) == ["thread 0 has 0", "thread 1 has 0"]


@pytest.mark.long
def test_a_loop_without_an_end_is_a_finding() -> None:
    finding = only(run("polls_without_volatile", block=1, schedules=100))
    assert finding.kind == "endless" and finding.schedules == 1 and "ptx:: loads or volatile" in str(finding)


def test_memory_of_another_rank_is_no_address() -> None:
    scenario = Scenario("foreign", SOURCE, 2)
    own = scenario.buffer("own", [words(0)] * 2)
    scenario.launch("peer_s_own_memory", 1, 1, [own, lambda rank: ctypes.c_uint64((own.addresses[1 - rank] - own.addresses[rank]) % 2**64)])
    finding = only(check(scenario, schedules=5))
    assert finding.kind == "illegal_address" and finding.memory.startswith("own+0 of rank")


def test_warp_votes_order_nothing() -> None:
    assert only(run("exchange_in_warp", more=[ctypes.c_uint32(1)])).kind == "race"


def test_a_wrong_result_says_where() -> None:
    finding = only(run("reverse_in_shared", block=64, expected=words(*range(63, 2, -1), 9, 1, 0)))
    assert finding.kind == "wrong_result" and finding.memory == "out+244 of rank 0"
    assert "expected 0300000009000000, got 0300000002000000" in finding.detail


def test_a_seed_says_everything() -> None:
    """The same seed gives the same findings, another one others, and a schedule can be run alone."""
    from device.test_emulator_protocols import scenario

    made = scenario("counter", "too_few", grid=1, launches=1)
    first, again, other = (check(made, schedules=60, seed=seed) for seed in (1, 1, 2))
    assert first.findings == again.findings and first.caught == again.caught
    assert [finding.schedule for finding in first.findings] != [
        finding.schedule for finding in other.findings
    ] or first.caught != other.caught
    late = max(first.findings, key=lambda finding: finding.schedule)
    alone = check(made, schedules=1, seed=1, first_schedule=late.schedule)
    assert late.kind in {finding.kind for finding in alone.findings}


def test_what_never_ends_is_stopped() -> None:
    scenario = Scenario("endless", SOURCE, 1)
    scenario.launch("never_ends", 1, 1, [scenario.buffer("out", [words(0)])])
    with pytest.raises(DeviceError, match=r"did not end in 0\.5 s"):
        check(scenario, schedules=1, timeout_s=0.5)


# ---- the ways to ask


def functions(header: Path) -> set[str]:
    """Names of what the header defines, by the spelling of either side."""
    head = (
        r"^(?:\[\[noreturn\]\] )?(?:__device__ |PEERLANE_UNCHECKED )?(?:inline|PEERLANE_INLINE|PEERLANE_UNCHECKED) [\w:<> ]+?[ &*]+(\w+)\("
    )
    text = header.read_text()
    return {*re.findall(head, text, re.MULTILINE), *re.findall(r"^PEERLANE_[A-Z]+\(([a-z]\w+), ", text, re.MULTILINE)}


TWINS = sorted((build.STAND_INS / "peerlane" / "ptx").glob("*.cuh"))


@pytest.mark.parametrize("twin", TWINS, ids=lambda path: path.name)
def test_a_stand_in_has_every_function_of_its_header(twin: Path) -> None:
    device = functions(INCLUDE_DIR / "peerlane" / "ptx" / twin.name)
    assert len(device) >= 3
    assert device - functions(twin) == set()


def test_only_headers_of_instructions_contain_inline_assembly() -> None:
    headers = {path.relative_to(INCLUDE_DIR / "peerlane"): path.read_text() for path in INCLUDE_DIR.rglob("*.cuh")}
    assert {path.parent.name for path, text in headers.items() if re.search(r"\basm\b", text)} == {"ptx"}


def test_unusable_requests_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario("mine", SOURCE, 2)
    with pytest.raises(UsageError, match="one tensor for each of the 2 ranks"):
        scenario.buffer("out", [words(0)])
    with pytest.raises(UsageError, match=r"argument 0 .* is a int; expected"):
        scenario.launch("traps", 1, 32, [3])
    for grid, block, kind, says in ((4096, 512, UsageError, "fewer or smaller blocks"), (1, 1025, LaunchError, "at most 1024 in all")):
        scenario = Scenario("mine", SOURCE, 2)
        scenario.launch("traps", grid, block, [])
        with pytest.raises(kind, match=says):
            check(scenario)
    with pytest.raises(UsageError, match="0 launches"):
        check(Scenario("empty", SOURCE, 2))
    scenario = Scenario("unknown", SOURCE, 1)
    scenario.launch("absent", 1, 1, [])
    with pytest.raises(UsageError, match="launches absent; the source has reverse_in_shared"):
        check(scenario)
    with pytest.raises(CompileError, match=r"source\.cu:1"):
        emulator.compile_program('extern "C" __global__ void k() { nonsense; }')
    with pytest.raises(UsageError, match='declare it extern "C"'):
        emulator.compile_program("__global__ void k() {}")
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    with pytest.raises(MissingDependency, match="which is not installed: apt-get install"):
        emulator.compile_program(SOURCE)


def test_the_all_reduce_example_is_clean(peerlane: Peerlane) -> None:
    assert peerlane("race", str(EXAMPLE), "--schedules", "20").out.count("20 schedules, seed 0: nothing found") == 6


def test_all_reduce_in_place_in_fp32_of_odd_sizes() -> None:
    """Two elements for three ranks, and a few more than whole packets and vectors, one call after the other in one workspace."""
    world_size = 3
    kernels = ("all_reduce_one_shot", "all_reduce_two_shot", "all_reduce_relay")
    rings = Rings(tile_bytes=256, summing_warps=1)
    source = "".join(KERNELS[name].text(name) for name in kernels)
    scenario = Scenario("fp32", source, world_size, {"ELEMENT": "peerlane::Float32", "WORLD_SIZE": world_size, **rings.defines()})
    arena = scenario.arena(workspace_bytes(world_size, rings))
    workspace = Workspace.take(arena, world_size, rings)
    for numel in (2, 203):
        for kernel in kernels:
            terms = [(torch.arange(numel) * (rank + 5) % 17 - 8).float() for rank in range(world_size)]
            data = scenario.buffer(f"{kernel} {numel}", terms, expected=[torch.stack(terms).sum(dim=0)] * world_size)
            args = [arena, workspace, Messages(), data, data, ctypes.c_uint64(4 * numel), ctypes.c_int(0)]
            block, shared_bytes = (rings.relay_threads, rings.relay_shared_bytes) if kernel == "all_reduce_relay" else (32, 0)
            scenario.launch(kernel, 2, block, args, shared_bytes=shared_bytes)
    require_clean(scenario, schedules=20)


def test_the_page_s_example_is_clean_and_its_broken_form_is_not(tmp_path: Path, peerlane: Peerlane) -> None:
    page = (ROOT / "docs" / "device" / "emulator.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "mine.py").write_text(code)
    assert json.loads(peerlane("race", str(tmp_path / "mine.py"), "--world-size", "2", "--json").out)["clean"]
    fence = "        ptx::fence_system();  // release\n"
    assert fence in code
    (tmp_path / "mine.py").write_text(code.replace(fence, ""))
    printed = peerlane("race", str(tmp_path / "mine.py"), "--world-size", "2", code=3).out
    assert "race: arena allocation 0+" in printed and "mine.py:" in printed


def test_a_file_without_scenarios_is_a_usage_error(tmp_path: Path, peerlane: Peerlane) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "mine_cuda.py").write_text("def solution(tensor):\n    return tensor\n")
    (tmp_path / "wrong.py").write_text("def race(world_size):\n    return [world_size]\n")
    for name, says in (
        ("absent.py", "is not a Python file"),
        ("mine_cuda.py", "says no problem; name the file like 18_mine_cuda.py"),
        ("empty.py", "has no function race(world_size)"),
        ("wrong.py", "gave ['int']"),
    ):
        assert says in peerlane("race", str(tmp_path / name), code=2).err


def test_a_solution_is_judged_whole_without_a_scenario(tmp_path: Path, peerlane: Peerlane) -> None:
    file = ROOT / "src" / "peerlane" / "solutions" / "p002_allgather.py"
    assert "ragged_bf16, 2 ranks: correct, nothing found" in peerlane("race", str(file), "--world-size", "2", "--schedules", "2").out
    twin = tmp_path / "2_twin_cuda.py"
    twin.write_text(file.read_text().replace("all_gather(tensor)", "all_gather(tensor)[:, :1]"))
    assert "wrong type: output: got shape" in peerlane("race", str(twin), "--world-size", "2", "--schedules", "2", "--json", code=3).out


SMALL_FLOATS = r"""
#include <peerlane/comm.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
using namespace peerlane;
extern "C" __global__ void small_floats(const __nv_bfloat16* a, __nv_bfloat16* o, const half* h, half* p, __nv_fp8_e4m3* e) {
    const unsigned i = threadIdx.x;
    const __nv_bfloat162 two = reinterpret_cast<const __nv_bfloat162*>(a)[i];
    const float2 f = __bfloat1622float2(two);
    reinterpret_cast<__nv_bfloat162*>(o)[i] = __hfma2(two, two, __floats2bfloat162_rn(f.x, 1.0f));
    half2 q = __halves2half2(h[2 * i], h[2 * i + 1]);
    q = __hadd2(q, __half2half2(__float2half(0.1f)));
    p[2 * i] = __low2half(q);
    p[2 * i + 1] = __hmax(__high2half(q), half(0.5f)) * half(3);
    p[2 * i] += __shfl_xor_sync(0xffffffffu, p[2 * i + 1], 1);
    e[i] = __nv_fp8_e4m3(float(e[i]) * 1.7f);
}
"""


def test_the_toolkit_s_small_floats_work_and_compile() -> None:
    """Kernels for GPUs include cuda_bf16.h, cuda_fp16.h and cuda_fp8.h; on emulated ranks there are stand-ins, which round alike."""
    from peerlane.device import compile_cubin

    compile_cubin(SMALL_FLOATS)
    scenario, generator = Scenario("small_floats", SMALL_FLOATS, 1), torch.Generator().manual_seed(0)
    a, h = (torch.randn(64, generator=generator) * 3).bfloat16(), torch.randn(64, generator=generator).half()
    first, second = a.float().view(-1, 2).unbind(1)
    o = torch.stack([first * first + first, second * second + 1], 1).bfloat16().view(-1)
    low, high = (h.float() + torch.tensor(0.1).half().float()).half().view(-1, 2).unbind(1)
    high = (high.float().clamp(min=0.5) * 3).half()
    p = torch.stack([(low.float() + high.view(-1, 2).flip(1).reshape(-1).float()).half(), high], 1).view(-1)
    e = torch.randn(32, generator=generator).to(torch.float8_e4m3fn)
    data = [scenario.buffer("a", [a]), scenario.buffer("o", [torch.zeros_like(a)], expected=[o]), scenario.buffer("h", [h])]
    data += [scenario.buffer("p", [torch.zeros_like(h)], expected=[p])]
    data += [scenario.buffer("e", [e.view(torch.uint8)], expected=[(e.float() * 1.7).to(torch.float8_e4m3fn).view(torch.uint8)])]
    scenario.launch("small_floats", 1, 32, tuple(data))
    report = check(scenario, schedules=3)
    assert not report.findings, str(report)
