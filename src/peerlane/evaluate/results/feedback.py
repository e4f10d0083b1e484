"""What the author of a candidate, or an agent, needs to go on: the verdict, where, how far, the first error, and what to try."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from peerlane.evaluate.results.messages import error_place, first_compiler_error, own_traceback
from peerlane.evaluate.results.sanitize import one_line
from peerlane.words import counted

if TYPE_CHECKING:
    from peerlane.evaluate.results.result import Result

MOST_LINES = 60
_MESSAGE_LINES = 20
_LOG_LINES = 12
_LINE_CHARACTERS = 300
_VALUES = re.compile(
    r"(?:\s+at \[[^\]]*\])?[:;,]?\s*(?:got\s+\S+,\s*)?expected\s+(?:[-+]?[\d.]+\S*|nan|inf|True|False|\[[^\]]*\])", re.IGNORECASE
)
"""Values of an answer, as details of a verdict may state them."""

_ADVICE = {
    "wrong_result": "Compare one rank at a time on this case: partial sums, offsets by rank, padding, and the dtype that sums are kept in.",
    "wrong_type": "Return the structure, shapes and dtypes that `peerlane show PROBLEM` lists.",
    "build_error": "Mend the first error; the others often follow from it.",
    "import_error": "The module must import without a process group and define `solution` with the problem's parameters.",
    "runtime_error": "Look at the line above: `solution` raised there, or its process ended.",
    "cuda_error": "Check index bounds, launch configuration and peer pointers; the emulator (`peerlane race`) names the place.",
    "out_of_memory": "Allocate less, reuse buffers over calls, and free what earlier calls left.",
    "hang": "Look for a collective that not all ranks call, a signal that is never set, or a loop without an end.",
    "unstable": "A race: order writes before signals, wait before reading, and give every call its own epoch or buffer.",
    "integrity_failure": "Leave clocks, processes and the evaluator's state alone; a result must be complete when the call ends.",
    "track_violation": "Move the data with kernels of your own: this track allows no NCCL, gloo or torch.distributed.",
    "harness_error": "Nothing: this is a failure of the evaluator. Judge the same source again.",
    "not_run": "Nothing is known about the source. Run it where what it needs is there.",
}


def feedback(result: Result) -> str:
    lines = [*_head(result), *(_speeds(result) if result.correct else _failure(result))]
    short = [line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 3]}..." for line in lines]
    return "\n".join(short[:MOST_LINES])


def _head(result: Result) -> Iterator[str]:
    problem = result.problem
    yield f"verdict: {result.verdict.kind}"
    yield f"problem {problem.id} {problem.slug} ({problem.variant} variant), preset {result.preset}, {counted(result.world_size, 'rank')}"
    if result.flags:
        yield f"flags: {', '.join(result.flags)}"


def _failure(result: Result) -> Iterator[str]:
    verdict = result.verdict
    for name in ("phase", "case", "dtype", "rank", "ranks", "slot", "output", "index", "wrong_ranks", "wrong_slots", "compared_slots"):
        value = getattr(verdict, name, None)
        if value is not None and value != ():
            yield f"{name.replace('_', ' ')}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}"
    if (ratio := getattr(verdict, "error_over_tolerance", None)) is not None:
        yield f"error: {ratio:.4g} times what is allowed" if math.isfinite(ratio) else "error: the output must be exact"
    if (deadline_s := getattr(verdict, "deadline_s", None)) is not None:
        yield f"not done after {deadline_s:g} s"
    detail = getattr(verdict, "detail", None) or getattr(verdict, "what", None) or getattr(verdict, "missing", None)
    if detail is not None:
        yield f"detail: {detail if verdict.kind == 'wrong_type' else _VALUES.sub('', detail)}"
    yield f"try: {_ADVICE[verdict.kind]}"
    for finding in getattr(verdict, "findings", ()):
        yield from (f"  {one_line(line)}" for line in finding.splitlines())
    message = getattr(verdict, "message", None)
    if message is not None:
        yield from _message(message)
    if result.log_tail:
        yield "printed by the ranks, the end:"
        yield from (f"  {one_line(line)}" for line in result.log_tail.splitlines()[-_LOG_LINES:])


def _message(message: str) -> Iterator[str]:
    if (error := first_compiler_error(message)) is not None:
        yield f"first compiler error: {error}"
        lines = message.splitlines()
        begin = next(number for number, line in enumerate(lines) if one_line(line.rstrip()) == error)
        shown = lines[begin : begin + _MESSAGE_LINES]
    else:
        if (place := error_place(message)) is not None:
            yield f"place: {place}"
        shown = own_traceback(message).splitlines()[-_MESSAGE_LINES:]
    yield from (f"  {one_line(line)}" for line in shown)


def _speeds(result: Result) -> Iterator[str]:
    for name in result.modes:
        measured = result.speed_in(name)
        if measured is None:
            why = next((getattr(item, "why", None) or getattr(item, "reason", "") for item in result.speed if item.mode == name), "")
            yield f"{name}: not measured: {why}"
            continue
        speedup = measured.speedup
        yield f"{name}: speedup {speedup.median:.3g} [{speedup.low:.3g}, {speedup.high:.3g}], {'' if measured.faster else 'not '}faster"
        yield f"  candidate {measured.candidate_us.median:.4g} us, reference {measured.reference_us.median:.4g} us"
        for item in measured.utilisation:
            yield f"  bound by {item.bound_by} at {item.bound_us:.4g} us ({item.ceilings}): {item.candidate:.0%} of the roofline reached"
    if result.mechanisms:
        yield "moves data by: " + ", ".join(f"{item.name} ({item.confidence})" for item in result.mechanisms)
