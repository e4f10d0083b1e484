"""Tables for a paper: raw numbers a program reads, and LaTeX that compiles whatever a model is called."""

import csv
import re
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.generate.board import Board
from peerlane.generate.paper import escape_latex, latex_tables, write_csv
from peerlane.generate.samples import Sample, Setting, Speedup, Task
from peerlane.generate.summary import category_table
from peerlane.results.identity import NodeClass

PROBLEMS = {Task(1, "pkb"): "collective", Task(2, "pkb"): "collective", Task(18, "pkb"): "tensor_parallel"}
SETTING = Setting("open", NodeClass(kind="node", gpus=4, gpu="H200"), "pkb", 4)


def board(*models: str, timed: tuple[str, ...] | None = None) -> Board:
    """Right and wrong, one sample that was not judged. ``timed``: the models with speeds, by default all."""
    fast = {"graph": Speedup(1.25, 1.5, 1.75)}
    verdicts = [(1, 0, "correct"), (1, 1, "not_run"), (2, 0, "correct"), (2, 1, "hang"), (18, 0, "wrong_result"), (18, 1, "hang")]
    samples = [
        Sample(problem, number, kind, fast if kind == "correct" and model in (timed or models) else {}, author=model, setting=SETTING)
        for model in models
        for problem, number, kind in verdicts
    ]
    return Board(SETTING, samples, PROBLEMS)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_long_tables_hold_raw_numbers(tmp_path: Path) -> None:
    files = write_csv(tmp_path / "new" / "folder", board("=cmd|' /C calc'!A0", "b"), [1, 2], [1.0, 2.0])
    assert [file.stem for file in files] == ["metrics", "groups", "samples", "usage"]
    rows = read(files[0])
    assert {row["model"] for row in rows} == {"'=cmd|' /C calc'!A0", "b"}
    (correct,) = (row for row in rows if (row["model"], row["metric"], row["k"]) == ("b", "correct", "1"))
    assert float(correct["value"]) == pytest.approx(1 / 3) and float(correct["value_most"]) == pytest.approx(1 / 2)
    assert float(correct["low"]) < 1 / 3 < 1 / 2 < float(correct["high"]) and correct["problems"] == "3"
    assert {(row["mode"], row["p"]) for row in rows if row["metric"] == "fast"} == {("graph", "1.0"), ("graph", "2.0")}
    groups = read(files[1])
    (tensor,) = (row for row in groups if (row["model"], row["group"], row["metric"], row["k"]) == ("b", "tensor_parallel", "correct", "1"))
    assert (tensor["public_category"], tensor["public_problems"], tensor["value"]) == ("Tensor Parallel", "17", "0.0")
    samples = read(files[2])
    assert len(samples) == 12 and samples[0]["speedup_graph_low"] == "1.25" and samples[1]["judged"] == "False"


@pytest.mark.parametrize("timed", [None, (r"c^~\d",)])
def test_latex_has_a_header_of_two_rows(timed: tuple[str, ...] | None) -> None:
    text = latex_tables(board("a_b & 50%", r"c^~\d", timed=timed), [1, 2], 1.0, "graph")
    assert (
        text.count(r"\begin{table}") == text.count(r"\end{table}") == text.count(r"\caption{") == text.count(r"\label{tab:peerlane-") == 2
    )
    assert (
        r"\multicolumn{2}{c}{a\_b \& 50\%}" in text and r"\multicolumn{2}{c}{c\textasciicircum{}\textasciitilde{}\textbackslash{}d}" in text
    )
    assert r"category & problems & correct & faster & correct & faster \\" in text
    assert r"collective & 2 & 1--1.5 $\to$ 2 & " in text and r"\midrule total & 3 & " in text
    for table in text.split(r"\begin{tabular}")[1:]:
        wide = len(re.match(r"\{(\w+)\}", table)[1])  # type: ignore[index]
        body = [line for line in table.split(r"\end{tabular}")[0].splitlines() if line.endswith(r"\\")]
        for line in body:
            cells = re.split(r"(?<!\\)&", line)
            assert sum(int(found[1]) if (found := re.search(r"multicolumn\{(\d+)\}", cell)) else 1 for cell in cells) == wide


def test_all_that_latex_obeys_is_escaped() -> None:
    assert escape_latex("a\\{b}") == r"a\textbackslash{}\{b\}"
    assert not re.search(r"(?<!\\)[&%$#_]", escape_latex("&%$#_~^<>|"))
    assert escape_latex("[2ex]* a\n\nb\x1b") == "{[}2ex{]}{*} a  b "


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@1", "＝1", "\t=1", "\r=1", "\n=1", "a\r=1"])
def test_no_cell_begins_a_formula(name: str, tmp_path: Path) -> None:
    files = write_csv(tmp_path, board(name), [1], [1.0])
    (found,) = {row["model"] for row in read(files[0])}
    assert found[0] in "'a" and found[1:].isprintable()


def test_the_public_benchmarks_categories_stand_beside_ours() -> None:
    table = category_table(board("m"), [1], 1.0, "graph").markdown()
    assert "| tensor_parallel | 1 | Tensor Parallel: 17 |" in table and "| total | 3 | Total: 87 | 1 to 1.5 |" in table


def test_a_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(UsageError, match=r"--csv got .*file.*; name a folder"):
            write_csv(folder, board("m"), [1], [1.0])
