"""``peerlane doctor``: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peerlane.cli.exit_codes import ExitCode
from peerlane.cli.output import console, print_json, print_table
from peerlane.common.place import Device, Place

if TYPE_CHECKING:
    from peerlane.hardware.ceilings import Ceilings
    from peerlane.hardware.doctor import Check

_MECHANISMS_S = 90.0  # the measurement takes about 10 s, and compiles its kernels first


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Measure the ceilings of GPUs and links, and store them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine has, what is missing and how to get it; with --measure, how fast its GPUs and links are.

    Exit codes: 0; 1 if peerlane cannot work here, or if nothing could be measured.
    """
    from peerlane.hardware.ceilings import load_ceilings, save_ceilings
    from peerlane.hardware.doctor import diagnose
    from peerlane.hardware.environment import node_class, record
    from peerlane.hardware.topology import discover

    topology = discover()
    node = node_class(record(topology))
    checks = [*diagnose(topology), *isolation_checks("cuda" if topology.gpus else "cpu")]
    ceilings = load_ceilings(node)
    if measure:
        # Every probe is a process of its own, so this one never gets a CUDA context.
        from peerlane.hardware.measure import measure_node

        ceilings = measure_node()
        if len(topology.gpus) > 1 and ceilings.figures:
            ceilings = with_mechanisms(ceilings)
        if ceilings.figures:
            save_ceilings(ceilings)
    if as_json:
        print_json({"node": node, "checks": [asdict(check) for check in checks], "ceilings": ceilings.to_json() if ceilings else None})
    else:
        _print(node, checks, ceilings)
    broken = any(check.status == "fail" for check in checks) or (measure and not (ceilings and ceilings.figures))
    raise typer.Exit(ExitCode.CHECK_FAILED if broken else ExitCode.OK)


def with_mechanisms(ceilings: Ceilings) -> Ceilings:
    """Adds the figures of `peerlane bench mechanisms` to the ceilings, or a note that says why they are missing."""
    from peerlane.errors import UsageError
    from peerlane.report.mechanisms import FILE, as_ceilings, read_mechanisms

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "peerlane", "bench", "mechanisms", "--out", folder]
        try:
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MECHANISMS_S, check=False)
            if ran.returncode == 0:
                return ceilings.joined(as_ceilings(read_mechanisms(Path(folder) / FILE).mechanisms))
            why = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            why = f"it did not end within {_MECHANISMS_S:g} s"
        except UsageError as error:
            why = str(error)
    return ceilings.joined({}, (f"mechanisms: not measured: {why}",))


def isolation_checks(device: Device) -> list[Check]:
    """Checks how far this machine can confine candidates: one check per tier above L0."""
    from peerlane.errors import UsageError
    from peerlane.evaluate.processes.sharing import sharing_failure
    from peerlane.hardware.doctor import Check
    from peerlane.sandbox.confine import OWN_UID
    from peerlane.sandbox.isolation import Tier, choose, in_short
    from peerlane.settings import Deadlines

    remedies: dict[Tier, str] = {
        "L1": "a newer kernel or a less restricted container: docs/isolation.md",
        "L2": "apt-get install bubblewrap",
    }
    checks = []
    for tier, remedy in remedies.items():
        name = f"isolation {tier}"
        try:
            isolation = choose(tier, device)
        except UsageError as error:
            checks.append(Check(name, "absent", str(error), remedy))
            continue
        if Place.of(device).has_gpus and (failure := sharing_failure(isolation, device, Deadlines())):
            detail = f"confined ranks cannot share GPU memory with trusted ones: {in_short(failure)}"
            checks.append(Check(name, "absent", detail, "docs/isolation.md; candidates that you trust can be judged in L0"))
            continue
        lacking = isolation.missing.keys() - {OWN_UID}  # only root has users to spare; Landlock stops signals too
        absent = "".join(f"; no {measure}: {reason}" for measure, reason in isolation.missing.items())
        checks.append(Check(name, "warn" if lacking else "ok", ", ".join(isolation.measures) + absent, remedies["L1"] if lacking else ""))
    return checks


def _print(node: str, checks: list[Check], ceilings: Ceilings | None) -> None:
    from peerlane.hardware.ceilings import FIGURES
    from peerlane.report.tables import TextTable

    out = console()
    table = TextTable(("status", "check", "found"))
    for check in checks:
        table.add(check.status, check.name, check.detail + (f"\n-> {check.remedy}" if check.remedy else ""))
    out.print(f"This machine: {node}")
    print_table(table)
    if ceilings is None:
        out.print("Ceilings: not measured on this kind of machine; `peerlane doctor --measure` does, where there are GPUs.")
        return
    for note in ceilings.notes:
        out.print(note)
    if ceilings.figures:
        figures = TextTable(("figure", "median", "p10", "p90", "n", "what"), right={"median", "p10", "p90", "n"})
        for name, item in ceilings.figures.items():
            figures.add(name, f"{item.median:.4g}", f"{item.p10:.4g}", f"{item.p90:.4g}", str(item.n), FIGURES.get(name, ""))
        out.print(f"Ceilings measured on {ceilings.taken_at}:")
        print_table(figures)
