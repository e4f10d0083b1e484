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
from peerlane.errors import UsageError
from peerlane.place import Device, Place

if TYPE_CHECKING:
    from peerlane.report.selftest import Judged
    from peerlane.selftest.table import Corpus


def selftest(
    gpu: Annotated[bool, typer.Option("--gpu", help="Judge on GPUs; by default on CPU ranks.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Only the quick set: one or two candidates of every kind.")] = False,
    repeat: Annotated[int, typer.Option(help="How many times each candidate is judged.")] = 1,
    rows: Annotated[str | None, typer.Option(help="Rows of the corpus, such as C01-C10,B14; by default all.")] = None,
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    honest: Annotated[bool, typer.Option("--honest", help="Judge only honest candidates, and count false verdicts.")] = False,
    emulated: Annotated[
        bool, typer.Option("--emulated", help="With --honest: judge solutions and kernels too, on emulated ranks. Takes long.")
    ] = False,
    world_size: Annotated[int | None, typer.Option(help="With --honest: number of ranks; by default 2.")] = None,
    load: Annotated[int, typer.Option(help="With --honest: how many processes keep cores busy meanwhile.")] = 0,
    timeout: Annotated[float | None, typer.Option(help="With --honest: seconds that one evaluation may take; by default any.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder that outcomes are added to; those that it holds count.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge the adversarial corpus: cheats and bugs must get their verdicts, and legitimate candidates between them must be accepted.

    With --honest: only candidates that must be accepted, peerlane's own solutions among them, with the time limits of an evaluation.

    Exit codes: 0 all as expected; 2 the request cannot be carried out; 3 some are not; 4 peerlane itself failed.
    """
    if repeat < 1:
        raise UsageError(f"--repeat got {repeat}: expected at least 1")
    if gpu and not Place.of(choose_device("auto")).has_gpus:
        raise UsageError("--gpu: no GPU is visible here; leave out --gpu to judge on CPU ranks, or see `peerlane doctor`")

    if not honest and (emulated or world_size is not None or load or timeout is not None):
        raise UsageError("--emulated, --world-size, --load and --timeout are for honest candidates: add --honest, or leave them out")
    if load < 0:
        raise UsageError(f"--load got {load}: expected at least 0")
    if gpu and emulated:
        raise UsageError("--gpu and --emulated: expected one of them; GPUs run all that emulated ranks run")

    from peerlane.report.selftest import objections, selftest_table, totals_lines
    from peerlane.selftest.outcome import totals
    from peerlane.selftest.run import SelftestPlan
    from peerlane.selftest.run import selftest as run
    from peerlane.selftest.table import load as load_corpus
    from peerlane.settings import SELFTEST_DEADLINES, Deadlines

    corpus = load_corpus().honest(world_size or 2) if honest else load_corpus()
    entries = corpus.select(rows, quick=quick)
    devices: list[Device] = ["cuda"] if gpu else ["cpu", "emulated"] if emulated else ["cpu"]
    if not any(entry.accepted(device) for entry in entries for device in devices):
        raise UsageError(
            f"none of {', '.join(entry.file for entry in entries)} is judged on {' or '.join(devices)}"
            + ("" if gpu else "; add --gpu on a GPU node")
        )
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    shared = parse_ranks_per_gpu(ranks_per_gpu)
    deadlines = Deadlines() if honest else SELFTEST_DEADLINES
    judged = []
    with progress() as shown:
        for device in devices:
            plan = SelftestPlan(corpus, entries, device, repeat, out, tier, shared, timeout, deadlines, load)
            judged += [(entry, outcome) for entry, outcome in run(plan, shown) if not honest or outcome.world_size == entry.world_size]
    files = {outcome.file for _, outcome in judged}
    left_out = [entry.file for entry in entries if entry.file not in files]
    if honest:
        _show_honest(corpus, judged, left_out, as_json=as_json)
        raise typer.Exit(honest_exit_code(judged))
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


def _show_honest(corpus: Corpus, judged: Judged, left_out: list[str], *, as_json: bool) -> None:
    """Prints what honest candidates got, with the number of false verdicts last."""
    from peerlane.report.selftest import accusations, honest_table, honest_totals

    totals, lines = honest_totals(judged), accusations(judged)
    if as_json:
        outcomes = [json.loads(outcome.model_dump_json()) for _, outcome in judged]
        print_json({"outcomes": outcomes, "not_correct": lines, "not_judged_here": left_out, "totals": totals})
        return
    printer = console()
    print_table(honest_table(corpus, judged))
    for line in lines:
        printer.print(line)
    if left_out:
        printer.print(f"Not judged here: {len(left_out)} candidates, made for other devices: see --gpu and --emulated.")
    for kind, count in totals.items():
        printer.print(f"{'false verdicts' if kind == 'false' else kind}: {count}")


def honest_exit_code(judged: Judged) -> ExitCode:
    """Returns OK if no honest candidate got a false verdict, and peerlane itself did not fail."""
    classes = {outcome.honest_class for _, outcome in judged}
    return ExitCode.NOT_CORRECT if "false" in classes else ExitCode.HARNESS if "harness_error" in classes else ExitCode.OK


def selftest_exit_code(judged: Judged) -> ExitCode:
    """Returns OK if every outcome is what the table promises."""
    from peerlane.selftest.outcome import objection

    if any(outcome.verdict == "harness_error" for _, outcome in judged):
        return ExitCode.HARNESS
    return ExitCode.OK if all(objection(entry, outcome) is None for entry, outcome in judged) else ExitCode.NOT_CORRECT
