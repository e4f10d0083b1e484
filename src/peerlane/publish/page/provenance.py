"""The origin of a board's figures: the machine, NCCL and its settings, software, prompts, and who judged when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peerlane.generate.board import Board
from peerlane.generate.run_folder import RunSettings
from peerlane.generate.samples import Sample

UNKNOWN = "not recorded"


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
        ("prompt", [prompt_of(sample.author, sample.run) for sample in samples if sample.run is not None]),
        ("signed by", [f"{sample.author}: {sample.signer}" for sample in samples if sample.signer is not None]),
        ("model calls", [f"{calls:,}"] if calls else []),
    ]
    return [(name, "; ".join(told)) for name, values in rows if (told := [value for value in dict.fromkeys(values) if value])]


def prompt_of(author: str, settings: RunSettings) -> str:
    """Returns how a model was asked: ``model-a: prompt 4-1c2d3e4f, 2 shots, effort high``."""
    told = [
        f"prompt {settings.prompt_version}" if settings.prompt_version else f"prompt version {UNKNOWN}",
        f"{settings.shots} shots" if settings.shots is not None else "",
        *(f"{name} {value}" for name in ("temperature", "top_p", "effort") if (value := getattr(settings, name)) is not None),
        f"{settings.steps} steps" if settings.steps is not None else "",
    ]
    return f"{author}: {', '.join(filter(None, told))}"


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
