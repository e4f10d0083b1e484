"""A problem as data and as a page, shown on a problem made for these tests."""

import dataclasses
import math

import pytest
import torch

from docs.build import pages
from docs.build.evidence import reference_times
from docs.build.pages import overview
from peerlane import problems
from peerlane.errors import UsageError
from peerlane.hardware.profiles import B200_SXM, H200_SXM
from peerlane.problems import Case, Cost, Draw, GroupRef, KnownWrongAnswer, Problem, Tolerance, case, preset
from peerlane.problems.contract import describe
from peerlane.report.catalogue import argument_text, find_profile, page_world_size, plain, problem_detail
from peerlane.report.evidence import NOTHING, Measured, PublicTimes, SolutionTime, packaged_evidence
from peerlane.report.problem_page import page
from peerlane.report.problem_speeds import FAR, beside_public
from peerlane.report.stored_page import stored_page
from sample_results import result


def inputs(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor, float]:
    return draw.normal((case["rows"], 8), case.dtype), 0.5


def reference(x: torch.Tensor, scale: float, group: object = None) -> torch.Tensor:
    return x * scale


def tolerance(case: Case) -> dict[str, Tolerance]:
    """One rounding
    of the result."""
    return {"y": Tolerance(relative=2.0**-8 if case.dtype == torch.bfloat16 else 2.0**-24)}


SAMPLE = dataclasses.replace(
    problems.get(1),
    id=900,
    slug="sample",
    title="A sample | with a bar",
    reference=reference,
    inputs=inputs,
    tolerance=tolerance,
    cost=lambda case, rank: Cost(hbm_bytes=4.8e6, egress_bytes=rank * 450e3, ingress_bytes=0, flops={"bf16": 2e9}),
    presets=(
        preset("small", "few rows", case("a", torch.bfloat16, rows=3), case("b", torch.float32, rows=0, world_sizes=(2,))),
        preset("pkb", "more rows", case("bf16", torch.bfloat16, rows=7), case("public", torch.bfloat16, rows=7, variant="pkb")),
        preset("production_x", "most rows", case("bf16", torch.bfloat16, rows=10**9, nested={"k": [1, 2]})),
    ),
    known_wrong_answers=(KnownWrongAnswer("special", "wrong here only", lambda context: None, cases=("pkb/bf16",)),),
    excused={"previous": "it happens to be right"},
    graph=False,
    graph_reason="it synchronises",
    mutates=frozenset({"x"}),
    notes=("Worth knowing.",),
    world_sizes=(2, 4, 8),
)

SOLUTION = SolutionTime(
    machine="2x H100",
    preset="pkb",
    world_size=2,
    mode="graph",
    reference_us=30.0,
    solution_us=20.0,
    speedup=1.5,
    certain=True,
    utilisation=0.25,
)


def test_arguments_of_any_size_are_shown() -> None:
    small, pkb, production = problem_detail(SAMPLE, world_size=4)["presets"]
    assert small["cases"][0]["arguments"] == [{"name": "x", "value": "bfloat16[3, 8]"}, {"name": "scale", "value": "0.5"}]
    assert pkb["cases"][0]["arguments"][0]["value"] == "bfloat16[7, 8]"
    assert production["cases"][0]["arguments"][0]["value"] == "bfloat16[1000000000, 8]"
    assert production["cases"][0]["params"] == {"rows": 10**9, "nested": {"k": [1, 2]}}


def test_arguments_shaped_by_contents_are_drawn_if_small() -> None:
    def kept(case: Case, rank: int, draw: Draw) -> tuple[torch.Tensor, float]:
        x = draw.normal((case["rows"], 8), case.dtype)
        return x[: 1 + int(x.isfinite().all())], 0.5

    small, _, production = problem_detail(dataclasses.replace(SAMPLE, inputs=kept), world_size=4)["presets"]
    assert small["cases"][0]["arguments"][0]["value"] == "bfloat16[2, 8]" and production["cases"][0]["arguments"] is None


def test_a_case_of_another_world_size_is_named_without_figures() -> None:
    other = problem_detail(SAMPLE, world_size=4)["presets"][0]["cases"][1]
    assert other["label"] == "b" and other["world_sizes"] == [2] and other["cost"] is None and other["arguments"] is None
    assert problem_detail(SAMPLE, world_size=2)["presets"][0]["cases"][1]["arguments"][0]["value"] == "float32[0, 8]"


def test_cost_is_the_busiest_ranks_and_depends_on_the_profile() -> None:
    timed = problem_detail(SAMPLE, world_size=4)["presets"][1]["cases"][0]
    between = {"network_egress_bytes": 0.0, "network_ingress_bytes": 0.0}
    assert timed["cost"] == {"flops": {"bf16": 2e9}, "hbm_bytes": 4.8e6, "egress_bytes": 3 * 450e3, "ingress_bytes": 0.0, **between}
    assert timed["roofline"]["bound_by"] == "nvlink" and timed["roofline"]["bound_us"] == pytest.approx(3.0)
    faster = problem_detail(SAMPLE, world_size=4, profile=B200_SXM)["presets"][1]["cases"][0]["roofline"]
    assert faster["times_us"]["nvlink"] == pytest.approx(1.5)


def test_page() -> None:
    text = page(problem_detail(SAMPLE, world_size=4))
    for line in (
        "solution(x: torch.Tensor, scale: float, group: object = None) -> torch.Tensor",
        "* **Launch modes:** eager (no CUDA graph: it synchronises)",
        "* **May overwrite:** `x`",
        "| `small` | a | bfloat16 | `x`: bfloat16[3, 8], `scale`: 0.5 |",
        "| `small` | b | float32 | only on 2 ranks |",
        "| `pkb` | bf16, public (variant pkb) | bfloat16 | `x`: bfloat16[7, 8], `scale`: 0.5 |",
        "| `production_x` | bf16 | bfloat16 | `x`: bfloat16[1000000000, 8], `scale`: 0.5 |",
        "## Cost and roofline on 4 ranks",
        "| `pkb` | 2e+09 bf16 | 4.8 MB | 1.35 MB | 0 B | 3 | nvlink |",
        "The bound is computed from the H200 SXM datasheet; it is not a measurement.",
        "One rounding of the result.",
        "| y | small/a, pkb/bf16, pkb/public, production_x/bf16 | 0.00391 | - | - | - | - |",
        "* `special`: wrong here only (in pkb/bf16)",
        "* `previous`: it happens to be right",
        "* Worth knowing.",
    ):
        assert line in text
    assert "* `previous`: the right answer to the slot before" not in text


def test_overview_escapes_what_would_break_the_table() -> None:
    rows = [line for line in overview([problem_detail(SAMPLE, world_size=4)], {}).splitlines() if "sample" in line]
    assert rows == [
        "| 900 | [sample](p900_sample.md): A sample \\| with a bar | tensor, data | 1.35 MB | 3 | 3 | nvlink | not measured | - |"
    ]


@pytest.mark.parametrize(("sizes", "chosen"), [((2, 4, 8), 4), ((2,), 2), ((3, 6), 3), ((8,), 8)])
def test_pages_show_four_ranks_where_they_can(sizes: tuple[int, ...], chosen: int) -> None:
    problem: Problem = dataclasses.replace(SAMPLE, world_sizes=sizes)
    assert page_world_size(problem) == chosen


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3, dtype=torch.int32), "int32[2, 3]"),
        (torch.zeros(()), "float32[]"),
        (None, "None"),
        ("sum", "'sum'"),
        (GroupRef("tp"), "process group tp"),
        ([torch.zeros(2), torch.zeros(2)], "list of 2: float32[2]"),
        ((torch.zeros(2), 1), "tuple of 2: float32[2], 1"),
        ([], "list of 0"),
        ({"w": torch.zeros(1)}, "dict: w=float32[1]"),
        (object(), "object"),
    ],
)
def test_argument_text(value: object, text: str) -> None:
    assert argument_text(describe(value)) == text


def test_plain_values_are_json() -> None:
    assert plain({"a": (1, torch.bfloat16), 2: math.inf, "r": range(2), "n": None}) == {
        "a": [1, "bfloat16"],
        "2": "inf",
        "r": [0, 1],
        "n": None,
    }


def test_profiles_are_found_by_their_first_word() -> None:
    assert find_profile("h200") is H200_SXM and find_profile(" H200 sxm ") is H200_SXM
    with pytest.raises(UsageError, match="there are: H100 SXM, H200 SXM, B200 SXM"):
        find_profile("h20")


def test_pages_lead_with_the_reference_and_fold_cases() -> None:
    problem = problems.get(13)
    text = pages.page(problem, problem_detail(problem, world_size=4), Measured(solutions=(SOLUTION,)))
    order = (
        "def reference", "<!-- ![Problem 13 on 4 ranks", "peerlane new 13\n", "](../../src/peerlane/solutions/p013_gemm_allreduce.py)",
        "| 2x H100 |", "## Cost", "<summary>The reference's speed",
    )  # fmt: skip
    assert sorted(order, key=text.index) == list(order)
    assert text.index("<details") > text.index("## Cost") and text.count("<details markdown>") == text.count("</details>") == 4


def test_a_long_reference_is_folded_below_its_signature() -> None:
    text = pages.opening(problem_detail(SAMPLE, world_size=4), "line\n" * 200)
    assert text.index("solution(x:") < text.index("<summary>The reference in PyTorch, 200 lines</summary>")


def test_a_problem_without_a_kit_scaffold_has_pytorch_commands() -> None:
    problem = problems.all_problems(2)[0]
    text = pages.page(problem, problem_detail(problem, world_size=4, nodes=2), Measured())
    assert f"peerlane new {problem.id} --backend pytorch\npeerlane eval " in text and "--device cpu --nodes 2 --world-size 4" in text


def test_facts_that_say_nothing_and_equal_limits_take_no_lines() -> None:
    wide = dataclasses.replace(
        SAMPLE, mutates=frozenset(), tolerance=lambda case: {f"y{place}": Tolerance(relative=0.5) for place in range(9)}
    )
    text = page(problem_detail(wide, world_size=4))
    assert "May overwrite" not in text and "nothing" not in text.partition("## Facts")[2].partition("\n## ")[0]
    assert "| 9 outputs | small/a, pkb/bf16, pkb/public, production_x/bf16 | 0.5 |" in text


def test_uncertain_speedups_and_virtual_nodes_are_marked() -> None:
    virtual = SOLUTION.model_copy(update={"machine": "1x H200, virtual node", "virtual": True, "certain": False, "utilisation": None})
    text = page(problem_detail(SAMPLE, world_size=4), Measured(solutions=(virtual,)))
    assert "| 1x H200, virtual node | 2 | `pkb` | graph | 30.0 | 20.0 | 1.50 (noise) | – |" in text
    assert "say nothing about links or NCCL" in text and "On nodes the reference" not in text
    assert "On nodes the reference" in page(problem_detail(SAMPLE, world_size=4), Measured(solutions=(SOLUTION,)))


def test_times_compare_with_the_public_reference_and_say_why() -> None:
    sample = dataclasses.replace(SAMPLE, speed_note="A better idiom.")
    measured = Measured(times=tuple(reference_times(result())), public=PublicTimes(mean_us=80.0, min_us=60.0))
    detail = problem_detail(sample, world_size=4)
    text = page(detail, measured)
    assert "takes 80 us per call in eager mode on such a node, this one 40 us. A better idiom." in text
    assert "| `pkb` | 4 | 40 | 30 |" in text
    assert "| 40 | 30 |" in overview([detail], {900: measured})
    assert "not measured | - |" in overview([detail], {})


@pytest.mark.parametrize(
    ("eager_us", "graph_us", "public", "why"),
    [
        (100.0, 90.0, PublicTimes(mean_us=100.0, min_us=90.0), ""),
        (131.0, 40.0, PublicTimes(mean_us=100.0, min_us=90.0), "replayed from a graph this one takes 40 us"),
        (131.0, 131.0, PublicTimes(mean_us=100.0, min_us=90.0), ""),
        (69.0, 40.0, PublicTimes(mean_us=100.0, min_us=90.0), "the shortest took 90 us"),
        (60.0, 40.0, PublicTimes(mean_us=100.0, min_us=90.0), ""),
    ],
)
def test_what_the_times_themselves_explain_is_said(eager_us: float, graph_us: float, public: PublicTimes, why: str) -> None:
    text = beside_public(public, {"eager": eager_us, "graph": graph_us})
    assert f"this one {eager_us:.3g} us." in text and why in text
    assert bool(why) == (text.count(". ") > 0)


def test_without_a_graph_nothing_is_said_of_one() -> None:
    assert "graph" not in beside_public(PublicTimes(mean_us=100.0, min_us=90.0), {"eager": 200.0})


@pytest.mark.parametrize("number", [4, 13, 73, 101])
def test_the_page_that_show_prints_is_in_the_documentation(number: int) -> None:
    problem = problems.get(number)
    assert stored_page(number) == page(
        problem_detail(problem, world_size=page_world_size(problem)), packaged_evidence().get(number, NOTHING)
    )


def test_references_unlike_the_public_one_have_a_page_with_why() -> None:
    evidence = packaged_evidence()
    far = []
    for problem in problems.all_problems():
        measured = evidence[problem.id]
        own = {time.mode: time.reference_us for time in measured.times if time.preset == "pkb" and time.world_size == 4}
        assert measured.public is not None
        if not 1 - FAR <= own["eager"] / measured.public.mean_us <= 1 + FAR:
            far.append(problem.id)
            why = problem.speed_note or beside_public(measured.public, own).count(". ") > 0
            assert why, f"nothing says why problem {problem.id} is far off"
    assert len(far) > 10


def test_a_problem_between_nodes_has_a_roofline_of_both_tiers() -> None:
    problem = problems.all_problems(2)[0]
    detail = problem_detail(problem, world_size=4, nodes=2)
    rows = {(item["cluster"], item["preset"]): item for item in detail["clusters"]}
    assert [cluster for cluster, preset in rows if preset == "pkb"] == ["2x2", "2x4", "2x8", "4x8"]
    times = rows["2x4", "pkb"]["roofline"]["times_us"]
    assert times["network"] == pytest.approx(rows["2x4", "pkb"]["cost"]["network_egress_bytes"] / 50e3) and times["nvlink"] > 0
    text = page(detail)
    assert "## Roofline by tier" in text and "| 4x8 |" in text and "**Nodes:** 2, 4" in text
    assert "Roofline by tier" not in page(problem_detail(SAMPLE, world_size=4))
