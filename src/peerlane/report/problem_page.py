"""The page of one problem: for the documentation and, without pictures and folds, for `peerlane show`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peerlane.problems.contract.standard import STANDARD_WRONG_ANSWERS
from peerlane.report.catalogue import Entry
from peerlane.report.evidence import NOTHING, Measured
from peerlane.report.problem_speeds import reference_section, solution_times
from peerlane.report.quantities import quantity, shown_us
from peerlane.report.tables import TextTable

_NUMBER_OF_RANKS = re.compile(r"/w\d+(x\d+)?$")
_FEW_CASES, _MANY_CASES = 3, 8
_BOUNDS = ("relative", "magnitude", "rms", "normwise", "rowwise")
_LONG_REFERENCE = 70


@dataclass(frozen=True)
class Illustration:
    """The parts of a page that only the documentation has.

    Attributes:
        reference: source of the reference as one file.
        picture: file name of the picture of shards and messages, beside the page.
        solution: link to the solution's source; empty if there is none.
        scaffold: name of the file that `peerlane new` writes.
        backend: of that file.
        nodes: the smallest number of nodes that the problem runs on.
    """

    reference: str
    picture: str
    solution: str
    scaffold: str
    backend: str
    nodes: int = 1


def page(detail: Entry, measured: Measured = NOTHING, illustration: Illustration | None = None) -> str:
    """Returns one problem's page, from :func:`problem_detail`, what was measured, and what illustrates it."""
    presets = "".join(
        [
            f"Arguments are those of rank 0 of {detail['world_size']}. All cases are checked; the first one of a preset is timed.\n\n",
            "\n".join([*(_preset(preset) for preset in detail["presets"]), *_sweep(detail["sweep"])]),
        ]
    )
    sections = {
        "The reference's speed on four H200": reference_section(detail, measured),
        "All presets and cases": presets,
        "Error model: how exact an answer must be": _error_model(detail),
        "Wrong answers that are rejected": _wrong_answers(detail),
    }
    fold = _section if illustration is None else _folded
    parts = [
        f"# {detail['id']}. {detail['title']}\n",
        f"{detail['summary']}\n",
        f"```python\n{detail['signature']}\n```\n" if illustration is None else _opening(detail, illustration),
        *([] if illustration is None else [_start(detail, illustration)]),
        "## Our solution\n",
        *([] if illustration is None or not illustration.solution else [f"[Read its source]({illustration.solution}).\n"]),
        solution_times(measured) if measured.solutions or illustration is None or illustration.solution else "There is none yet.\n",
        _cost(detail),
        *_tiers(detail),
        "## Facts\n",
        _facts(detail),
        *(fold(title, text) for title, text in sections.items()),
    ]
    if detail["notes"]:
        parts.append("## Notes\n\n" + "".join(f"* {note}\n" for note in detail["notes"]))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def _folded(title: str, text: str) -> str:
    return f"<details markdown>\n<summary>{title}</summary>\n\n{text}\n</details>\n"


def _opening(detail: Entry, illustration: Illustration) -> str:
    """Returns the reference and the picture; a long reference is folded below its signature."""
    code, lines = f"```python\n{illustration.reference.rstrip()}\n```\n", illustration.reference.count("\n")
    if lines > _LONG_REFERENCE:
        code = f"```python\n{detail['signature']}\n```\n\n{_folded(f'The reference in PyTorch, {lines} lines', code)}"
    alternative = f"Problem {detail['id']} on {detail['world_size']} ranks: arguments, messages and answers"
    return f"{code}\n![{alternative}]({illustration.picture})\n"


def _start(detail: Entry, illustration: Illustration) -> str:
    """Returns the commands that write a candidate and judge it without a GPU."""
    emulated = illustration.backend == "kit"
    backend = "" if emulated else f" --backend {illustration.backend}"
    nodes = "" if illustration.nodes == 1 else f" --nodes {illustration.nodes} --world-size {detail['world_size']}"
    where = "[emulated ranks](../laptop.md)" if emulated else "CPU ranks" + (" of [several nodes](../between-nodes.md)" if nodes else "")
    options = f"--device {'emulated' if emulated else 'cpu'}{nodes} --preset small"
    return (
        f"## Write your own\n\nThe first command writes a candidate that is right and slow. The second one judges it on {where}, without a "
        "GPU. Without `--device` it judges on the GPUs of the machine.\n\n"
        f"```bash\npeerlane new {detail['id']}{backend}\npeerlane eval {illustration.scaffold} {options}\n```\n"
    )


def _facts(detail: Entry) -> str:
    graph = "" if not detail["graph_reason"] else f" (no CUDA graph: {detail['graph_reason']})"
    facts = {
        "Category": detail["category"],
        "Parallelism": ", ".join(detail["parallelism"]),
        "Origin": detail["origin"],
        "World sizes": ", ".join(map(str, detail["world_sizes"])),
        **({"Nodes": ", ".join(map(str, detail["nodes"]))} if detail["nodes"] != [1] else {}),
        "Variants": ", ".join(detail["variants"]),
        "Launch modes": ", ".join(detail["modes"]) + graph,
        "Updates in place, compared after the call": ", ".join(f"`{name}`" for name in detail["updates"]) or "nothing",
        "May overwrite": ", ".join(f"`{name}`" for name in detail["mutates"]) or "nothing",
        "Equal on all ranks": _replicated(detail["replicated"]),
        "Integer draws": "the answer is then exact and compared bit for bit" if detail["integer_exact"] else "none",
    }
    return "".join(f"* **{name}:** {value}\n" for name, value in facts.items())


def _replicated(replicated: bool | list[str]) -> str:
    if not replicated:
        return "not required"
    which = "all outputs" if replicated is True else ", ".join(f"`{name}`" for name in replicated)
    return f"{which}, checked bit for bit"


def _preset(preset: Entry) -> str:
    table = TextTable(("case", "dtype", "arguments"))
    for case in preset["cases"]:
        label = case["label"] if case["variant"] == "default" else f"{case['label']} (variant {case['variant']})"
        if case["cost"] is None:
            arguments = f"only on {', '.join(map(str, case['world_sizes']))} ranks"
        elif case["arguments"] is not None:
            arguments = ", ".join(f"`{item['name']}`: {item['value']}" for item in case["arguments"])
        else:
            arguments = ", ".join(f"{name} = {_text(value)}" for name, value in case["params"].items())
        table.add(label, case["dtype"], arguments)
    return f"### `{preset['name']}`\n\n{preset['about']}\n\n{table.markdown()}"


def _sweep(sweep: Sequence[Entry]) -> list[str]:
    """Returns one section for all presets of the sweep; nothing if there is no sweep."""
    if not sweep:
        return []
    first, last = sweep[0], sweep[-1]
    return [
        f"### `sweep`: {first['size']} - {last['size']}\n\n`--preset sweep` chooses all {len(sweep)} presets from `{first['name']}` to "
        f"`{last['name']}`. Each has one flat bfloat16 case. Its size is that of the larger of a rank's two buffers.\n"
    ]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    return str(value)


def _error_model(detail: Entry) -> str:
    table = TextTable(("output", "cases", *_BOUNDS))
    groups: dict[tuple[str, ...], list[str]] = {}
    for preset in detail["presets"]:
        for case in preset["cases"]:
            for output, tolerance in (case["tolerance"] or {}).items():
                cells = tuple(f"{tolerance[name]:.3g}" if tolerance[name] else "-" for name in _BOUNDS)
                groups.setdefault((output, *cells), []).append(f"{preset['name']}/{case['label']}")
    for (output, *limits), labels in groups.items():
        table.add(output, ", ".join(labels) if len(labels) <= _MANY_CASES else f"{len(labels)} cases", *limits)
    parts = []
    if detail["error_model"] and groups:
        parts.append(f"{_paragraph(detail['error_model'])}\n")
    if groups:
        parts.append(
            "An answer passes if every check holds: `|got - want| <= relative |want| + magnitude (sum of magnitudes) + rms rms(want)` in "
            "every element, `norm(got - want) <= normwise norm(want)`, and the same in every row.\n"
        )
        parts.append(table.markdown())
    if detail["comparison"]:
        parts.append(f"Compared by the problem's own rule: {_paragraph(detail['comparison'])}\n")
    parts.append("Shape, dtype and structure must be exact. An output without an error model above must be exact too.\n")
    return "\n".join(parts)


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
