"""The exact text that a model gets for a problem, made from versioned templates."""

import functools
import hashlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from peerlane.errors import UsageError
from peerlane.generate.machine import Machine
from peerlane.generate.wording import case_lines, exact_outputs, tolerance_lines
from peerlane.hardware.profiles import H200_SXM, profile_for
from peerlane.problems import Problem
from peerlane.problems.reference_source import reference_source
from peerlane.report.catalogue import problem_detail
from peerlane.settings import Deadlines

BACKENDS = ("cuda", "kit", "nvshmem", "nccl", "triton", "pytorch", "parallelkittens")
TRACKS = ("custom", "open")
VARIANTS = ("default", "pkb")

VERSION = 2
"""The version of the templates; raised when their meaning changes. :func:`template_version` also tells edits apart."""
MAX_TOKENS = 12_000
MAX_SHOTS = 3
EXAMPLE_ARCH = "sm_90a"
"""in the worked examples; prompts for another GPU name its own"""
_CHARACTERS_PER_TOKEN = 3.0  # a low estimate for code and English, so that counts are upper bounds
_FOLDER = Path(__file__).parent / "prompts"
_TITLES = {
    "cuda": "CUDA C++",
    "kit": "the device kit",
    "nvshmem": "NVSHMEM",
    "nccl": "NCCL's device API",
    "triton": "Triton",
    "pytorch": "PyTorch",
}


@dataclass(frozen=True)
class PromptSettings:
    """The settings of a prompt besides the problem. Raises UsageError for values that do not exist.

    Attributes:
        machine: the node that is described, whose number of GPUs sets the world size.
        world_size: of the timed case; None: the largest that problem and node allow.
        preset: its first case is the timed one.
        shots: number of worked examples, 0 to 3: the backend's own first, then the same function in others.
    """

    machine: Machine
    backend: str = "cuda"
    track: str = "custom"
    world_size: int | None = None
    preset: str = "pkb"
    variant: str = "default"
    shots: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("backend", BACKENDS), ("track", TRACKS), ("variant", VARIANTS)):
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} got {getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if not 0 <= self.shots <= MAX_SHOTS:
            raise UsageError(f"--shots got {self.shots}: expected 0 to {MAX_SHOTS}")


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt. ``tokens`` is an upper estimate: no tokenizer is asked."""

    problem: int
    text: str
    version: str
    tokens: int


def render_prompt(problem: Problem, settings: PromptSettings) -> Prompt:
    """Renders the prompt of a problem; raises UsageError for a case that the problem lacks, and for a prompt of more than MAX_TOKENS."""
    template = templates().get_template("prompt.md.jinja")
    text = template.render(_context(problem, settings)).rstrip() + "\n"
    tokens = math.ceil(len(text) / _CHARACTERS_PER_TOKEN)
    if tokens > MAX_TOKENS:
        raise UsageError(f"the prompt of problem {problem.id} has up to {tokens} tokens: expected at most {MAX_TOKENS}; use fewer --shots")
    return Prompt(problem.id, text, template_version(), tokens)


@functools.cache
def template_version() -> str:
    """Returns the version and the beginning of a hash of all templates and examples."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _FOLDER.rglob("*") if path.suffix in (".jinja", ".py")):
        digest.update(path.relative_to(_FOLDER).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{VERSION}-{digest.hexdigest()[:8]}"


def describe_machine(machine: Machine) -> str:
    """Returns the part of a prompt about the node."""
    return templates().get_template("hardware.md.jinja").render(hardware=machine).rstrip() + "\n"


def timed_world_size(problem: Problem, settings: PromptSettings) -> int:
    """Returns the number of ranks that the prompt speaks of; raises UsageError if the problem forbids the one that was asked for."""
    if settings.world_size is not None:
        problem.cases(settings.preset, settings.world_size)  # raises for a world size that the problem does not run on
        return settings.world_size
    fitting = [size for size in problem.world_sizes if size <= settings.machine.count]
    return max(fitting, default=min(problem.world_sizes))


@functools.cache
def templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown for a model, not HTML
        keep_trailing_newline=True,
    )
    environment.filters["number"] = lambda value: f"{value:g}"
    return environment


def _context(problem: Problem, settings: PromptSettings) -> dict[str, Any]:
    world_size, profile = timed_world_size(problem, settings), settings.machine.profile
    detail = _detail(problem, world_size, settings.preset, settings.machine.gpu)
    variant = settings.variant if settings.variant in problem.variants else "default"
    cases = [
        (preset["name"], case)
        for preset in detail["presets"]
        for case in preset["cases"]
        if case["variant"] == variant and world_size in case["world_sizes"]
    ]
    about = {preset["name"]: preset["about"] for preset in detail["presets"]}
    if not cases or cases[0][0] != settings.preset:
        raise UsageError(f"preset {settings.preset!r} of problem {problem.id} has no case on {world_size} ranks: choose another --preset")
    (name, timed), *others = cases
    cluster = problem.cases(settings.preset, world_size, variant)[0].cluster
    machine = settings.machine if cluster.nodes == 1 else settings.machine.model_copy(update={"count": cluster.ranks_per_node})
    if cluster.nodes > 1 and settings.track == "custom":
        raise UsageError(f"problem {problem.id} runs on several nodes, which exchange messages by torch.distributed: use --track open")
    return {
        "problem": problem,
        "signature": problem.signature,
        "reference": reference_source(problem, variant),
        "track": settings.track,
        "replicated": _replicated(problem),
        "timed": {
            "world_size": world_size,
            "about": about[name],
            "arguments": timed["arguments"] or [],
            "groups": timed["process_groups"] or {},
            "dtype": timed["dtype"],
            "params": timed["params"],
        },
        "other_cases": list(case_lines(others)),
        "special": about["small"],
        "tolerances": list(tolerance_lines(timed["tolerance"] or {}, inspect.getdoc(problem.compare) if problem.compare else None)),
        "comparison": bool(problem.compare),
        "exact": exact_outputs(problem, world_size, variant),
        "hardware": describe_machine(machine),
        "cluster": cluster if cluster.nodes > 1 else None,
        "network_gbps": profile.network_gbps if profile is not None else None,
        "machine": settings.machine,
        "limits": Deadlines(),
        "bound_us": timed["roofline"]["bound_us"] if profile is not None else None,
        "bound_by": timed["roofline"]["bound_by"],
        "hbm": _bytes(timed["cost"]["hbm_bytes"]),
        "egress": _bytes(timed["cost"]["egress_bytes"]),
        "network_egress": _bytes(timed["cost"]["network_egress_bytes"]),
        "backend": settings.backend,
        "arch": settings.machine.arch_flags or EXAMPLE_ARCH,
        "examples": list(_examples(settings.backend, settings.shots, settings.machine.arch_flags or EXAMPLE_ARCH)),
    }


_details: dict[tuple[int, int, str, str], dict[str, Any]] = {}


def _detail(problem: Problem, world_size: int, preset: str, gpu: str) -> dict[str, Any]:
    """Returns the details of a problem's presets; cached for the prompts of other backends, because drawing arguments takes a while."""
    key = (problem.id, world_size, preset, gpu)
    if key not in _details:
        presets, profile = list(dict.fromkeys([preset, "small"])), profile_for(gpu) or H200_SXM
        _details[key] = problem_detail(problem, world_size=world_size, presets=presets, profile=profile)
    return _details[key]


def _examples(backend: str, shots: int, arch: str) -> Iterator[dict[str, str]]:
    order = [name for name in (backend, "pytorch", "cuda", "triton") if name in _TITLES]
    for number, name in enumerate(list(dict.fromkeys(order))[:shots]):
        yield {
            "title": f"Example in {_TITLES[name]}",
            "about": "It is not the task: it shows how ranks exchange data." if number == 0 else "The same function once more.",
            "source": (_FOLDER / "examples" / f"difference_{name}.py").read_text().replace(EXAMPLE_ARCH, arch),
        }


def _replicated(problem: Problem) -> str:
    if isinstance(problem.replicated, bool):
        return "All outputs" if problem.replicated else ""
    return ", ".join(f"`{name}`" for name in problem.replicated)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
