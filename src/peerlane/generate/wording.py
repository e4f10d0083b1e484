"""A problem's cases and error model in the words of a prompt."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from peerlane.problems import Draw, Problem
from peerlane.problems.contract.judge import expected_leaves

_ARGUMENTS_TO_REPEAT = 2
"""A case that differs from an earlier one in at most so many arguments is told by the difference."""


def case_lines(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Yields a line for each set of arguments, with the names of its cases; ``cases`` come with the names of their presets.

    Shapes are told once: a later case says how it differs from the nearest one before. What a case's name stands for, such as the pattern
    of its values, is in brackets.
    """
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for preset, case in cases:
        listed = case["arguments"] or [{"name": "parameters", "value": str(case["params"])}]
        key = tuple((item["name"], item["value"]) for item in listed)
        groups.setdefault(key, []).append(f"{preset}/{case['label']}{_pattern(case['params'])}")
    told: list[tuple[str, dict[str, str]]] = []
    for pairs, names in groups.items():
        arguments = dict(pairs)
        nearest, changed = _nearest(arguments, told)
        shown = ", ".join(f"`{name}` {value}" for name, value in (changed if nearest else arguments).items())
        told.append((names[0].partition(" ")[0], arguments))
        yield f"{', '.join(names)}: {f'as {nearest}, but ' if nearest else ''}{shown}"


def _nearest(arguments: Mapping[str, str], told: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[str, dict[str, str]]:
    """Returns the earlier case that differs least, if that is little, and the arguments that differ."""
    best: tuple[str, dict[str, str]] = ("", dict(arguments))
    for name, before in told:
        if before.keys() == arguments.keys():
            changed = {key: value for key, value in arguments.items() if before[key] != value}
            best = min(best, (name, changed), key=lambda item: len(item[1]))
    few = len(best[1]) <= max(_ARGUMENTS_TO_REPEAT, len(arguments) // 3) and len(best[1]) < len(arguments)
    return best if best[0] and few else ("", dict(arguments))


def _pattern(params: Mapping[str, Any]) -> str:
    said = [f"{name} {value}" for name, value in params.items() if isinstance(value, str)]
    return f" ({', '.join(said)})" if said else ""


def tolerance_lines(tolerances: Mapping[str, Mapping[str, Any]], comparison: str | None) -> Iterator[str]:
    """Yields a line for every output that may differ from the expected value, and how an unusual comparison is made."""
    same: dict[str, list[str]] = {}
    for output, model in tolerances.items():
        same.setdefault(_bound(model), []).append(f"`{output}`")
    for bound, outputs in same.items():
        yield f"{', '.join(outputs)}: {bound}"
    if comparison:
        yield " ".join(comparison.split())


def _bound(model: Mapping[str, Any]) -> str:
    parts = [model["words"]] if model["words"] else []
    terms = [
        f"{model[name]:.3g} {what}" for name, what in (("relative", "|want|"), ("magnitude", "S"), ("rms", "rms(want)")) if model[name]
    ]
    if terms and not parts:
        size = f", where S is {model['size']}" if model["magnitude"] else ""
        parts.append(f"|got - want| <= {' + '.join(terms)} in every element{size}")
    if model["normwise"] is not None:
        parts.append(f"norm(got - want) <= {model['normwise']:.3g} norm(want)")
    if model["rowwise"] is not None:
        parts.append(f"the same in every row with {model['rowwise']:.3g}")
    return "; ".join(parts)


def exact_outputs(problem: Problem, world_size: int, variant: str = "default") -> list[str]:
    """Returns the names of outputs that must match bit for bit, as the oracle of the first case of ``small`` says."""
    case = next(iter(problem.cases("small", world_size, variant)), None)
    if case is None:
        return []
    drawn = [
        problem.inputs(case, rank, Draw(secret="catalogue", case_key=case.key, slot=0, block=0, rank=rank)) for rank in range(world_size)
    ]
    return list(dict.fromkeys(leaf.name for leaf in expected_leaves(problem.oracle(case, drawn, 0)) if leaf.exact))
