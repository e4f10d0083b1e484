"""``peerlane selftest``: judge the adversarial corpus, to see whether the evaluator is fooled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from peerlane.cli.evaluation import ISOLATION_HELP, RANKS_PER_GPU_HELP, Tier, choose_device, parse_ranks_per_gpu
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import one_of
from peerlane.cli.output import console, print_json, print_table
from peerlane.cli.progress import progress
from peerlane.common.place import Device, Place
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.report.selftest import Judged


def selftest(
    gpu: Annotated[bool, typer.Option("--gpu", help="Judge on GPUs; by default on CPU ranks.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only the quick set: one or two candidates of every kind.")] = False,
    repeat: Annotated[int, typer.Option(help="How many times each candidate is judged.")] = 1,
    rows: Annotated[str | None, typer.Option(help="Rows of the corpus, such as C01-C10,B14; by default all.")] = None,
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder that outcomes are added to; those that it holds count.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge the adversarial corpus: cheats and bugs must get their verdicts, and legitimate candidates between them must be accepted.

    Exit codes: 0 all as expected; 2 the request cannot be carried out; 3 some are not; 4 peerlane itself failed.
    """
    if repeat < 1:
        raise UsageError(f"--repeat got {repeat}: expected at least 1")
    if gpu and not Place.of(choose_device("auto")).has_gpus:
        raise UsageError("--gpu: no GPU is visible here; leave out --gpu to judge on CPU ranks, or see `peerlane doctor`")

    from peerlane.evaluate.selftest.outcome import totals
    from peerlane.evaluate.selftest.run import SelftestPlan
    from peerlane.evaluate.selftest.run import selftest as run
    from peerlane.evaluate.selftest.table import load
    from peerlane.report.selftest import objections, selftest_table, totals_lines

    corpus = load()
    device: Device = "cuda" if gpu else "cpu"
    entries = corpus.select(rows, quick=quick)
    if not any(entry.accepted(device) for entry in entries):
        raise UsageError(
            f"none of {', '.join(entry.file for entry in entries)} is judged on {device}" + ("" if gpu else "; add --gpu on a GPU node")
        )
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    shared = parse_ranks_per_gpu(ranks_per_gpu)
    with progress() as shown:
        judged = run(SelftestPlan(corpus, entries, device, repeat, out, tier, shared), shown)
    files = {outcome.file for _, outcome in judged}
    left_out = [entry.file for entry in entries if entry.file not in files]
    if as_json:
        outcomes = [json.loads(outcome.model_dump_json()) for _, outcome in judged]
        print_json({"outcomes": outcomes, "objections": objections(judged), "totals": totals(judged), "not_judged_here": left_out})
    else:
        printer = console()
        print_table(selftest_table(corpus, judged))
        for line in [*objections(judged), *totals_lines(judged)]:
            printer.print(line)
        if left_out:
            printer.print(
                f"Not judged here: {len(left_out)} candidates, made for the other device or promised from a higher isolation tier on."
            )
    raise typer.Exit(selftest_exit_code(judged))


def selftest_exit_code(judged: Judged) -> ExitCode:
    """Returns OK if every outcome is what the table promises."""
    from peerlane.evaluate.selftest.outcome import objection

    if any(outcome.verdict == "harness_error" for _, outcome in judged):
        return ExitCode.HARNESS
    return ExitCode.OK if all(objection(entry, outcome) is None for entry, outcome in judged) else ExitCode.NOT_CORRECT
