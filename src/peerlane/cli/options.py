"""Values of options: how all commands read them, and how shells complete them."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from peerlane.errors import UsageError
from peerlane.settings import PROBLEM_FOLDERS, problem_folders


def takes(group: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of a dataclass besides its own; the command gets an instance of it first."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared, (_, *local) = (list(inspect.signature(item, eval_str=True).parameters.values()) for item in (group, command))

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(group(**{item.name: values.pop(item.name) for item in shared}), **values)

        run.__annotations__ = {item.name: item.annotation for item in (*shared, *local)}
        run.__signature__ = inspect.Signature([*shared, *local])  # type: ignore[attr-defined]
        return run

    return decorate


def example(command: str) -> str:
    """Returns the end of a command's help, which shows it in use; ``\\b`` keeps the lines as they are."""
    return f"\b\nExample:\n  {command}"


def completed(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command's parameters what shells complete them with, by their names; a list of values is completed behind its last comma."""
    parameters = inspect.signature(command, eval_str=True).parameters
    for name in _COMPLETIONS.keys() & parameters.keys():
        (info,) = parameters[name].annotation.__metadata__
        info.autocompletion = _COMPLETIONS[name]
    command.__annotations__ = {name: item.annotation for name, item in parameters.items()} | {"return": None}
    return command


def _offer(*choices: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        before = incomplete[: incomplete.rfind(",") + 1]
        return [before + choice for choice in choices]

    return complete


def _offer_problems(incomplete: str) -> list[tuple[str, str]]:
    from peerlane.common.problem_files import slugs

    return _offer_numbers(incomplete) if incomplete.isdecimal() else [(slug, str(number)) for number, slug in slugs().items()]


def _offer_numbers(incomplete: str) -> list[tuple[str, str]]:
    from peerlane.common.problem_files import slugs

    before = re.sub(r"[^,-]*$", "", incomplete)
    return [(f"{before}{number}", slug) for number, slug in slugs().items()]


_COMPLETIONS: dict[str, Callable[[str], Any]] = {
    "problem_name": _offer_problems,
    "problem": _offer_numbers,
    "preset": _offer("small", "pkb", "production", "production_first", "sweep", "bandwidth"),
    "backend": _offer("kit", "cuda", "nvshmem", "nccl", "triton", "pytorch"),
    "device": _offer("auto", "cpu", "cuda", "emulated"),
    "mode": _offer("eager", "graph"),
    "track": _offer("open", "custom"),
    "variant": _offer("default", "pkb"),
    "isolation": _offer("L0", "L1", "L2"),
    "gpu": _offer("h100", "h200", "b200"),
}


def words(text: str, option: str) -> tuple[str, ...]:
    """Splits a comma-separated list; raises UsageError when it holds nothing or an empty entry."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise UsageError(f"{option} got {text!r}: expected one or more values separated by commas")
    return tuple(dict.fromkeys(parts))


def positive_integers(text: str, option: str) -> tuple[int, ...]:
    """Parses a comma-separated list of integers of at least 1; raises UsageError."""
    parts = words(text, option)
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UsageError(f"{option} got {text!r}: expected positive integers separated by commas, such as 2,4")
    return tuple(int(part) for part in parts)


def one_of(text: str, allowed: Sequence[str], option: str) -> str:
    """Returns ``text`` if it is allowed; raises UsageError that names the allowed words."""
    if text not in allowed:
        raise UsageError(f"{option} got {text!r}: expected one of {', '.join(allowed)}")
    return text


def _use_problems(folders: list[Path] | None) -> list[Path] | None:
    if folders:
        before = map(str, problem_folders())
        os.environ[PROBLEM_FOLDERS] = os.pathsep.join(dict.fromkeys([*before, *map(os.path.abspath, folders)]))
    return folders


def _use_disguises(seed: int | None) -> int | None:
    if seed is not None:
        from peerlane.problems.disguise import write_disguises
        from peerlane.settings import cache_dir

        _use_problems([write_disguises(seed, cache_dir() / "disguised" / str(seed))])
    return seed


ProblemFolders: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--problems", metavar="FOLDER", callback=_use_problems, is_eager=True, help="A folder of problems of your own; may be repeated."
    ),
]
"""The option of verbs that know problems. Processes that they start find the folders in the environment."""

Disguise: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--disguise", metavar="SEED", callback=_use_disguises, is_eager=True, min=0, help="Add ten problems of the suite in other words."
    ),
]
"""The option of verbs that ask models, or judge what they answer: problems 2001 and on, see :mod:`peerlane.problems.disguise`."""
