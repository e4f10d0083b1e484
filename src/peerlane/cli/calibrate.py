"""``peerlane calibrate``: check that tolerances accept right answers and refuse wrong ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from peerlane.cli.evaluation import RANKS_PER_GPU_HELP, WORLD_SIZES_HELP, choose_device, default_world_sizes, parse_ranks_per_gpu
from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.options import ProblemFolders, positive_integers, words
from peerlane.cli.output import console, print_json, print_table


def calibrate(
    problem: Annotated[str, typer.Option(help="Problems, such as 1-8,13, or all.")] = "all",
    problems_folders: ProblemFolders = None,
    preset: Annotated[
        str, typer.Option(help="Presets, separated by commas: small, pkb, production, production_first, bandwidth, or one by name.")
    ] = "small",
    world_size: Annotated[str | None, typer.Option(help=WORLD_SIZES_HELP)] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    ranks_per_gpu: Annotated[str, typer.Option(metavar="NUMBER", help=RANKS_PER_GPU_HELP)] = "auto",
    out: Annotated[Path | None, typer.Option(help="File that records are added to; what it holds is not done again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how far references, alternative solutions and wrong answers are from what is allowed.

    Exit codes: 0 all sound; 1 something is not; 2 the request cannot be carried out.
    """
    presets = words(preset, "--preset")
    sizes = None if world_size is None else positive_integers(world_size, "--world-size")
    rank_device = choose_device(device)

    from peerlane.evaluate.selftest.calibrate import CalibrationPlan, device_name, job_key, jobs_of, read_calibrations, sound
    from peerlane.evaluate.selftest.calibrate import calibrate as run
    from peerlane.report.selftest import calibration_table

    shared = parse_ranks_per_gpu(ranks_per_gpu)
    plan = CalibrationPlan(problem, presets, sizes or default_world_sizes(rank_device, shared), rank_device, out, ranks_per_gpu=shared)
    if sizes is None:
        plan = replace(plan, world_sizes=tuple(size for size in plan.world_sizes if jobs_of(plan, size)) or plan.world_sizes)
    notes = console(stderr=True)
    records = list(run(plan, notes.print))
    if out is not None:
        name = device_name(plan)
        asked = {job_key(job, name) for size in plan.world_sizes for job in jobs_of(plan, size)}
        records = [item for item in read_calibrations(out) if item.key in asked]
    if as_json:
        print_json({"calibrations": [json.loads(item.model_dump_json()) for item in records]})
    else:
        print_table(calibration_table(records))
        for item in records:
            for complaint in item.complaints:
                console().print(f"{item.problem} {item.preset} W={item.world_size}: {complaint}")
    raise typer.Exit(ExitCode.OK if sound(records) else ExitCode.CHECK_FAILED)
