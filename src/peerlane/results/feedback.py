"""Text for the author of a candidate, or for an agent: the verdict, where, how far, the first error, and what to try."""

import math
import re
from collections.abc import Iterator, Sequence

from peerlane.results.diagnostics import error_place, first_compiler_error, own_traceback
from peerlane.results.sanitize import one_line
from peerlane.results.speed_record import ModeSpeed, Speed
from peerlane.results.verdict import Correct, Verdict

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
    "too_slow": "Calls returned, but too few in the time: let each do less work, print less, and compile or allocate once.",
    "unstable": "A race: order writes before signals, wait before reading, and give every call its own epoch or buffer.",
    "integrity_failure": "Leave clocks, processes and the evaluator's state alone; a result must be complete when the call ends.",
    "track_violation": "Move the data with kernels of your own: this track allows no NCCL, gloo or torch.distributed.",
    "harness_error": "Nothing: this is a failure of the evaluator. Judge the same source again.",
    "not_run": "Nothing is known about the source. Run it where what it needs is there.",
}


def feedback(verdict: Verdict, speed: Sequence[Speed], about: Sequence[str], mechanisms: Sequence[str], log_tail: str) -> str:
    """Writes the text. ``about``: lines that say what was judged; ``mechanisms``: how it moves data; ``log_tail``: what ranks printed."""
    found = _speeds(speed, mechanisms) if isinstance(verdict, Correct) else _failure(verdict, log_tail)
    lines = [f"verdict: {verdict.kind}", *about, *found]
    short = [line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 3]}..." for line in lines]
    return "\n".join(short[:MOST_LINES])


def _failure(verdict: Verdict, log_tail: str) -> Iterator[str]:
    for name in ("phase", "case", "dtype", "rank", "ranks", "slot", "output", "index", "wrong_ranks", "wrong_slots", "compared_slots"):
        value = getattr(verdict, name, None)
        if value is not None and value != ():
            yield f"{name.replace('_', ' ')}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}"
    if (ratio := getattr(verdict, "error_over_tolerance", None)) is not None:
        yield f"error: {ratio:.4g} times what is allowed" if math.isfinite(ratio) else "error: the output must be exact"
    if (deadline_s := getattr(verdict, "deadline_s", None)) is not None:
        yield f"not done after {deadline_s:g} s"
    if (limit_s := getattr(verdict, "limit_s", None)) is not None:
        yield f"time limit of the evaluation: {limit_s:g} s"
    detail = getattr(verdict, "detail", None) or getattr(verdict, "what", None) or getattr(verdict, "missing", None)
    if detail is not None:
        yield f"detail: {detail if verdict.kind == 'wrong_type' else _VALUES.sub('', detail)}"
    yield f"try: {_ADVICE[verdict.kind]}"
    for finding in getattr(verdict, "findings", ()):
        yield from (f"  {one_line(line)}" for line in finding.splitlines())
    message = getattr(verdict, "message", None)
    if message is not None:
        yield from _message(message)
    if log_tail:
        yield "printed by the ranks, the end:"
        yield from (f"  {one_line(line)}" for line in log_tail.splitlines()[-_LOG_LINES:])


def _message(message: str) -> Iterator[str]:
    if (error := first_compiler_error(message)) is not None:
        yield f"first compiler error: {error}"
        lines = message.splitlines()
        begin = next(number for number, line in enumerate(lines) if one_line(line.rstrip()) == error)
        shown = lines[begin : begin + _MESSAGE_LINES]
    else:
        if (place := error_place(message)) is not None:
            yield f"place: {place}"
        shown = own_traceback(message).splitlines()
        if len(shown) > _MESSAGE_LINES:  # the type of the exception, and its end
            half = _MESSAGE_LINES // 2
            shown = [*shown[:half], f"... {len(shown) - 2 * half} lines ...", *shown[-half:]]
    yield from (f"  {one_line(line)}" for line in shown)


def _speeds(speed: Sequence[Speed], mechanisms: Sequence[str]) -> Iterator[str]:
    for measured in speed:
        if not isinstance(measured, ModeSpeed):
            yield f"{measured.mode}: not measured: {getattr(measured, 'why', None) or getattr(measured, 'reason', '')}"
            continue
        speedup, faster = measured.speedup, "faster" if measured.faster else "not faster"
        yield f"{measured.mode}: speedup {speedup.median:.3g} [{speedup.low:.3g}, {speedup.high:.3g}], {faster}"
        yield f"  candidate {measured.candidate_us.median:.4g} us, reference {measured.reference_us.median:.4g} us"
        for item in measured.utilisation:
            yield f"  bound by {item.bound_by} at {item.bound_us:.4g} us ({item.ceilings}): {item.candidate:.0%} of the roofline reached"
    if mechanisms:
        yield f"moves data by: {', '.join(mechanisms)}"
