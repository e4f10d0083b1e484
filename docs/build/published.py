"""Tables of the page on published kernels: verdicts on kernels of language models that others judged, without their code."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from docs.build.tables import table
from peerlane import problems

AUTHORS = Path("src/peerlane/generate/published.json")
MODELS = {"openai/gpt-5.5": "GPT-5.5", "anthropic/claude-opus-4-7": "Claude Opus 4.7", "google/gemini-3-pro-preview": "Gemini 3 Pro"}
WORLD_SIZE = {"openai/gpt-5.5": 4}
"""Ranks of the evaluations that the tables show, where they are not two."""
OUTCOMES: Mapping[str, Sequence[str]] = {
    "right": ("correct",),
    "`unstable`": ("unstable",),
    "wrong": ("wrong_result", "wrong_type"),
    "`hang`": ("hang",),
    "failed to run": ("runtime_error", "cuda_error"),
    "failed to build": ("build_error", "import_error"),
}
CAUSES: Mapping[str, str] = {
    "does not compile or import": r"build_error|import_error",
    "a dtype or argument that its own binding does not take": r"expected scalar type|Invoked with|unsupported dtype|must be a string",
    "a function, argument or attribute that torch does not have": r"no attribute|unexpected keyword|missing 1 required|group type",
    "an error of CUDA or cuBLAS": r"cuda_error|CUDA error",
    "ended by a signal": r"ended by signal",
    "other run-time errors, or none recorded": r"",
}
"""Words for why a kernel did not run -> a pattern in its verdict and reason; the first that fits counts."""


@dataclass(frozen=True)
class Verdict:
    """One evaluation of a published kernel. ``speedup``: launch mode -> median, low and high end over the reference's time."""

    model: str
    backend: str
    file: str
    problem: int
    world_size: int
    node: str
    kind: str
    reason: str
    speedup: Mapping[str, Sequence[float]]

    @property
    def author(self) -> str:
        """Returns the model's name and the language, as the tables show them."""
        return f"{MODELS[self.model]}, {'Triton' if self.backend == 'triton' else 'CUDA'}"


def read_verdicts(path: Path) -> list[Verdict]:
    """Returns all evaluations in ``verdicts.jsonl``."""
    fields = ("model", "backend", "file", "problem", "world_size", "node", "reason", "speedup")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Verdict(kind=row["verdict"], **{name: row[name] for name in fields}) for row in rows]


def shown(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Returns model and language -> one evaluation of each file: on four ranks for GPT-5.5, on two for the others."""
    kept = [verdict for verdict in verdicts if verdict.world_size == WORLD_SIZE.get(verdict.model, 2)]
    order = [f"{model}, {language}" for model in MODELS.values() for language in ("CUDA", "Triton")]
    groups = {author: [verdict for verdict in kept if verdict.author == author] for author in order}
    return {author: group for author, group in groups.items() if group}


def verdicts_table(path: Path) -> str:
    """Returns a row for each model and language: how many kernels ended how, beside the authors' own count of right ones."""
    groups, authors = shown(read_verdicts(path)), _authors(path)

    def count(kinds: Sequence[str]) -> Callable[[str], str]:
        return lambda author: str(sum(verdict.kind in kinds for verdict in groups[author]))

    columns: dict[str, Callable[[str], str]] = {
        "kernels of": lambda author: author,
        "ranks": lambda author: str(groups[author][0].world_size),
        "judged": lambda author: str(len(groups[author])),
        **{outcome: count(kinds) for outcome, kinds in OUTCOMES.items()},
        "right by the authors' judge, of 87": lambda author: _theirs(authors, "Total", author),
    }
    return table(groups, columns, words=("kernels of",))


def categories_table(path: Path) -> str:
    """Returns a row for each category: kernels in CUDA that are right of those judged, and what the authors counted in theirs."""
    groups, authors = shown(read_verdicts(path)), _authors(path)
    category = {problem.id: problem.category for problem in problems.suite()}
    cuda = [author for author in groups if author.endswith("CUDA")]

    def right(author: str) -> Callable[[str], str]:
        def of(name: str) -> str:
            judged = [verdict for verdict in groups[author] if category[verdict.problem] == name]
            return f"{sum(verdict.kind == 'correct' for verdict in judged)} of {len(judged)}"

        return of

    def theirs(author: str) -> Callable[[str], str]:
        return lambda name: (
            "-" if (key := _name(name, authors)) is None else f"{_theirs(authors, key, author)} of {authors[key]['problems']}"
        )

    columns: dict[str, Callable[[str], str]] = {"category": lambda name: name.replace("_", " ")}
    for author in cuda:
        name = author.removesuffix(", CUDA")
        columns |= {name: right(author), f"{name}, authors": theirs(author)}
    return table(sorted(set(category.values())), columns, words=("category",))


def problems_table(path: Path) -> str:
    """Returns a row for each problem: how each model's kernel ended; a dash where none was judged."""
    groups = shown(read_verdicts(path))

    def ended(author: str) -> Callable[[Any], str]:
        kinds = {verdict.problem: f"`{verdict.kind}`" for verdict in groups[author]}
        return lambda problem: kinds.get(problem.id, "–")

    columns = {"problem": lambda problem: f"{problem.id} {problem.slug}", **{author: ended(author) for author in groups}}
    return table(problems.suite(), columns, words=columns)


def speeds_table(path: Path) -> str:
    """Returns a row for each model: its right kernels on two H200 beside the reference in eager mode, and how many ran in a graph."""
    real = [verdict for verdict in read_verdicts(path) if verdict.node.startswith("2x") and verdict.kind == "correct"]

    def of(author: str) -> list[Sequence[float]]:
        return [verdict.speedup["eager"] for verdict in real if verdict.author == author and "eager" in verdict.speedup]

    columns: dict[str, Callable[[str], str]] = {
        "kernels of": lambda author: author,
        "right": lambda author: str(sum(verdict.author == author for verdict in real)),
        "timed in eager mode": lambda author: str(len(of(author))),
        "faster": lambda author: str(sum(low > 1 for _, low, _ in of(author))),
        "slower": lambda author: str(sum(high < 1 for _, _, high in of(author))),
        "geometric mean": lambda author: f"{geometric_mean(median for median, _, _ in of(author)):.2f}" if of(author) else "-",
        "timed in a graph": lambda author: str(sum(verdict.author == author and "graph" in verdict.speedup for verdict in real)),
    }
    return table(sorted({verdict.author for verdict in real if of(verdict.author)}), columns, words=("kernels of",))


def causes_table(path: Path) -> str:
    """Returns a row for each reason why kernels did not run, for all models together."""
    failed = [*OUTCOMES["failed to run"], *OUTCOMES["failed to build"]]
    rows = [verdict for group in shown(read_verdicts(path)).values() for verdict in group if verdict.kind in failed]
    causes = Counter(next(words for words, found in CAUSES.items() if re.search(found, f"{row.kind}: {row.reason}")) for row in rows)
    columns: dict[str, Callable[[str], str]] = {"why it did not run": lambda words: words, "kernels": lambda words: str(causes[words])}
    return table([words for words in CAUSES if causes[words]], columns, words=("why it did not run",))


def repeated_table(path: Path) -> str:
    """Returns a row for each file that was judged on two ranks and on four, with both verdicts."""
    files: dict[str, dict[int, Verdict]] = {}
    for verdict in read_verdicts(path):
        files.setdefault(f"{verdict.author} {verdict.file}", {})[verdict.world_size] = verdict
    both = [found for found in files.values() if {2, 4} <= found.keys()]
    columns: dict[str, Callable[[dict[int, Verdict]], str]] = {
        "problem": lambda found: str(found[2].problem),
        "two ranks": lambda found: f"`{found[2].kind}`",
        "four ranks": lambda found: f"`{found[4].kind}`",
    }
    return table(sorted(both, key=lambda found: found[2].problem), columns, words=("two ranks", "four ranks"))


def _authors(path: Path) -> dict[str, Any]:
    """Returns category -> model -> what the authors of the benchmark published."""
    data = json.loads((path.parents[2] / AUTHORS).read_text(encoding="utf-8"))
    return dict(data["categories"])


def _theirs(authors: Mapping[str, Any], category: str, author: str) -> str:
    """Returns the authors' count of right first answers; a dash for a language that they did not count."""
    model, _, language = author.partition(", ")
    return str(authors[category][model][0]) if language == "CUDA" else "-"


def _name(category: str, authors: Mapping[str, Any]) -> str | None:
    """Returns the authors' name of one of our categories; None if they have none like it."""

    def plain(name: str) -> str:
        return re.sub(r"[^a-z]", "", name.lower()).removesuffix("primitive")

    return next((name for name in authors if plain(name) == plain(category)), None)


PUBLISHED: Mapping[str, Callable[[Path], str]] = {
    "verdicts": verdicts_table,
    "categories": categories_table,
    "problems": problems_table,
    "speeds": speeds_table,
    "causes": causes_table,
    "repeated": repeated_table,
}
"""Name of a table -> what makes it from the file of verdicts."""
