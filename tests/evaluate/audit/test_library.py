"""The custom track knows the kit's library by the tokens of its kernels, however a candidate reaches them."""

from collections.abc import Iterator

import pytest

import peerlane as pl
from peerlane.device.collectives.strided import AXIS_EXCHANGE
from peerlane.device.host.source_tokens import token_hash
from peerlane.evaluate.audit.library import library_kernels
from peerlane.solutions import files

CALL = """
def solution(x, seq_dim, head_dim, group=None, unpadded_dim_size=0):
    member = group_of(group)
    whole = x.shape[seq_dim] * member.world_size
    kept = whole if unpadded_dim_size % member.world_size == 0 else unpadded_dim_size
    return exchange_axes(member, x, joined=seq_dim, cut=head_dim, kept=kept)
"""
REACHED = {
    "imported": "from peerlane.device.collectives.strided import exchange_axes\n",
    "reloaded": (
        "import importlib\nfrom peerlane.device.collectives import strided\nexchange_axes = importlib.reload(strided).exchange_axes\n"
    ),
    "executed": (
        "from pathlib import Path\nfrom peerlane.device.collectives import strided\n"
        "import sys, types\nown = types.ModuleType('own'); sys.modules['own'] = own\n"
        "exec(Path(strided.__file__).read_text(), own.__dict__)\nexchange_axes = own.exchange_axes\n"
    ),
}


@pytest.fixture(scope="module")
def evaluator() -> Iterator[pl.Evaluator]:
    with pl.Evaluator(2, "emulated", presets=("small",), modes=(), cases="timed", track="custom") as evaluator:
        yield evaluator


def test_comments_space_and_line_numbers_do_not_count() -> None:
    source = 'int f(int a) { return a+1; } // one\n#line 7 "mine.cu"\n/* two\n */ const char* s = "a // b";'
    assert token_hash(source) == token_hash('int f(int a){return a + 1;}const char*s="a // b";')
    assert token_hash(source) != token_hash(source.replace("a+1", "a+2")) != token_hash(source.replace("// b", "//b"))


def test_the_library_is_known() -> None:
    names = set(library_kernels().values())
    shared = {"axis_exchange", "share_counts", "gemm_reduce_scatter", "all_gather_gemm", "ring_attention", "clip_gradients"}
    assert shared | {"all_reduce_one_shot", "exchange_ring"} <= names and "gemm" not in names


@pytest.mark.parametrize("way", REACHED)
def test_a_library_kernel_violates_the_custom_track(way: str, evaluator: pl.Evaluator) -> None:
    verdict = evaluator.evaluate(36, f"from peerlane.device import group_of\n{REACHED[way]}{CALL}", name="36_mine_cuda").verdict
    assert verdict.kind == "track_violation" and AXIS_EXCHANGE.name in verdict.reason, verdict


def test_primitives_stay_a_backend(evaluator: pl.Evaluator) -> None:
    """The solution of problem 18 has a kernel of its own, on rows and packets."""
    result = evaluator.evaluate(18, files()[18].read_text(), name="18_mine_cuda")
    assert result.correct, result.verdict


@pytest.mark.parametrize("number", [33, 36, 38, 21, 52, 53, 59, 60])
def test_answers_of_one_call_are_refused(number: int, evaluator: pl.Evaluator) -> None:
    """What families of solutions share cannot be imported at all."""
    verdict = evaluator.evaluate(number, files()[number].read_text(), name=f"{number}_mine_cuda").verdict
    families = "peerlane.solutions.families" in files()[number].read_text()
    assert verdict.kind == ("import_error" if families else "track_violation"), verdict
