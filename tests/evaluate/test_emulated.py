"""`--device emulated`: whole candidates of the kit, host code included, judged and raced without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import peerlane as pl
from command_line import Peerlane
from peerlane import problems
from peerlane.emulator.solution_run import run
from peerlane.evaluate import EvaluationPlan, discover, evaluate
from peerlane.problems.scaffolds import scaffold
from peerlane.results.verdict import BuildError, CudaError, NotRun, RuntimeFailure, Unstable, WrongResult

EXAMPLES = Path(__file__).parents[2] / "examples" / "cuda"
GATHER = r'''
import torch

from peerlane.device import group_of, per_group
from peerlane.device.host.declare import U64, Buffer, DeclaredKernel, Epochs, Flags, Pointer

SOURCE = r"""
#include <peerlane/comm.cuh>
using namespace peerlane;

extern "C" __global__ void gather(const __grid_constant__ Arena arena, const __grid_constant__ Gather args) {
    const Block block;
    const Peers<WORLD_SIZE> peers(arena, args.flags);
    const u32 epoch = next_epoch(reinterpret_cast<u32*>(arena.local(args.epochs)));
    for (int rank = 0; rank < WORLD_SIZE; ++rank)
        copy_bytes(block, arena.peer(rank, args.landing + arena.rank * args.bytes), args.x, args.bytes);
    peers.signal_all(0, epoch);  // the data is there
    for (int rank = 0; rank < WORLD_SIZE; ++rank)
        if (rank != arena.rank) peers.wait(rank, 0, epoch);
    copy_bytes(block, args.y, arena.local(args.landing), WORLD_SIZE * args.bytes);
    peers.acknowledge_all(1, epoch);  // the peers may write again
    for (int rank = 0; rank < WORLD_SIZE; ++rank)
        if (rank != arena.rank) peers.wait(rank, 1, epoch);
}
"""
GATHER = DeclaredKernel(
    "gather", SOURCE, epochs=Epochs(), flags=Flags(), landing=Buffer(), x=Pointer("const char*"), y=Pointer(), bytes=U64
)


@per_group
def gather(group, nbytes):
    return GATHER.bind(group, grid=1, block=128, sizes={"flags": 2, "landing": group.world_size * nbytes}, bytes=nbytes)


def solution(tensor):
    group, x = group_of(), tensor.contiguous()
    y = x.new_empty((group.world_size, *x.shape))
    if x.numel():
        gather(group, x.nbytes)(x=x, y=y)
    return y
'''
SIGNAL = "    peers.signal_all(0, epoch);  // the data is there\n"
FIRST_WAIT = "        if (rank != arena.rank) peers.wait(rank, 0, epoch);\n"


@pytest.fixture(scope="module")
def evaluator() -> Iterator[pl.Evaluator]:
    with pl.Evaluator(2, "emulated", presets=("small",), modes=()) as evaluator:
        yield evaluator


def judge(evaluator: pl.Evaluator, old: str = "", new: str = "", problem: int = 2) -> pl.Result:
    assert old in GATHER
    return evaluator.evaluate(problem, GATHER.replace(old, new) if old else GATHER, name="2_gather_cuda")


def test_a_right_candidate_is_correct_in_every_case_and_its_launches_are_counted(evaluator: pl.Evaluator) -> None:
    result = judge(evaluator)
    assert result.correct, result.verdict
    assert len(result.correctness) == 6 and all(case.stressed_calls > 0 for case in result.correctness)
    assert result.audit is not None and result.audit.own_communication and result.audit.kernel_names == ("gather",)
    assert (result.device, str(result.node)) == ("emulated", "emulated ranks")


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        ("return y\n", "return y.flip(0)\n", WrongResult, "gathered is wrong"),
        ("gather(group, x.nbytes)", "gather(group, 70)", CudaError, "illegal_address"),
        ("if x.numel():", "if group.rank == 0:", RuntimeFailure, "the ranks of a group do different things"),
        (FIRST_WAIT, "        ;\n", Unstable, "race"),
        (SIGNAL, "", CudaError, "deadlock in gather"),
        (
            SIGNAL,
            '#ifdef _GLIBCXX_CSTDIO\n    __asm__ volatile("syscall" :: "a"(231), "D"(0));\n#endif\n',
            CudaError,
            "ended the process that ran it, with status 0",
        ),
    ],
    ids=["rows_reversed", "a_size_of_another_case", "one_rank_alone", "missing_wait", "missing_signal", "exit"],
)
def test_a_twin_is_refused(evaluator: pl.Evaluator, old: str, new: str, kind: type, says: str) -> None:
    verdict = judge(evaluator, old, new).verdict
    assert isinstance(verdict, kind) and says in verdict.reason, verdict


@pytest.mark.parametrize(
    ("value", "says"), [("M_PI", 'identifier "M_PI" is undefined'), ("std::max(1, 2)", "std"), ("sizeof(all)", "too much shared data")]
)
def test_a_kernel_that_no_gpu_runs_is_a_build_error(evaluator: pl.Evaluator, value: str, says: str) -> None:
    epoch = "    const u32 epoch = next_epoch("
    shared = (
        "    __shared__ char all[400000];\n    if (args.bytes == 1) all[threadIdx.x] = 1, __syncthreads(), args.y[0] = all[args.bytes];\n"
    )
    new = f"    if (args.bytes == 3) args.y[0] = {value};\n"
    verdict = judge(evaluator, epoch, f"{shared if 'all' in value else ''}{new}{epoch}").verdict
    assert isinstance(verdict, BuildError) and says in verdict.message, verdict
    if "shared" not in says:
        line = GATHER[: GATHER.index(epoch)].count("\n") + 1
        assert f"2_gather_cuda.py({line}): error" in verdict.message


def test_names_of_the_c_library_work_in_both_worlds(evaluator: pl.Evaluator) -> None:
    epoch = "    const u32 epoch = next_epoch("
    result = judge(evaluator, epoch, f"    if (args.bytes == 3) args.y[0] = char(-INFINITY < NAN) + char(uint64_t(1));\n{epoch}")
    assert result.correct and result.audit is not None, result.verdict
    assert "gather: " in result.audit.compiled[0] and "registers" in result.audit.compiled[0] and "not_compiled" not in result.flags


def test_notes_are_flags_of_a_correct_result(evaluator: pl.Evaluator) -> None:
    """Peers that may write again learn it by a relaxed flag: right only if the end of a launch is a release."""
    lines = GATHER[GATHER.index("    peers.acknowledge_all(1") : GATHER.index('}\n"""\nGATHER')]
    flag = "flag_of<WORLD_SIZE>(arena, args.flags, "
    peer = "        for (int rank = 0; rank < WORLD_SIZE; ++rank)\n            if (rank != arena.rank) "
    result = judge(
        evaluator,
        lines,
        f"""    __syncthreads();
    if (threadIdx.x == 0) {{
{peer}ptx::store_relaxed_system({flag}rank, 1, arena.rank), epoch);
{peer}while (ptx::load_relaxed_system({flag}arena.rank, 1, rank)) < epoch) {{}}
    }}
""",
    )
    assert result.correct and "launch_boundary" in result.flags, result


def test_a_race_is_unstable_with_both_source_lines_as_evidence(evaluator: pl.Evaluator) -> None:
    result = judge(evaluator, FIRST_WAIT, "        ;\n")
    assert isinstance(result.verdict, Unstable) and result.verdict.findings
    twin = GATHER.replace(FIRST_WAIT, "        ;\n")
    reads = twin[: twin.index("copy_bytes(block, args.y")].count("\n") + 1
    assert f".py:{reads}" in result.verdict.findings[0] and "landing+" in result.verdict.findings[0]
    assert f".py:{reads}" in result.feedback()


CORPUS = Path(__file__).parents[1] / "adversarial" / "corpus"
ADDED, ADD_BARRIER = (CORPUS / "7_a05_atomics_cuda.py").read_text(encoding="utf-8"), "    announce_and_wait(arena, flags, 2 * epoch);"
LAST_COPY = "    copy_bytes(block, args.y, arena.local(args.landing), WORLD_SIZE * args.bytes);\n"
LIST = """    __shared__ u32 count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x < WORLD_SIZE) args.order[atomicAdd(&count, 1u)] = threadIdx.x;
    __syncthreads();
    for (u32 k = 0; k < WORLD_SIZE; ++k) {
        const u64 at = args.order[k] * args.bytes;
        copy_bytes(block, args.y + at, arena.local(args.landing + at), args.bytes);
    }
"""
LISTED = (
    GATHER.replace(LAST_COPY, LIST)
    .replace("y=Pointer(), bytes=U64", 'y=Pointer(), order=Pointer("u32*"), bytes=U64')
    .replace("(x=x, y=y)", "(x=x, y=y, order=torch.zeros(group.world_size, dtype=torch.int32))")
)
BEHIND_LIST = "    __syncthreads();\n    for (u32 k"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_order_of_atomics_is_free_if_every_order_is_right(world_size: int) -> None:
    """Of a list that they make, or of the floats that they add. A twin has a race, or takes the order of the list for that of ranks."""
    assert ADD_BARRIER in ADDED and BEHIND_LIST in LISTED
    with pl.Evaluator(world_size, "emulated", presets=("small",), modes=()) as evaluator:
        listed, added = evaluator.evaluate(2, LISTED, name="2_listed_cuda"), evaluator.evaluate(7, ADDED, name="7_added_cuda")
        assert listed.correct and "order_of_atomics" in listed.flags, listed.verdict
        assert added.correct and ("order_of_atomics" in added.flags) == (world_size > 2), (added.verdict, added.flags)
        for number, text in ((2, LISTED.replace(BEHIND_LIST, "    for (u32 k")), (7, ADDED.replace(ADD_BARRIER, "    __syncthreads();"))):
            verdict = evaluator.evaluate(number, text, name=f"{number}_twin_cuda").verdict
            assert isinstance(verdict, Unstable) and "race" in verdict.reason, verdict
        mixed_up = evaluator.evaluate(2, LISTED.replace("args.y + at", "args.y + k * args.bytes"), name="2_twin_cuda").verdict
        assert isinstance(mixed_up, WrongResult | Unstable), mixed_up


SEND = "        copy_bytes(block, arena.peer(rank, args.landing + arena.rank * args.bytes), args.x, args.bytes);\n"
SEND_WORDS = """        for (u64 i = threadIdx.x; i < args.bytes / 4; i += blockDim.x) {
            u32* const to = reinterpret_cast<u32*>(arena.peer(rank, args.landing + arena.rank * args.bytes)) + i;
            ptx::store_relaxed_system(to, reinterpret_cast<const u32*>(args.x)[i]);
        }
"""
READ_WORDS = """    for (u64 i = threadIdx.x; i < WORLD_SIZE * args.bytes / 4; i += blockDim.x) {
        const u32* const from = reinterpret_cast<const u32*>(arena.local(args.landing)) + i;
        reinterpret_cast<u32*>(args.y)[i] = ptx::load_relaxed_system(from);
    }
"""
SHARED_COUNT = """    __shared__ u32 count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    const Block block;
"""
LAST_WAIT = "        if (rank != arena.rank) peers.wait(rank, 1, epoch);\n"


@pytest.mark.parametrize("counter", ["", "    atomicAdd(&count, 1u);\n"], ids=["no_counter", "counter"])
def test_a_late_reader_is_found_beside_atomics_whose_order_changes_nothing(tmp_path: Path, counter: str) -> None:
    """Words that are sent and read by atomic accesses are no race. That they are overwritten shows in their values alone."""
    text = GATHER.replace(SEND, SEND_WORDS).replace(LAST_COPY, READ_WORDS + counter).replace("    const Block block;\n", SHARED_COUNT)
    calls = [[(torch.arange(64) + 1000 * call,) for _ in range(2)] for call in range(6)]
    kinds = []
    for name, source in (("right", text), ("twin", text.replace(LAST_WAIT, "        ;\n"))):
        (tmp_path / f"{name}.py").write_text(source)
        outcome = run(tmp_path / f"{name}.py", calls, schedules=16)
        kinds.append({finding.kind for finding in (*outcome.findings, *outcome.notes)})
    assert kinds == [set(), {"wrong_result"}], kinds


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import torch.distributed as dist\n\ndef solution(tensor):\n    dist.all_reduce(tensor)\n    return tensor\n", "this is none"),
        (
            "import torch.distributed, peerlane.device\n\ndef solution(t):\n    torch.distributed.monitored_barrier()\n",
            "uses torch.distributed",
        ),
        ("import peerlane.device, torch\n\ndef solution(tensor):\n    return torch.compile(abs)(tensor)\n", "use the function as it is"),
    ],
    ids=["no_kit", "torch_distributed", "torch_compile"],
)
def test_what_cannot_be_emulated_is_not_run_and_says_why(evaluator: pl.Evaluator, source: str, says: str) -> None:
    verdict = evaluator.evaluate(1, source).verdict
    assert isinstance(verdict, NotRun) and says in verdict.missing, verdict


def test_a_new_candidate_of_the_kit_is_correct_as_it_comes(evaluator: pl.Evaluator) -> None:
    result = evaluator.evaluate(36, scaffold(problems.get(36), "kit"), name="36_new_cuda", cases="timed", track="custom")
    assert result.correct and result.audit is not None and result.audit.kernel_names == ("gather_bytes",), result.verdict


def test_results_are_stored_and_found_again(tmp_path: Path) -> None:
    plan = EvaluationPlan(
        discover([str(EXAMPLES / "1_allreduce_cuda.py"), "reference"]), problems="1", presets=("small",), world_sizes=(2,),
        device="emulated", cases="timed", out=tmp_path,
    )  # fmt: skip
    first = evaluate(plan)
    assert [result.verdict.kind for result in first] == ["correct", "not_run"]
    assert "emulated" in (tmp_path / "results.jsonl").read_text()
    assert evaluate(plan)[0].run_id == first[0].run_id


@pytest.mark.slow
def test_new_candidates_of_the_kit_are_correct(evaluator: pl.Evaluator) -> None:
    """One for each collective that references use."""
    for number in (3, 4, 5, 6, 7, 12, 27, 40, 73):
        result = evaluator.evaluate(number, scaffold(problems.get(number), "kit"), name=f"{number}_new_cuda", cases="timed")
        assert result.correct, (number, result.verdict)


@pytest.mark.long
def test_all_solutions_and_examples_are_correct() -> None:
    """In the first case; tests/device/test_emulated_ranks.py has the others."""
    files = discover(["solutions", str(EXAMPLES)])
    results = evaluate(EvaluationPlan(files, presets=("small",), world_sizes=(2,), modes=(), cases="timed", device="emulated"))
    assert len(results) >= len(problems.suite()) + 2
    assert [(result.candidate.name, result.verdict.reason) for result in results if not result.correct] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forgetful_clients")
@pytest.mark.filterwarnings("ignore")
def test_the_expert_model_solves_its_problems_on_emulated_ranks(tmp_path: Path, peerlane: Peerlane) -> None:
    run, judged = tmp_path / "run", ("--device", "emulated", "--preset", "small", "--world-size", 2, "--cases", "timed")
    peerlane("generate", "2,18", "--model", "peerlane/expert", "--track", "open", "--backend", "kit", "--out", run)
    peerlane("eval", run, *judged)
    said = peerlane("metrics", run, "--json").out
    assert '"correct": 2' in said, said


TRITON = """
import torch
import torch.distributed as dist
import triton
import triton.language as tl

@triton.jit
def copied(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.inline_asm_elementwise("vadd2.u32.u32.u32 $0, $1, $1, $1;", "=r,r", [n], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(x + i, value, mask=i < n)

def solution(tensor):
    tensor = tensor.clone()
    copied[(triton.cdiv(max(tensor.numel(), 1), 1024),)](tensor, tensor.numel(), 1024)
    return tensor
"""


@pytest.mark.slow
def test_an_instruction_of_triton_without_a_rule_is_not_run(evaluator: pl.Evaluator) -> None:
    verdict = evaluator.evaluate(1, TRITON).verdict
    assert isinstance(verdict, NotRun) and "'vadd2.u32" in verdict.missing and "nothing was run" in verdict.missing, verdict


@pytest.mark.slow
def test_a_triton_candidate_is_judged_as_written(evaluator: pl.Evaluator) -> None:
    source = TRITON.replace("    tl.inline_asm", "    # ").replace("    return tensor", "    dist.all_reduce(tensor)\n    return tensor")
    result = evaluator.evaluate(1, source)
    assert result.correct and result.audit is not None, result.verdict
    assert result.audit.operators == {"dist.all_reduce": 1} and not result.audit.own_communication


@pytest.mark.slow
def test_native_code_that_hides_its_races_is_marked(evaluator: pl.Evaluator) -> None:
    for file in sorted(CORPUS.glob("1_c67_*.py")):
        source = file.read_text(encoding="utf-8")
        begin, end = source.index("    PyRun_SimpleString("), source.index("    add_up<<<")
        hidden, honest = (evaluator.evaluate(1, text, name=file.stem) for text in (source, source[:begin] + source[end:]))
        assert (hidden.verdict.kind, honest.verdict.kind) == ("correct", "unstable")
        assert all("native_host_code" in result.flags for result in (hidden, honest))
        line = source[: source.index("peers[r])[i]")].count("\n") + 1
        assert f"{file.name}:{line}" in honest.verdict.findings[0]
