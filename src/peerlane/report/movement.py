"""A picture of what a reference does in one call: its collectives and the work between them, as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Sequence

from peerlane.problems.contract.count import Step

MOST_STEPS = 14


def flowchart(steps: Sequence[Step], ranks: int) -> str:
    """Returns the steps of a reference as one rank sees them; long chains are cut in the middle, and say so."""
    shown = list(steps)
    cut = len(shown) - MOST_STEPS
    if cut > 0:
        shown = [*steps[: MOST_STEPS // 2], *steps[-(MOST_STEPS // 2) :]]
    lines = ["flowchart LR", f'    in(["arguments, on each of {ranks} ranks"])']
    names = ["in"]
    for number, step in enumerate(shown):
        if cut > 0 and number == MOST_STEPS // 2:
            lines.append(f'    more["{cut} more steps"]')
            names.append("more")
        left, right = ("{{", "}}") if step.ranks else ("[", "]")
        lines.append(f'    s{number}{left}"{_label(step)}"{right}')
        names.append(f"s{number}")
    lines.append('    out(["answer"])')
    chain = " --> ".join([*names, "out"])
    return "\n".join(["```mermaid", *lines, f"    {chain}", "```", ""])


def _label(step: Step) -> str:
    if not step.ranks:
        work = [f"{_quantity(step.flops)}FLOP"] if step.flops else []
        return "<br/>".join([f"{step.times} operator{'s' if step.times > 1 else ''}", *work, f"touch {_quantity(step.touched_bytes)}B"])
    times = f" x{step.times}" if step.times > 1 else ""
    traffic = f"{_quantity(step.egress_bytes)}B out, {_quantity(step.ingress_bytes)}B in"
    return f"{step.kind.replace('_', '-')}{times}<br/>{traffic}"


def _quantity(value: float) -> str:
    """Returns three digits and a decimal prefix: ``1.5 M``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
