"""The corpus's table, the order in which it is judged, and what counts as expected."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import Peerlane
from docs.build.corpus import selftest_report
from peerlane.cli.exit_codes import ExitCode
from peerlane.errors import UsageError
from peerlane.evaluate.plan import EvaluationPlan, make_jobs
from peerlane.evaluate.selftest import run
from peerlane.evaluate.selftest.busy_cores import busy_cores
from peerlane.evaluate.selftest.outcome import Outcome, objection, read_outcomes, totals
from peerlane.evaluate.selftest.run import SelftestPlan, attributed, deal, order, selftest
from peerlane.evaluate.selftest.table import Corpus, Entry, load
from peerlane.report.selftest import objections, totals_lines
from peerlane.sandbox.process_tree import children
from sample_results import hung, on_cpu, result, wrong

HONEST = (
    "import torch.distributed as dist\n\ndef solution(tensor):\n    total = tensor.clone()\n    dist.all_reduce(total)\n    return total\n"
)
LAZY = "def solution(tensor):\n    return tensor.clone()\n"

TABLE = """
[rules]
outputs = "Outputs are judged"
races = "Races are provoked"
[rows]
C01 = "does nothing"
C02 = "does little"
A01 = "does its work"
[[candidate]]
row = "C01"
file = "1_c01_lazy_pytorch"
rule = "outputs"
cpu = ["wrong_result"]
cuda = ["wrong_result"]
quick = true
why = "contents differ"
[[candidate]]
row = "C02"
file = "1_c02_lazy_pytorch"
rule = "races"
cuda = ["unstable", "correct"]
why = "contents differ"
[[candidate]]
row = "A01"
file = "1_a01_honest_pytorch"
rule = "races"
cpu = ["correct"]
why = "it is right"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A corpus of three."""
    (tmp_path / "corpus.toml").write_text(TABLE)
    (tmp_path / "corpus").mkdir()
    for name, text in {"c01_lazy": LAZY, "c02_lazy": LAZY + "\n", "a01_honest": HONEST}.items():
        (tmp_path / "corpus" / f"1_{name}_pytorch.py").write_text(text)
    return tmp_path


@pytest.fixture
def corpus(root: Path) -> Corpus:
    return load(root)


def entry(**changes: Any) -> Entry:
    fields = {"row": "C01", "file": "1_c01_lazy_pytorch", "rule": "outputs", "why": "because", "cpu": ["wrong_result"]}
    return Entry.model_validate({**fields, **changes})


def test_entries_know_problem_and_kind(corpus: Corpus) -> None:
    lazy, _, honest = corpus.entries
    assert (lazy.problem, lazy.kind, lazy.world_size, honest.kind) == (1, "cheat", 2, "legitimate")
    assert corpus.path(lazy) == corpus.folder / "1_c01_lazy_pytorch.py"
    assert honest.accepted("cpu") == ("correct",) and honest.accepted("cuda") == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('row = "C02"', 'row = "C03"', "should be named"),
        ('C02 = "does little"\n', "", "C02"),
        ('rule = "outputs"', 'rule = "others"', "others"),
        ('cpu = ["wrong_result"]', 'cpu = ["wrong"]', "candidate.0.cpu"),
        ('cpu = ["correct"]\n', "", "judged nowhere"),
        ("quick = true", "quickly = true", "quickly"),
        ("[rules]", "[rules", "cannot read"),
        ('file = "1_a01_honest_pytorch"', 'file = "1_a01_gone_pytorch"', "1_a01_gone_pytorch, 1_a01_honest_pytorch"),
    ],
)
def test_a_table_that_is_wrong_says_where(root: Path, old: str, new: str, told: str) -> None:
    assert old in TABLE
    (root / "corpus.toml").write_text(TABLE.replace(old, new))
    with pytest.raises(UsageError, match=r"corpus\.toml") as error:
        load(root)
    assert told in str(error.value)


DERIVED = 'file = "1_c02_lazy_pytorch"\nbase = "1_c01_lazy_pytorch"\nreplace = [["tensor.clone()", "tensor"]]'


def test_an_entry_is_made_from_its_base(root: Path) -> None:
    (root / "corpus.toml").write_text(TABLE.replace('file = "1_c02_lazy_pytorch"', DERIVED))
    (root / "corpus" / "1_c02_lazy_pytorch.py").unlink()
    corpus = load(root)
    path = corpus.path(corpus.entries[1])
    assert path is not None and path.read_text() == LAZY.replace("tensor.clone()", "tensor") != LAZY


@pytest.mark.parametrize(("old", "new"), [("tensor.clone()", "nowhere"), ("1_c01_lazy_pytorch", "1_c99_gone_pytorch")])
def test_a_base_that_does_not_fit_says_why(root: Path, old: str, new: str) -> None:
    (root / "corpus.toml").write_text(TABLE.replace('file = "1_c02_lazy_pytorch"', DERIVED.replace(old, new)))
    (root / "corpus" / "1_c02_lazy_pytorch.py").unlink()
    with pytest.raises(UsageError, match=rf"1_c02_lazy_pytorch: .*{new}.*expected"):
        load(root)


def test_rows_are_chosen_by_ranges(corpus: Corpus) -> None:
    def rows(text: str | None, **more: bool) -> list[str]:
        return [item.row for item in corpus.select(text, **more)]

    assert rows(None) == ["C01", "C02", "A01"]
    assert rows("c01-c02") == ["C01", "C02"] and rows("A01,C02") == ["C02", "A01"]
    assert rows(None, quick=True) == ["C01"]
    for text in ("C01-A01", "C1", "C09", "", "C01-C02-C03"):
        with pytest.raises(UsageError):
            corpus.select(text)
    with pytest.raises(UsageError, match="quick"):
        corpus.select("A01", quick=True)


def test_legitimate_candidates_stand_between_the_others(corpus: Corpus) -> None:
    honest = corpus.entries[2]
    bad = [entry(file=f"1_c01_{number}_pytorch") for number in range(12)]
    twice = entry(file="1_c01_twice_pytorch", runs=2)
    for seed in range(20):
        sequence = order([*bad, twice, honest], [honest], random.Random(seed))
        assert sorted(item.file for item in sequence if item.kind == "cheat") == sorted([item.file for item in bad] + [twice.file] * 2)
        first = sequence.index(twice)
        assert sequence[first + 1] is twice, "runs of an entry follow each other"
        alone = [item for number, item in enumerate(sequence) if number != first]
        kinds = "".join(item.kind[0] for item in alone)
        assert kinds.endswith("l") and "c" * (run.BAD_PER_GOOD + 1) not in kinds
    assert order([honest], [honest], random.Random(0)) == [honest]
    assert order(bad[:2], [], random.Random(0)) in (bad[:2], bad[1::-1])


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_runs_get_equal_shares_of_every_verdict(runs: int) -> None:
    """Those that hang take seconds each, and those that are timed take as long: a run with more of them would be the last to end."""
    verdicts = ("correct", "hang", "wrong_result")
    due = [entry(file=f"1_c01_{verdict}_{number}_pytorch", cpu=(verdict,)) for number in range(7) for verdict in verdicts]
    for seed in range(20):
        shares = deal(due, runs, "cpu", random.Random(seed))
        assert sorted(item.file for share in shares for item in share) == sorted(item.file for item in due)
        for verdict in verdicts:
            counts = [sum(item.cpu == (verdict,) for item in share) for share in shares]
            assert max(counts) - min(counts) <= 1
    assert deal(due, runs, "cpu", random.Random(1)) != deal(due, runs, "cpu", random.Random(2))


def outcome(item: Entry, given: Any) -> Outcome:
    return Outcome.of(item, given, None)


def test_what_is_objected_to() -> None:
    assert objection(entry(), outcome(entry(), wrong(device="cpu"))) is None
    assert "expected wrong_result, got correct" in str(objection(entry(), outcome(entry(), on_cpu())))
    neutralised = entry(cuda=["correct"])
    assert objection(neutralised, outcome(neutralised, result())) == "its trick made it faster"
    legitimate = entry(row="A01", file="1_a01_honest_pytorch", cuda=["correct"])
    assert objection(legitimate, outcome(legitimate, result())) is None
    stuck = entry(cpu=["hang"], phase="exit")
    assert "in phase exit, got it in" in str(objection(stuck, outcome(stuck, hung(device="cpu"))))
    flagged = entry(cpu=["correct"], flags=["aliased_output"])
    assert "aliased_output" in str(objection(flagged, outcome(flagged, on_cpu())))


def test_totals_leave_out_candidates_that_could_not_run() -> None:
    cheat, honest = entry(), entry(row="A01", file="1_a01_honest_pytorch", cpu=["correct"])
    elsewhere = entry(row="A01", file="1_a01_other_cuda", cpu=["not_run"])
    judged = [
        (cheat, outcome(cheat, wrong(device="cpu"))),
        (cheat, outcome(cheat, on_cpu())),
        (honest, outcome(honest, on_cpu())),
        (elsewhere, outcome(elsewhere, on_cpu())),
    ]
    assert totals(judged) == {"bad": 2, "bad_ok": 1, "good": 1, "good_ok": 1}
    assert totals_lines(judged) == ["Cheats and bugs judged as expected: 1/2.", "Legitimate candidates accepted: 1/1."]


def test_a_run_is_stored_resumed_and_reported(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "out" / "selftest.jsonl"
    path.parent.mkdir()
    of_an_older_file = outcome(corpus.entries[0], wrong(device="cpu"))
    path.write_text(of_an_older_file.model_dump_json() + "\n")
    plan = SelftestPlan(corpus, corpus.entries[:1], "cpu", repeat=1, out=path.parent)
    first = selftest(plan)
    assert next((item.row, got.verdict) for item, got in first) == ("C01", "wrong_result")
    assert all(got.seconds > 0 and got.seconds == pytest.approx(sum(got.stage_seconds.values()), abs=1e-3) for _, got in first)
    assert read_outcomes(path) == [of_an_older_file, *(got for _, got in first)]
    with path.open("a") as file:
        file.write('{"schema_version": 1, "unfinis')
    assert [got for _, got in selftest(plan)] == [got for _, got in first], "nothing is left to do, and nothing was done again"
    report = selftest_report(corpus, first)
    assert "| C01 | 1_c01_lazy_pytorch | 2 | wrong_result 1 | wrong_result | yes |" in report
    assert "Cheats and bugs judged as expected: 1/1." in report and "isolation" in report
    assert objections(first) == []


def test_tracks_are_judged_side_by_side(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session serves both; another one would take seconds to start."""
    judged: list[EvaluationPlan] = []
    monkeypatch.setattr(run, "evaluate", lambda plan, progress: judged.append(plan))
    custom = corpus.entries[0].model_copy(update={"track": "custom"})
    corpus = dataclasses.replace(corpus, entries=(custom, *corpus.entries[1:]))
    selftest(SelftestPlan(corpus, corpus.entries, "cpu", isolation="L0"))
    (plan,) = judged
    assert {job.candidate.name: job.track for job in make_jobs(plan)} == {custom.file: "custom", corpus.entries[2].file: "open"}


def test_what_a_higher_tier_promises_is_not_judged_below_it(corpus: Corpus) -> None:
    confined = corpus.entries[0].model_copy(update={"isolation": "L1"})
    assert selftest(SelftestPlan(corpus, (confined,), "cpu", isolation="L0")) == []


def test_where_outcomes_cannot_be_stored_nothing_is_judged(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "evaluate", lambda plan, progress: pytest.fail("it was judged"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write results to .*--out"):
        selftest(SelftestPlan(corpus, corpus.entries[:1], "cpu", out=tmp_path / "file", isolation="L0"))


def test_outcomes_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "selftest.jsonl").write_text('{"schema_version": 0}\n')
    with pytest.raises(UsageError, match="line 1 is not an outcome"):
        read_outcomes(tmp_path / "selftest.jsonl")


def test_the_command_exits_by_what_was_expected(root: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.setattr("peerlane.evaluate.selftest.table.corpus_home", lambda: root)
    printed = json.loads(peerlane("selftest", "--json", "--out", str(root)).out)
    assert printed["totals"] == {"bad": 1, "bad_ok": 1, "good": 1, "good_ok": 1}
    assert printed["not_judged_here"] == ["1_c02_lazy_pytorch"] and printed["objections"] == []

    (root / "corpus.toml").write_text(TABLE.replace('cpu = ["wrong_result"]', 'cpu = ["hang"]'))
    done = peerlane("selftest", "--rows", "C01", "--out", str(root), code=ExitCode.NOT_CORRECT)
    assert "expected hang, got wrong_result" in done.out and "judged as expected: 0/1" in done.out


def test_false_verdicts_on_honest_candidates_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    """One that is not what its row says stands for an honest candidate that is accused."""
    monkeypatch.setattr("peerlane.evaluate.selftest.table.corpus_home", lambda: root)
    accused = TABLE.partition('[[candidate]]\nrow = "A01"')[2].replace("1_a01_honest", "2_a01_accused")
    (root / "corpus.toml").write_text(f'{TABLE}[[candidate]]\nrow = "A01"{accused}')
    (root / "corpus" / "2_a01_accused_pytorch.py").write_text(LAZY)
    arguments = ["selftest", "--honest", "--rows", "A01", "--load", "1", "--timeout", "500", "--world-size", "4", "--out", str(root)]
    done = peerlane(*arguments, code=ExitCode.NOT_CORRECT)
    assert "2_a01_accused_pytorch, W=4, cpu: wrong_type (false): " in done.out
    assert [line for line in done.out.splitlines() if line][-1] == "false verdicts: 1"
    assert {(item.file[:2], item.load, item.timeout) for item in read_outcomes(root / "selftest.jsonl")} == {("1_", 1, 500), ("2_", 1, 500)}

    done = peerlane(*arguments, "--json", code=ExitCode.NOT_CORRECT)  # nothing is judged again
    totals = {"correct": 1, "not_run": 0, "overloaded": 0, "harness_error": 0, "false": 1}
    assert json.loads(done.out)["totals"] == totals


def test_a_busy_or_missing_machine_accuses_nobody() -> None:
    honest = entry(row="A01", file="1_a01_honest_pytorch", cpu=["correct"])
    slow = outcome(honest, hung(device="cpu"))
    assert slow.honest_class == "false"
    assert slow.model_copy(update={"flags": ("overloaded",)}).honest_class == "overloaded"
    assert outcome(honest, on_cpu()).model_copy(update={"flags": ("overloaded",)}).honest_class == "correct"
    for verdict in ("not_run", "harness_error"):
        assert slow.model_copy(update={"verdict": verdict}).honest_class == verdict


def test_busy_cores_are_left_alone_at_the_end() -> None:
    """By the end of the block, and by the end of the process, however it comes."""
    with busy_cores(2):
        inside = children(os.getpid())
    assert len(inside - children(os.getpid())) == 2
    script = "import os, signal\nfrom peerlane.evaluate.selftest.busy_cores import busy_cores\n"
    script += "with busy_cores(1) as running:\n    print(*running, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{int(killed.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(killed.stdout)}").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--honest", "--load", "-1"], ["--load", "2"], ["--world-size", "4"], ["--emulated"], ["--repeat", "0"], ["--rows", "C02"],
        ["--rows", "X01"],
    ],
)  # fmt: skip
def test_requests_that_cannot_be(root: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], peerlane: Peerlane) -> None:
    monkeypatch.setattr("peerlane.evaluate.selftest.table.corpus_home", lambda: root)
    peerlane("selftest", *arguments, code=ExitCode.USAGE)


def test_without_a_gpu_the_advice_is_one_that_can_be_taken(monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.setattr("peerlane.cli.evaluation.gpu_count", lambda: 0)
    done = peerlane("selftest", "--gpu", code=ExitCode.USAGE)
    assert "leave out --gpu" in done.err and "--device" not in done.err


def test_the_committed_run_is_shown_candidate_by_candidate() -> None:
    """The table is read again, so that its entries are equal to those of the run, but not the same objects."""
    outcomes = read_outcomes(Path(__file__).parents[2] / "results" / "cpu" / "selftest.jsonl")
    shown = selftest_report(load(), attributed(load(), outcomes)).splitlines()
    lines = [line for line in shown if line.endswith("| yes |")]
    assert len(lines) == len({(item.file, item.world_size) for item in outcomes}) > 90
    assert not any(line.endswith("| NO |") for line in shown)
