"""Prepares what a page shows of one candidate: highlighted code, evidence, block times; and the origin of a board's figures.

Everything here may be hostile text. Text leaves as ``Markup`` only where this module made all of its tags.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer
from pygments.token import String

from peerlane.generate.board import Board
from peerlane.generate.samples import Sample
from peerlane.report.tables import shown_us
from peerlane.results.result import Result
from peerlane.results.sanitize import printable
from peerlane.results.speed_record import ModeSpeed

UNKNOWN = "not recorded"
_HIGHLIGHTED_CHARACTERS = 200_000
_FORMATTER = HtmlFormatter(nowrap=True)
_DEVICE_MARKS = ("__global__", "__device__", "#include")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 560, 170, 56, 22, 10


@dataclass(frozen=True)
class Source:
    """The code as HTML, or a sentence that says why there is none."""

    html: Markup | None
    note: str = ""


def source_of(sample: Sample) -> Source:
    """The code that was judged: a file counts if it has the hash of the result."""
    result = sample.result
    if sample.is_reference and result is not None:
        return Source(None, f"The problem's reference: `peerlane show {result.problem.id} --source` prints it.")
    if sample.code is None:
        return Source(None, "The sample holds no code." if result is None else "The code with this hash was not at hand.")
    if result is not None and hashlib.sha256(sample.code).hexdigest() != result.candidate.sha256:
        return Source(None, "The file has changed since it was judged.")
    return _shown(sample.code)


@functools.lru_cache(maxsize=256)
def _shown(data: bytes) -> Source:
    """Characters that hide or reorder text appear as escapes."""
    text = printable(data.decode(errors="replace").replace("\r\n", "\n"), kept="\n\t")
    if len(text) > _HIGHLIGHTED_CHARACTERS:
        return Source(escape(text), f"{len(text):,} characters, without highlighting.")
    return Source(Markup(highlight(text, _LEXER, _FORMATTER)))


class _CandidateLexer(PythonLexer):  # type: ignore[misc]
    """Python, and CUDA C++ in its strings."""

    def get_tokens_unprocessed(self, text: str, stack: tuple[str, ...] = ("root",)) -> Iterator[tuple[int, Any, str]]:
        string: list[tuple[int, Any, str]] = []
        for token in super().get_tokens_unprocessed(text, stack):
            if token[1] in String:
                string.append(token)
                continue
            yield from _with_device_code(string)
            string = []
            yield token
        yield from _with_device_code(string)


def _with_device_code(string: list[tuple[int, Any, str]]) -> Iterator[tuple[int, Any, str]]:
    """The tokens of a string, or those of the device code in it."""
    text = "".join(value for *_, value in string)
    if any(mark in text for mark in _DEVICE_MARKS):
        yield from ((string[0][0] + at, kind, value) for at, kind, value in CudaLexer().get_tokens_unprocessed(text))
    else:
        yield from string


_LEXER = _CandidateLexer(stripnl=False)


def facts(result: Result) -> Iterator[tuple[str, str]]:
    """Returns the origin of the result, as names and values."""
    yield "sha256", result.candidate.sha256
    yield "judged", f"{result.finished_at:%Y-%m-%d %H:%M} UTC, run {result.run_id}"
    yield "machine", str(result.node)
    yield "environment", result.environment_hash
    yield "evaluator", f"{result.evaluator_version}, rules {result.rules_hash or 'not recorded'}, isolation {result.isolation}"
    if result.problem.source_hash:
        yield "problem's source", result.problem.source_hash
    if result.flags:
        yield "flags", ", ".join(result.flags)
    if result.audit is not None:
        kernels = ", ".join(f"{count} {whose}" for whose, count in result.audit.kernels.items())
        copies = ", ".join(f"{count} {where.replace('_', ' ')}" for where, count in result.audit.copies.items())
        yield "kernels a call", kernels or "none"
        yield "copies a call", copies or "none"
        if result.audit.kernel_names:
            yield "kernels", ", ".join(result.audit.kernel_names[:8])


def block_times(speed: ModeSpeed) -> Markup:
    """Both sides' blocks by both clocks, microseconds a call, as an SVG."""
    series = [
        ("reference", "events", speed.reference_blocks_us),
        ("candidate", "events", speed.candidate_blocks_us),
        ("reference", "clock", speed.reference_clock_us),
        ("candidate", "clock", speed.candidate_clock_us),
    ]
    a_call = [(side, clock, [value / speed.calls_per_block for value in values]) for side, clock, values in series if values]
    top = 1.08 * max(value for *_, values in a_call for value in values)
    longest = max(len(values) for *_, values in a_call)
    parts = [*_axis(top)]
    for side, clock, values in a_call:
        places = [(_x(index, longest), _y(value, top)) for index, value in enumerate(values)]
        if clock == "events":
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="{side}" points="{points}"/>')
        radius = 3.2 if clock == "events" else 2
        parts += [f'<circle class="{side} {clock}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places]
    label = f"{speed.mode}: block times in microseconds a call"
    return Markup(f'<svg class="blocks" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>')


def _axis(top: float) -> Iterator[str]:
    for share in (0.0, 0.5, 1.0):
        y = _y(share * top, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown_us(share * top)}</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT - 4}" text-anchor="end">block, in order</text>'


def _x(index: int, count: int) -> float:
    return _LEFT + 8 + (_WIDTH - _LEFT - 16) * (index / max(count - 1, 1))


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top


def provenance(board: Board, samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Returns name and values of each fact about these samples of a board; facts that no sample has are left out."""
    results = [sample.result for sample in samples if sample.result is not None]
    environments = [result.environment for result in results]
    days = sorted(f"{result.finished_at:%Y-%m-%d}" for result in results)
    calls = sum(sample.usage.calls for sample in board.samples)
    gpus = board.setting.node_class.place.has_gpus
    rows: list[tuple[str, list[str]]] = [
        ("machine", [str(board.setting.node_class)]),
        ("driver", [str(environment.get("driver") or "") for environment in environments]),
        ("NCCL", [_nccl(board, environment) for environment in environments] if gpus else []),
        *((name, [value]) for name, value in board.setting.node_class.switches()),
        ("CPU", [_cpu(environment) for environment in environments]),
        ("system", [str(environment.get("os") or "") for environment in environments]),
        ("software", [_software(environment) for environment in environments]),
        ("evaluator", [f"peerlane {result.evaluator_version}" for result in results]),
        ("revision", [_revision(environment) for environment in environments]),
        ("rules", [result.rules_hash or "" for result in results]),
        ("isolation", [result.isolation for result in results]),
        ("judged", [days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"] if days else []),
        ("prompt", [f"{sample.author}: {sample.asked}" for sample in samples if sample.asked]),
        ("signed by", [f"{sample.author}: {sample.signer}" for sample in samples if sample.signer is not None]),
        ("model calls", [f"{calls:,}"] if calls else []),
    ]
    return [(name, "; ".join(named)) for name, values in rows if (named := [value for value in dict.fromkeys(values) if value])]


def _nccl(board: Board, environment: dict[str, Any]) -> str:
    """Returns the version of NCCL that the ranks loaded, and its environment variables, by which a baseline may be slower or faster."""
    node = board.setting.node_class
    version = (environment.get("software") or {}).get("nccl") or "version unknown"
    if node.place.shares_gpus and node.baseline != "nccl":
        return f"{version}, not used: the reference runs on the {node.baseline or 'unknown'} backend"
    variables = environment.get("variables")
    if variables is None:
        return f"{version}, settings {UNKNOWN}"
    # containers set NCCL_VERSION to the version of a package; NCCL does not read it
    settings = [f"{name}={value}" for name, value in variables.items() if name.startswith("NCCL_") and name != "NCCL_VERSION"]
    whose = "" if node.nvls is not None or node.place.shares_gpus else " (of the evaluator; those of its ranks were not recorded)"
    return f"{version}, {', '.join(settings) or 'default settings'}{whose}"


def _cpu(environment: dict[str, Any]) -> str:
    cpu = environment.get("cpu") or {}
    return ", ".join(filter(None, [str(cpu.get("model") or ""), f"{cpu['cores']} cores" if cpu.get("cores") else ""]))


def _software(environment: dict[str, Any]) -> str:
    versions = environment.get("software") or {}
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "cuda", "triton", "python") if versions.get(name))


def _revision(environment: dict[str, Any]) -> str:
    git = environment.get("git") or {}
    revision = str(git.get("revision") or "")[:12]
    return f"{revision} (changed)" if revision and git.get("dirty") else revision
