"""The hash of a problem's source: what judges and times it counts, words about it and wrong answers do not."""

import ast
import functools
import shutil
from pathlib import Path

import pytest

from peerlane.common.problem_files import OWN_FOLDER, OWN_PACKAGE
from peerlane.results.definitions import Packages
from peerlane.results.judged_source import JudgedSource

BROADCAST, LOOKUP, ZERO, LAYER, RING = (
    "p003_broadcast.py",
    "p010_embedding_lookup.py",
    "p041_zero1_optimizer_shard.py",
    "p049_moe_ep_balanced.py",
    "p054_ring_attention.py",
)
# A problem, a file, a text in it, and another in its place.
JUDGES = [
    (BROADCAST, BROADCAST, "src: int = 0", "src: int = 1"),
    (BROADCAST, BROADCAST, "src: int = 0", "src: float = 0"),
    (BROADCAST, BROADCAST, "dist.broadcast(received, src=src)", "dist.broadcast(received, src)"),
    (BROADCAST, BROADCAST, "shape=(4097,)", "shape=(4099,)"),
    (BROADCAST, BROADCAST, "replicated=True", "replicated=False"),
    (BROADCAST, "families/collective.py", 'if root == "any"', 'if root == "some"'),
    (BROADCAST, "families/collective.py", "16, 64, 256, 1 << 10", "16, 64, 1 << 10"),
    (LOOKUP, LOOKUP, "_HASH = 2654435761", "_HASH = 2654435762"),
    (LOOKUP, LOOKUP, "[order(ids[ids // rows == owner]) - owner * rows]", "[order(ids[ids // rows == owner])]"),
    (LOOKUP, LOOKUP, "egress_bytes=distinct", "egress_bytes=2 * distinct"),
    (ZERO, "families/zero.py", "(1 if rank else 2)", "(2 if rank else 2)"),
    (ZERO, "families/optimizer.py", "enough = 4096", "enough = 4097"),
    (LAYER, LAYER, "inner=14336", "inner=14337"),
    (LAYER, "families/moe_layer.py", "_JITTER = 0.2", "_JITTER = 0.3"),
    (LAYER, "families/moe_layer.py", "group: dist.ProcessGroup | None = None", "group: Any = None"),
    (RING, RING, "magnitude=magnitude", "magnitude=2 * magnitude"),
    (RING, "families/attention.py", "ring * local**2", "2 * ring * local**2"),
    (RING, "families/attention.py", "rowwise=3 * u", "rowwise=4 * u"),
    (RING, "contract/judge.py", "if ratio <= 1.0:", "if ratio <= 2.0:"),
    (RING, "contract/draw.py", ".normal_(shift, scale", ".normal_(shift, 2 * scale"),
    (RING, "contract/spec.py", "torch.bfloat16: 2.0**-8", "torch.bfloat16: 2.0**-7"),
]
DOES_NOT_JUDGE = [
    (BROADCAST, BROADCAST, "In the public benchmark", "There"),
    (BROADCAST, BROADCAST, 'title="Broadcast', 'title="A broadcast'),
    (BROADCAST, BROADCAST, "Every rank returns", "Each rank returns"),
    (BROADCAST, BROADCAST, "NCCL /", "MPI /"),
    (BROADCAST, BROADCAST, 'category="collective"', 'category="other"'),
    (BROADCAST, BROADCAST, '"ragged, tiny', '"tiny'),
    (BROADCAST, BROADCAST, "the tensor of the rank after src", "another tensor"),
    (BROADCAST, BROADCAST, "% c.case.world_size", "% 2"),
    (BROADCAST, BROADCAST, "root = root_argument(case, draw)\n", "root = (  # a comment\n        root_argument(case, draw)\n    )\n\n"),
    (BROADCAST, BROADCAST, "import torch.distributed as dist", "from torch import distributed as dist"),
    (BROADCAST, BROADCAST, "all ranks have the same answer", "for all are alike"),
    (BROADCAST, "families/collective.py", "result.view(-1)[-length:]", "result.view(-1)[:length]"),
    (BROADCAST, "families/collective.py", 'case.params.get("group")', 'case.params.get("groups")'),
    (BROADCAST, "contract/standard.py", '"all outputs one"', '"ones"'),
    (BROADCAST, "contract/faults.py", "TAIL = 8", "TAIL = 9"),
    (BROADCAST, "contract/spec.py", "what differs from the public", "all that differs from the public"),
    (LOOKUP, LOOKUP, "Every different row crosses", "Each row crosses"),
    (LOOKUP, LOOKUP, "stable=True, descending=True", "descending=True"),
    (LOOKUP, LOOKUP, "the host must know", "it must know"),
    (ZERO, ZERO, "The gradient may be reduced in any way.", ""),
    (ZERO, "families/zero.py", "own_parameters", "its_parameters"),
    (ZERO, "families/zero.py", "torch.cat(new[0].chunk", "torch.stack(new[0].chunk"),
    (ZERO, "families/training_step.py", "fp32_rounded_once", "rounded_once"),
    (ZERO, "families/training_step.py", "state(context, right, result) if state else result", "result"),
    (LAYER, LAYER, "there is nothing to choose", "nothing is to choose"),
    (LAYER, "families/moe_layer_answers.py", "the router decides how many", "the router says how many"),
    (RING, RING, "scores and sums in", "all in"),
    (RING, "contract/draw.py", "def octaves", "def powers"),
]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(OWN_FOLDER, tmp_path_factory.mktemp("suite") / "problems", ignore=shutil.ignore_patterns("__pycache__")))


def source_hash(folder: Path, problem: str) -> str:
    return JudgedSource(Packages({OWN_PACKAGE: folder})).hash(f"{OWN_PACKAGE}.{problem.removesuffix('.py')}")


unedited_hash = functools.cache(source_hash)


def hashes(suite: Path, problem: str, file: str, before: str, after: str) -> tuple[str, str]:
    """The problem's hash, and that with an edited file."""
    text = (suite / file).read_text()
    assert before in text, f"{file} has changed: name another text than {before!r} in this test"
    unedited = unedited_hash(suite, problem)
    try:
        (suite / file).write_text(text.replace(before, after, 1))
        return unedited, source_hash(suite, problem)
    finally:
        (suite / file).write_text(text)


@pytest.mark.parametrize(("problem", "file", "before", "after"), JUDGES)
def test_what_judges_counts(suite: Path, problem: str, file: str, before: str, after: str) -> None:
    unedited, edited = hashes(suite, problem, file, before, after)
    assert unedited != edited


@pytest.mark.parametrize(("problem", "file", "before", "after"), DOES_NOT_JUDGE)
def test_words_and_wrong_answers_do_not_count(suite: Path, problem: str, file: str, before: str, after: str) -> None:
    unedited, edited = hashes(suite, problem, file, before, after)
    assert unedited == edited


def test_only_problems_that_use_a_function_change_with_it(suite: Path) -> None:
    edit = ("families/collective.py", 'if root == "any"', 'if root == "some"')
    assert len(set(hashes(suite, BROADCAST, *edit))) == 2
    assert len(set(hashes(suite, RING, *edit))) == 1


@pytest.mark.parametrize("problem", [BROADCAST, LOOKUP, ZERO, LAYER, RING])
def test_formatting_and_comments_do_not_count(suite: Path, problem: str) -> None:
    before = source_hash(suite, problem)
    text = (suite / problem).read_text()
    try:
        (suite / problem).write_text(ast.unparse(ast.parse(text)))
        assert source_hash(suite, problem) == before
    finally:
        (suite / problem).write_text(text)


FAMILY = """
from peerlane.problems.contract import Expected, exactly as same

SIZE = 3
def copy(tensor): return tensor * SIZE
def unused(): pass
class Model:
    def oracle(self, case, inputs, rank) -> Expected:
        '''Answers.'''
        return same("out", copy(inputs[rank][0]))
    def wrong(self): ...
MODEL = Model()
"""
PROBLEM = """
from .family import MODEL
from peerlane.problems import contract as c

def reference(tensor): return tensor
def inputs(case, rank, draw):
    match case["kind"]:
        case [first, *rest]: name = f"a{first:>{len(rest)}}" "b" f"{rest!r}"
        case other: name = [other for other in case if (found := other)]
    return (draw.bits((2,), case.dtype), lambda c: c.wrong)
PROBLEM = c.Problem(id=1, reference=reference, inputs=inputs, oracle=MODEL.oracle, presets=(c.preset("small", "about"),))
"""


def test_a_package_of_ones_own_counts(tmp_path: Path) -> None:
    def changed(family: str, problem: str) -> bool:
        (tmp_path / "family.py").write_text(family)
        (tmp_path / "p1001_x.py").write_text(problem)
        found = JudgedSource(Packages({OWN_PACKAGE: OWN_FOLDER, "own": tmp_path})).hash("own.p1001_x")
        return found not in known and not known.add(found)

    known: set[str] = set()
    assert changed(FAMILY, PROBLEM)
    assert not changed(FAMILY.replace("def unused(): pass", "").replace("'''Answers.'''", ""), PROBLEM.replace('"about"', '"of it"'))
    assert not changed(
        FAMILY.replace("copy", "same_again"),
        PROBLEM.replace("from .family import MODEL", "from . import family").replace("MODEL.", "family.MODEL."),
    )
    assert changed(FAMILY.replace("SIZE = 3", "SIZE = 4"), PROBLEM)
    assert changed(FAMILY.replace("): ...", "): pass; return 3"), PROBLEM), "`.wrong` is mentioned"


def test_all_versions_of_python_agree(tmp_path: Path) -> None:
    """The digits were found with Python 3.11, 3.12 and 3.13."""
    contract = tmp_path / "contract"
    contract.mkdir()
    for name in ("__init__", "spec"):
        (contract / f"{name}.py").write_text("class Problem:\n    id: int\n    def answer(self): return self.id\n")
    (tmp_path / "family.py").write_text(FAMILY)
    (tmp_path / "p001_x.py").write_text(PROBLEM)
    assert JudgedSource(Packages({OWN_PACKAGE: tmp_path})).hash(f"{OWN_PACKAGE}.p001_x")[:16] == "f4b5064cda19921a"
