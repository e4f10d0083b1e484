"""``peerlane bundle`` and ``peerlane verify``: a judged run as one file, and another evaluation of what it claims."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from peerlane.cli.evaluation import ISOLATION_HELP, Tier, choose_device
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import one_of
from peerlane.cli.output import PIPED_TABLE, console, print_json, print_table
from peerlane.cli.progress import progress
from peerlane.common.place import Device
from peerlane.common.words import counted
from peerlane.errors import UsageError

if TYPE_CHECKING:
    from peerlane.evaluate.candidates import CandidateFile
    from peerlane.generate.run_folder import RunFolder
    from peerlane.publish.bundle import Bundle
    from peerlane.publish.verify import PlanKey, Verification
    from peerlane.results.result import Result


def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A judged run: of `generate`, of `agent`, or a folder of `eval --model`.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.zip", help="By default RUN.peerlane.zip, beside the run.")] = None,
) -> None:
    """Pack a judged run into one file that others can verify: candidates, results, and where they were judged."""
    from peerlane.publish.bundle import ENDING, write_bundle

    file = out if out is not None else run.resolve().with_name(run.resolve().name + ENDING)
    if file.suffix != ".zip":
        raise UsageError(f"--out got {file}: expected a name that ends in .zip")
    manifest = write_bundle(run, file)
    print(f"written: {file}: {counted(manifest.candidates, 'candidate')} and {counted(manifest.results, 'result')} of {manifest.author}")
    for setting in manifest.settings:
        print(f"  {setting}")


def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file of `peerlane bundle`.")],
    sample: Annotated[int | None, typer.Option(min=1, metavar="N", help="Judge N results chosen at random; by default all.")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cpu, or emulated: kernels of the device kit, without a GPU.")] = "auto",
    isolation: Annotated[str | None, typer.Option(help=ISOLATION_HELP)] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where candidates and new results go; by default BUNDLE.verified.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Judge the candidates of a bundle anew, and say where the outcome differs from what the bundle claims.

    The outcome is kept beside the bundle, where `peerlane page` finds it. A second run continues a stopped one. Exit codes: 0
    nothing differs, 1 something does, 2 the bundle cannot be read.
    """
    from peerlane.common.files import write_atomically
    from peerlane.publish.bundle import read_bundle
    from peerlane.publish.verify import plans, verification, verification_file
    from peerlane.results.reader import FILE, newest, read_results

    opened = read_bundle(bundle)
    folder = out if out is not None else bundle.with_name(f"{bundle.name}.verified")
    run = opened.unpack(folder / "claimed")
    claims = opened.claims(run)
    claimed = claims if sample is None or sample >= len(claims) else random.SystemRandom().sample(claims, sample)
    chosen_device = choose_device(device, emulated=True)
    tier = None if isolation is None else cast(Tier, one_of(isolation, ("L0", "L1", "L2"), "--isolation"))
    for key, group in plans(claimed).items():
        _judge(key, _candidates(run, group), chosen_device, tier, folder)
    checks = newest(read_results(folder / FILE))
    verified = verification(opened, claims, checks)
    write_atomically(verification_file(bundle), (verified.model_dump_json(indent=2) + "\n").encode())
    if as_json:
        print_json({"standing": verified.standing, **verified.model_dump(mode="json", exclude={"results", "environments"})})
    else:
        _print(opened, verified)
    raise typer.Exit(ExitCode.CHECK_FAILED if verified.standing == "differs" else ExitCode.OK)


def _candidates(run: RunFolder, claims: Sequence[Result]) -> list[CandidateFile]:
    from peerlane.evaluate.candidates import candidate_file

    files = {}
    for key, path in run.candidates():
        file = candidate_file(path, run.path)
        files[key.problem, file.sha256] = replace(file, name=key.folder, problem=key.problem, labels=(("model", run.settings.model),))
    return [files[claim.problem.id, claim.candidate.sha256] for claim in claims]


def _judge(key: PlanKey, candidates: list[CandidateFile], device: Device, tier: Tier | None, folder: Path) -> None:
    from peerlane.evaluate import EvaluationPlan, evaluate

    plan = EvaluationPlan(
        candidates=candidates,
        presets=(key.preset,),
        world_sizes=(key.world_size,),
        variant=key.variant,
        track=key.track,
        cases=key.cases,
        modes=key.modes,
        device=device,
        isolation=tier,
        out=folder,
    )
    with progress() as shown:
        evaluate(plan, shown)


def _print(opened: Bundle, verified: Verification) -> None:
    from peerlane.report.tables import TextTable

    out = console()
    out.print(f"{opened.manifest.author}: {verified}")
    open_findings = [finding for finding in verified.findings if finding.agreement in ("differs", "not_judged")]
    if open_findings:
        table = TextTable(["problem", "candidate", "preset", "W", "outcome", "where"], right={"problem", "W"})
        for item in open_findings:
            table.add(str(item.problem), item.candidate, item.preset, str(item.world_size), item.agreement, item.said)
        print_table(table, PIPED_TABLE)
