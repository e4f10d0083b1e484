"""What a candidate needs that this machine lacks, as its source and its verdict show."""

import time
from pathlib import Path

import pytest

from peerlane import problems
from peerlane.evaluate.candidates import candidate_text
from peerlane.evaluate.requirements import lacks_cuda, missing_before, missing_behind, needs_multicast
from peerlane.results.verdict import CudaError, Hang, ImportFailure, NotRun, OutOfMemory, RuntimeFailure, TrackViolation, Verdict
from peerlane.settings import MULTICAST_REASON, passes_to_ranks
from sample_results import result, wrong_result

KITTENS = "from utils.parallelkittens_runtime import get_or_create_parallel_tensor as t, get_or_create_barrier\n"


@pytest.mark.parametrize(
    ("root", "multicast", "call", "missing"),
    [
        (False, "0", "", "THUNDERKITTENS_ROOT"),
        (True, "1", "get_or_create_barrier(ext, num_devices=4)", "multicast"),
        (True, "1", "u.create_parallel_tensor(ext, (8,))", "multicast"),
        (True, "1", "u.create_parallel_tensor(ext, (8,), multicast=False)", None),
        (True, "0", "get_or_create_barrier(ext, num_devices=4)", None),
    ],
)
def test_what_thunderkittens_needs(
    root: bool, multicast: str, call: str, missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("THUNDERKITTENS_ROOT", str(tmp_path if root else tmp_path / "absent"))
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", multicast)
    found = missing_before(KITTENS + call)
    assert found is None if missing is None else missing in str(found)
    assert missing_before(call) is None, "it does not use ThunderKittens"
    assert passes_to_ranks("THUNDERKITTENS_ROOT")


@pytest.mark.parametrize(
    ("number", "name", "source", "wrong_ranks", "to_blame"),
    [
        (19, "a_triton", "import triton.language as tl\ny = x.to(tl.float8e4nv)", (0, 1), "Triton's interpreter"),
        (19, "a_pytorch", "y = x.to(torch.float8_e4m3fn)", (0, 1), None),
        (19, "a_triton", "import triton.language as tl\ny = x + 1", (0, 1), None),
        (4, "a_pytorch", "dist.reduce(x, dst=0)", (1,), "gloo"),
        (4, "a_pytorch", "dist.reduce(x, dst=0)", (0, 1), None),
        (4, "a_pytorch", "dist.all_reduce(x)", (1,), None),
        (1, "a_pytorch", "dist.reduce(x, dst=0)", (1,), None),
    ],
)
def test_what_cpu_ranks_are_to_blame_for(number: int, name: str, source: str, wrong_ranks: tuple[int, ...], to_blame: str | None) -> None:
    verdict = wrong_result(wrong_ranks=wrong_ranks, detail="off")
    found = missing_behind(verdict, candidate_text(source, number, name), source, problems.get(number), 2)
    assert found is None if to_blame is None else to_blame in str(found) and "off" in str(found)


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ("RuntimeError: torch.cuda.Stream requires CUDA support", True),
        ("AssertionError: Torch not compiled with CUDA enabled", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("RuntimeError: Distributed package doesn't have NCCL built in", True),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", True),
        ("AttributeError: module 'torch.cuda' has no attribute 'all_reduce'", False),
        ("OSError: libcuda.so.1: cannot open shared object file: No such file or directory", True),
        ("ValueError: cuda", False),
    ],
)
def test_a_missing_gpu_is_known_by_the_words_of_torch(line: str, lacks: bool) -> None:
    assert lacks_cuda(line) is lacks


CRASH = CudaError(phase="first_call", rank=0, message="an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("handle = symm_mem.rendezvous(x, g)\nlaunch(handle.multicast_ptr)", True),
        ("pointer = getattr(handle, 'multicast_ptr')", True),
        ("torch.ops.symm_mem.multimem_all_reduce_(x, 'sum', g)", True),
        ('K = r"""asm("multimem.ld_reduce.global.add.f32 %0, [%1];");"""', True),
        ('K = f"""asm("multimem.st.{order}.global.f32 [%0], %1;");"""', True),
        ('K = "cuMulticastCreate(&handle, &properties);"', True),
        ('"""Not by multimem.red, and never by multicast_ptr."""\ndist.all_reduce(x)', False),
        ("dist.all_reduce(x)  # handle.multicast_ptr would be 0", False),
        ('K = "// multimem.red.global\\n /* multicast_ptr */ x += 1;"', False),
        ("def solution(x):\n    'multimem.st'\n    return x", False),
        ("multicast = 1  # (", False),
        ("handle.multicast_ptr(", False),
    ],
)
def test_what_asks_for_multicast(source: str, needs: bool) -> None:
    assert needs_multicast(CRASH, source, lacking=True) is needs
    assert not needs_multicast(CRASH, source, lacking=False), "where there is multicast, it is just wrong"


@pytest.mark.parametrize(
    ("verdict", "needs"),
    [
        (RuntimeFailure(phase="first_call", message="RuntimeError: no multicast support"), True),
        (ImportFailure(phase="import", message="AssertionError"), True),
        (Hang(phase="first_call", ranks=(0,), deadline_s=1.0), True),
        (RuntimeFailure(phase="correctness", message="IndexError: of another case"), False),
        (OutOfMemory(phase="first_call", message="out of memory"), False),
        (TrackViolation(what="NCCL ran"), False),
        (wrong_result(phase="first_call"), False),
        (result().verdict, False),
    ],
)
def test_no_wrong_answer_is_excused_by_multicast(verdict: Verdict, needs: bool) -> None:
    assert needs_multicast(verdict, "handle.multicast_ptr", lacking=True) is needs


def test_a_file_that_was_refused_multicast_needs_it() -> None:
    assert needs_multicast(NotRun(missing=MULTICAST_REASON), KITTENS, lacking=False)
    assert not needs_multicast(NotRun(missing="a GPU"), KITTENS, lacking=True)


def test_a_hostile_source_is_read_in_linear_time() -> None:
    """A second for a megabyte would already hold up the supervisor."""
    begin = time.process_time()
    assert not needs_multicast(CRASH, f"multimem = '{'/*' * 200_000}'\n", lacking=True)
    assert not needs_multicast(CRASH, f"multimem = {'(' * 5000}", lacking=True)
    assert time.process_time() - begin < 2
