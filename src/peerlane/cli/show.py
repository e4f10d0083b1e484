"""``peerlane show``: everything about one problem."""

from typing import Annotated

import typer

from peerlane.cli.options import ProblemFolders, words
from peerlane.cli.output import print_json, print_markdown

USUAL_PROFILE = "h200"


def show(
    problem_name: Annotated[str, typer.Argument(metavar="PROBLEM", help="The problem's number or name, such as 13 or gemm_allreduce.")],
    problems_folders: ProblemFolders = None,
    preset: Annotated[str | None, typer.Option(help="Only these presets, separated by commas; production or sweep: all of those.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks; 4 unless the problem forbids it.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; the fewest that the problem runs on.")] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile whose datasheet the roofline uses.")] = USUAL_PROFILE,
    source: Annotated[bool, typer.Option("--source", help="Print the reference alone, as one file that runs by itself.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show one problem: signature, meaning, presets with shapes, cost and roofline, error model, known wrong answers."""
    from peerlane.common.problem_files import number_named
    from peerlane.report.stored_page import stored_page

    number = number_named(problem_name)
    usual = (preset, world_size, nodes, profile, source, as_json) == (None, None, None, USUAL_PROFILE, False, False)
    if usual and (text := stored_page(number)) is not None:
        print_markdown(text)
        return

    from peerlane import problems
    from peerlane.report.catalogue import find_profile, page_world_size, problem_detail
    from peerlane.report.evidence import NOTHING, packaged_evidence
    from peerlane.report.problem_page import page

    problem = problems.get(number)
    if source:
        from peerlane.problems.reference_source import reference_source

        text = reference_source(problem)
        if as_json:
            print_json({"problem": problem.id, "reference_source": text})
        else:
            print(text, end="" if text.endswith("\n") else "\n")
        return
    detail = problem_detail(
        problem,
        world_size=(page_world_size(problem) if nodes in (None, 1) else 2 * nodes) if world_size is None else world_size,
        nodes=nodes,
        presets=None if preset is None else words(preset, "--preset"),
        profile=find_profile(profile),
    )
    if as_json:
        print_json(detail)
        return
    print_markdown(page(detail, packaged_evidence().get(problem.id, NOTHING)))
