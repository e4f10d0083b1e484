"""The page of one problem, as `peerlane show` prints it. The documentation adds the reference, a picture and folds to the same sections."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from peerlane.problems.contract.standard import STANDARD_WRONG_ANSWERS
from peerlane.report.catalogue import Entry
from peerlane.report.evidence import NOTHING, Measured
from peerlane.report.problem_speeds import reference_section, solution_times
from peerlane.report.tables import TextTable, quantity, shown_us

_NUMBER_OF_RANKS = re.compile(r"/w\d+(x\d+)?$")
_FEW_CASES, _MANY = 3, 8
_BOUNDS = ("relative", "magnitude", "rms", "normwise", "rowwise")


def page(detail: Entry, measured: Measured = NOTHING) -> str:
    """Returns one problem's page, from :func:`problem_detail` and what was measured."""
    return "\n".join([title(detail), signature(detail), *sections(detail, measured, solution_times(measured), _section)])


def title(detail: Entry) -> str:
    """Returns the heading and the summary."""
    return f"# {detail['id']}. {detail['title']}\n\n{detail['summary']}\n"


def signature(detail: Entry) -> str:
    """Returns the signature of a solution as a block of code."""
    return f"```python\n{detail['signature']}\n```\n"


def sections(detail: Entry, measured: Measured, solution: str, minor: Callable[[str, str], str]) -> list[str]:
    """Returns what follows the signature. ``solution``: text about our solution. ``minor``: puts a title above the text of a section that
    few readers need."""
    parts = {
        "The reference's speed on four H200": reference_section(detail, measured),
        "All presets and cases": _presets(detail),
        "Error model: how exact an answer must be": _error_model(detail),
        "Wrong answers that are rejected": _wrong_answers(detail),
    }
    notes = "".join(f"* {note}\n" for note in detail["notes"])
    return [
        f"## Our solution\n\n{solution}",
        _cost(detail),
        *_attainable(detail),
        *_tiers(detail),
        f"## Facts\n\n{_facts(detail)}",
        *(minor(name, text) for name, text in parts.items()),
        *([f"## Notes\n\n{notes}"] if notes else []),
    ]


def _section(name: str, text: str) -> str:
    return f"## {name}\n\n{text}"


def _facts(detail: Entry) -> str:
    """Returns a list of what holds for a problem; a fact that says no more than what holds for most is left out."""
    graph = "" if not detail["graph_reason"] else f" (no CUDA graph: {detail['graph_reason']})"
    facts = {
        "Category": detail["category"],
        "Parallelism": ", ".join(detail["parallelism"]),
        "Origin": detail["origin"],
        "World sizes": ", ".join(map(str, detail["world_sizes"])),
        "Nodes": "" if detail["nodes"] == [1] else ", ".join(map(str, detail["nodes"])),
        "Variants": "" if detail["variants"] == ["default"] else ", ".join(detail["variants"]),
        "Launch modes": ", ".join(detail["modes"]) + graph,
        "Updates in place, compared after the call": ", ".join(f"`{name}`" for name in detail["updates"]),
        "May overwrite": ", ".join(f"`{name}`" for name in detail["mutates"]),
        "Equal on all ranks": _replicated(detail["replicated"]),
        "Integer draws": "the answer is then exact and compared bit for bit" if detail["integer_exact"] else "",
    }
    return "".join(f"* **{name}:** {value}\n" for name, value in facts.items() if value)


def _replicated(replicated: bool | list[str]) -> str:
    if not replicated:
        return ""
    which = "all outputs" if replicated is True else ", ".join(f"`{name}`" for name in replicated)
    return f"{which}, checked bit for bit"


def _presets(detail: Entry) -> str:
    """Returns what each preset is, and a table of all cases; those with the same arguments share a row."""
    about = "".join(f"* `{preset['name']}`: {preset['about']}\n" for preset in detail["presets"])
    table = TextTable(("preset", "cases", "dtype", "arguments"))
    for preset in detail["presets"]:
        labels: dict[tuple[str, str], list[str]] = {}
        for case in preset["cases"]:
            labels.setdefault((case["dtype"], _arguments(case)), []).append(_label(case))
        for (dtype, arguments), together in labels.items():
            table.add(f"`{preset['name']}`", ", ".join(together), dtype, arguments)
    return (
        f"{about}{_sweep(detail['sweep'])}\nArguments are those of rank 0 of {detail['world_size']}. All cases are checked; the first one "
        f"of a preset is timed.\n\n{table.markdown()}"
    )


def _label(case: Entry) -> str:
    return str(case["label"]) if case["variant"] == "default" else f"{case['label']} (variant {case['variant']})"


def _arguments(case: Entry) -> str:
    if case["cost"] is None:
        return f"only on {', '.join(map(str, case['world_sizes']))} ranks"
    if case["arguments"] is not None:
        return ", ".join(f"`{item['name']}`: {item['value']}" for item in case["arguments"])
    return ", ".join(f"{name} = {_text(value)}" for name, value in case["params"].items())


def _sweep(sweep: Sequence[Entry]) -> str:
    """Returns one line for all presets of the sweep; nothing if there is no sweep."""
    if not sweep:
        return ""
    first, last = sweep[0], sweep[-1]
    return (
        f"* `sweep`: {first['size']} - {last['size']}, which are {len(sweep)} presets from `{first['name']}` to `{last['name']}`. Each has "
        "one flat bfloat16 case. Its size is that of the larger of a rank's two buffers.\n"
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    return str(value)


def _error_model(detail: Entry) -> str:
    cases: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for preset in detail["presets"]:
        for case in preset["cases"]:
            for output, tolerance in (case["tolerance"] or {}).items():
                limits = tuple(f"{tolerance[name]:.3g}" if tolerance[name] else "-" for name in _BOUNDS)
                cases.setdefault((output, limits), []).append(f"{preset['name']}/{case['label']}")
    outputs: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for (output, limits), labels in cases.items():
        outputs.setdefault((tuple(labels), limits), []).append(output)
    table = TextTable(("output", "cases", *_BOUNDS))
    for (together, limits), names in outputs.items():
        table.add(_counted(names, "outputs"), _counted(together, "cases"), *limits)
    parts = []
    if detail["error_model"] and cases:
        parts.append(f"{_paragraph(detail['error_model'])}\n")
    if cases:
        parts.append(
            "An answer passes if every check holds: `|got - want| <= relative |want| + magnitude (sum of magnitudes) + rms rms(want)` in "
            "every element, `norm(got - want) <= normwise norm(want)`, and the same in every row.\n"
        )
        parts.append(table.markdown())
    if detail["comparison"]:
        parts.append(f"Compared by the problem's own rule: {_paragraph(detail['comparison'])}\n")
    parts.append("Shape, dtype and structure must be exact. An output without an error model above must be exact too.\n")
    return "\n".join(parts)


def _counted(names: Sequence[str], what: str) -> str:
    """Returns the names, or how many they are where they are many."""
    return ", ".join(names) if len(names) <= _MANY else f"{len(names)} {what}"


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _wrong_answers(detail: Entry) -> str:
    standard = {item.name for item in STANDARD_WRONG_ANSWERS}
    parts = []
    known = {f"{preset['name']}/{case['label']}" for preset in detail["presets"] for case in preset["cases"]}
    lines = [
        "* the [standard wrong answers](../problem-contract.md#standard-wrong-answers)\n",
        "* the [transport faults](../problem-contract.md#transport-faults)\n",
    ]
    for item in detail["known_wrong_answers"]:
        if item["name"] not in standard or item["cases"]:
            lines.append(f"* `{item['name']}`: {item['why']}{_where(item['cases'] or (), known)}\n")
    parts.append("".join(lines))
    if detail["excused"]:
        parts.append("Not wrong here:\n\n" + "".join(f"* `{name}`: {why}\n" for name, why in detail["excused"].items()))
    return "\n".join(parts)


def _where(cases: Sequence[str], known: set[str]) -> str:
    """Returns the cases in which an answer is wrong: their names if they are few, else how many; nothing where it is wrong in all."""
    names = list(dict.fromkeys(_NUMBER_OF_RANKS.sub("", case) for case in cases))
    others = sorted(known - set(names)) if known >= set(names) else None
    if not names or others == []:
        return ""
    if len(names) <= _FEW_CASES:
        return f" (in {', '.join(names)})"
    if others is not None and len(others) <= _FEW_CASES:
        return f" (in all cases but {', '.join(others)})"
    return f" (in {len(names)} of {len(known)} cases)" if others is not None else f" (in {len(names)} cases)"


def _bytes(value: float) -> str:
    return f"{quantity(value)}B"


def _flops(flops: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.3g} {unit}" for unit, value in flops.items() if value) or "-"


def _cost(detail: Entry) -> str:
    """Returns cost and roofline of every preset's timed case."""
    columns = ("preset", "operations", "device memory", "egress", "ingress", "bound us", "bound by")
    table = TextTable(columns, right={"device memory", "egress", "ingress", "bound us"})
    for preset in detail["presets"]:
        timed = next((case for case in preset["cases"] if case["cost"] is not None), None)
        if timed is None:
            continue
        cost, bound = timed["cost"], timed["roofline"]
        table.add(
            f"`{preset['name']}`",
            _flops(cost["flops"]),
            _bytes(cost["hbm_bytes"]),
            _bytes(cost["egress_bytes"]),
            _bytes(cost["ingress_bytes"]),
            shown_us(bound["bound_us"]),
            bound["bound_by"] if bound["bound_us"] else "-",
        )
    return (
        f"## Cost and roofline on {detail['world_size']} ranks\n\n"
        "The table counts what one call of the timed case needs at least, on the rank with most to do. No implementation takes less than "
        f"the bound. The bound is computed from the {detail['profile']} datasheet; it is not a measurement.\n\n"
        f"{table.markdown()}"
    )


def _attainable(detail: Entry) -> list[str]:
    """Returns the steps of the problem's algorithm, or why there is none."""
    if (known := detail["attainable"]) is None:
        return []
    head = "## What is attainable\n\nThe bound is far below what is known to be reached. "
    if known["reason"]:
        return [f"{head}No algorithm is modelled: {known['reason']}.\n"]
    columns = ("step", "operations", "device memory", "link", "barriers")
    table = TextTable(columns, right={"device memory", "link", "barriers"})
    for step in known["steps"]:
        cost = step["cost"]
        table.add(step["name"], _flops(cost["flops"]), _bytes(cost["hbm_bytes"]), _bytes(cost["egress_bytes"]), str(step["barriers"]))
    return [
        f"{head}This is a model of one algorithm and no bound: a better algorithm may beat it.\n\n"
        f"* **Algorithm:** {known['name']} ({known['source']})\n"
        f"* **Case:** the timed one of `{known['preset']}` on {detail['world_size']} ranks\n"
        "* **Time:** the steps follow each other; [at measured rates](../measurements/production.md)\n\n"
        f"{table.markdown()}"
    ]


def _tiers(detail: Entry) -> list[str]:
    """Returns the roofline by tier on the profiles of several nodes; nothing for a problem of one node."""
    columns = ("nodes x ranks", "preset", "inside", "between", "inside us", "between us", "bound us", "bound by")
    table = TextTable(columns, right={*columns} - {"nodes x ranks", "preset", "bound by"})
    for item in detail["clusters"]:
        if (cost := item["cost"]) is not None:
            times = item["roofline"]["times_us"]
            table.add(
                item["cluster"],
                f"`{item['preset']}`",
                _bytes(max(cost["egress_bytes"], cost["ingress_bytes"])),
                _bytes(max(cost["network_egress_bytes"], cost["network_ingress_bytes"])),
                *(shown_us(time) for time in (times["nvlink"], times["network"], item["roofline"]["bound_us"])),
                item["roofline"]["bound_by"],
            )
    if not table.rows:
        return []
    return [
        "## Roofline by tier\n\n"
        "The table counts the bytes of one rank inside its node and between nodes, and the time that each tier needs for them. Every rank "
        f"has a network adapter of its own. Bandwidths are those of the {detail['profile']} datasheets; nothing here is a measurement.\n\n"
        f"{table.markdown()}"
    ]
