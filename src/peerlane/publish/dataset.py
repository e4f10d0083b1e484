"""The suite as a data set of the Hugging Face Hub: a card, a row for each problem, what makes it a benchmark there, and scores."""

import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peerlane.common.version import __version__
from peerlane.errors import UsageError
from peerlane.generate import metrics
from peerlane.generate.board import Entry
from peerlane.generate.prompt import PromptSettings, render_prompt, template_version, timed_world_size
from peerlane.generate.run_folder import RunFolder
from peerlane.generate.samples import Setting, Task
from peerlane.hardware.profiles import H200_SXM
from peerlane.hardware.roofline import datasheet_peaks, roofline
from peerlane.problems import Problem, suite
from peerlane.problems.reference_source import reference_source
from peerlane.report.tables import TextTable
from peerlane.report.tiers import regime, tiers
from peerlane.results.result import Result

ROWS_FILE = "data/test.jsonl"
TASKS_FOLDER = "tasks"
CORRECT, FASTER = "correct", "fast_1"
"""Ids of the benchmark's tasks: the shares of problems solved, and solved faster than by the reference."""

_TEXT, _TEXTS = {"dtype": "string"}, {"list": "string"}
FIELDS: dict[str, tuple[dict[str, str], str]] = {
    "number": ({"dtype": "int64"}, "the problem's number, which `peerlane eval` and file names use"),
    "name": (_TEXT, "its short name"),
    "title": (_TEXT, "what it computes, in a few words"),
    "category": (_TEXT, "kind of parallelism or workload"),
    "parallelism": (_TEXTS, "further tags"),
    "origin": (_TEXT, "the system that the computation comes from"),
    "tier": (_TEXT, "`easy`, `medium` or `hard`: how much peerlane's own solution gains; null if not measured"),
    "signature": (_TEXT, "of the function `solution` that is asked for"),
    "summary": (_TEXT, "what every rank must return"),
    "notes": (_TEXTS, "what is easy to get wrong"),
    "prompt": (_TEXT, "the text that a model gets, for `backend`, `track` and a node of `world_size` GPUs"),
    "reference": (_TEXT, "PyTorch source of the reference, which runs by itself"),
    "error_model": (_TEXT, "where the allowed error comes from; null if the problem says no more than `peerlane show` computes"),
    "backend": (_TEXT, "what the prompt asks for: CUDA, Triton, ..."),
    "track": (_TEXT, "`custom`: communication must be the candidate's own"),
    "preset": (_TEXT, "the sizes of the timed case"),
    "world_size": ({"dtype": "int64"}, "ranks of the timed case"),
    "world_sizes": ({"list": "int64"}, "ranks that the problem allows"),
    "bound_us": ({"dtype": "float64"}, "shortest possible time of one call by the datasheet; not a measurement"),
    "bound_by": (_TEXT, "what limits it: latency, nvlink, hbm, tensor or vector"),
    "regime": (_TEXT, "`latency` below 20 us, else `bandwidth`"),
    "egress_bytes": ({"dtype": "float64"}, "bytes that the busiest rank must send"),
    "ingress_bytes": ({"dtype": "float64"}, "bytes that the busiest rank must receive"),
    "hbm_bytes": ({"dtype": "float64"}, "bytes that the busiest rank must move in its memory"),
    "prompt_version": (_TEXT, "version and hash of the prompt's template"),
}
"""Columns of the rows: their types, as a data set card writes them, and what they hold."""


def problem_row(problem: Problem, settings: PromptSettings) -> dict[str, Any]:
    """Returns one problem as a row, with the keys of FIELDS; raises UsageError for a case that the problem lacks."""
    world_size = timed_world_size(problem, settings)
    case = problem.cases(settings.preset, world_size)[0]
    costs = [problem.cost(case, rank) for rank in range(world_size)]
    line = roofline(costs, datasheet_peaks(settings.machine.profile or H200_SXM))
    return {
        "number": problem.id,
        "name": problem.slug,
        "title": problem.title,
        "category": problem.category,
        "parallelism": list(problem.parallelism),
        "origin": problem.origin,
        "tier": tiers().get(problem.id),
        "signature": problem.signature,
        "summary": problem.summary,
        "notes": list(problem.notes),
        "prompt": render_prompt(problem, settings).text,
        "reference": reference_source(problem, settings.variant),
        "error_model": inspect.getdoc(problem.tolerance),
        "backend": settings.backend,
        "track": settings.track,
        "preset": settings.preset,
        "world_size": world_size,
        "world_sizes": list(problem.world_sizes),
        "bound_us": line.bound_us,
        "bound_by": line.bound_by,
        "regime": regime(line.bound_us),
        "egress_bytes": float(max(cost.egress_bytes for cost in costs)),
        "ingress_bytes": float(max(cost.ingress_bytes for cost in costs)),
        "hbm_bytes": float(max(cost.hbm_bytes for cost in costs)),
        "prompt_version": template_version(),
    }


def write_dataset(folder: Path, problems: Sequence[Problem], settings: PromptSettings) -> list[Path]:
    """Writes card, rows and ``eval.yaml`` into a folder that is empty or new; returns the files. Raises UsageError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and not empty: name another folder")
    rows = [problem_row(problem, settings) for problem in problems]
    texts = {
        "README.md": card(rows, settings),
        "eval.yaml": to_yaml(benchmark()),
        ROWS_FILE: "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def benchmark() -> dict[str, Any]:
    """Returns the contents of ``eval.yaml``, by which the Hub knows a data set as a benchmark that Harbor runs."""
    return {
        "name": "peerlane",
        "description": (
            "Multi-GPU kernels: each task asks for one function that several GPUs run together, right on every rank and faster than "
            "PyTorch with NCCL. Tasks are judged by peerlane on a node of GPUs; correct is the share of problems solved, fast_1 the share "
            "solved faster than by the reference."
        ),
        "evaluation_framework": "harbor",
        "tasks": [{"id": task, "config": "default", "split": "test"} for task in (CORRECT, FASTER)],
    }


_CARD = """
# peerlane: {count} multi-GPU kernel problems

Each row is one function that several GPUs compute together: a collective, a sharded matrix product, a layer of a mixture of experts, a
training step. A model gets `prompt` and answers with a Python file that defines `solution`. The evaluator of the Python package peerlane
judges the file: right or wrong on every rank and why, and how fast it is against the reference (PyTorch with NCCL) and against the
hardware limit.

```python
from datasets import load_dataset

problems = load_dataset("OWNER/NAME", split="test")
print(problems[0]["prompt"])
```

## Score an answer

Save it as `<number>_<anything>_<backend>.py`, on a machine with GPUs:

```bash
pip install 'peerlane[cuda,triton]=={version}'
peerlane eval 1_mine_{backend}.py --preset {preset} --track {track}
```

`tasks/` holds each problem as a task of [Harbor](https://harborframework.com), with a container for the judge. `eval.yaml` names two
scores, both shares of all problems: `{correct}` (solved with one sample) and `{faster}` (solved, and faster than the reference by more
than measurement noise).
`peerlane export results RUN` writes them as a file for `.eval_results/` of a model's repository.

## Columns

{columns}
## Limits

* Bounds are computed from the datasheet of {profile}; they are not measurements.
* Prompts describe {machine}. Make others with `peerlane export hf DIR --hardware h100x8 --backend triton`.
* The inputs that decide a verdict are drawn anew for each run and are not in this data set.
* `tasks/` contains peerlane's own solutions, for Harbor's oracle. Keep them away from the model.
"""


def card(rows: Sequence[dict[str, Any]], settings: PromptSettings) -> str:
    """Returns the data set card: metadata as YAML, then a page for people."""
    table = TextTable(("column", "holds"))
    for name, (_, holds) in FIELDS.items():
        table.add(f"`{name}`", holds)
    machine = settings.machine
    text = _CARD.format(
        count=len(rows),
        version=__version__,
        backend=settings.backend,
        preset=settings.preset,
        track=settings.track,
        correct=CORRECT,
        faster=FASTER,
        columns=table.markdown(),
        profile=(machine.profile or H200_SXM).name,
        machine=f"a node of {machine.count} {machine.gpu}",
    )
    metadata = {
        "pretty_name": "peerlane",
        "license": "apache-2.0",
        "language": ["en", "code"],
        "task_categories": ["text-generation"],
        "size_categories": ["n<1K"],
        "tags": ["benchmark", "code", "cuda", "multi-gpu", "kernels", "nccl"],
        "configs": [{"config_name": "default", "data_files": [{"split": "test", "path": ROWS_FILE}]}],
        "dataset_info": {"features": [{"name": name, **kind} for name, (kind, _) in FIELDS.items()]},
    }
    return f"---\n{to_yaml(metadata)}---\n{text}"


def eval_results(run: RunFolder, results: Sequence[Result], dataset: str, source_url: str | None = None) -> list[dict[str, Any]]:
    """Returns an entry for each score of the run, in per cent of all problems of the suite: those not tried count as not solved.

    ``dataset``: the benchmark's repository, such as ``owner/peerlane``. The score for speed is left out unless candidates were
    timed as graphs on a node.
    Raises UsageError for a run that was not judged, or under several settings.
    """
    settings = [setting for setting in run.settings_judged(results) if setting.track == run.settings.track]
    if len(settings) != 1:
        listed = "; ".join(map(str, settings)) or "none"
        raise UsageError(
            f"{run.path} was judged under {len(settings)} settings: {listed}. Expected one; judge a fresh folder with one preset"
        )
    (setting,) = settings
    counted = [result for result in results if Setting.of(result) == setting]
    author = Entry(run.settings.model, run.samples(counted, setting), [Task(problem.id, setting.preset) for problem in suite()])
    if author.unjudged:
        raise UsageError(
            f"{author.unjudged} of {len(author.samples)} samples of {run.path} are not judged: run `peerlane eval {run.path}` first"
        )
    tests = {CORRECT: metrics.CORRECT}
    if "graph" in author.modes and setting.node_class.kind == "node":
        tests[FASTER] = metrics.Metric("graph", 1.0)
    finished = max(result.finished_at for result in counted)
    tried, size = len(author.tried), len(author.tasks)
    notes = f"{tried} of {size} problems tried, expected share with one sample; {setting}; peerlane {__version__}"
    entries = []
    for task, metric in tests.items():
        share = author.count(metric).solved / size
        entry: dict[str, Any] = {
            "dataset": {"id": dataset, "task_id": task},
            "value": round(100 * share, 2),
            "date": f"{finished:%Y-%m-%d}",
            "notes": notes,
        }
        if source_url is not None:
            entry["source"] = {"url": source_url}
        entries.append(entry)
    return entries


def to_yaml(value: Any) -> str:
    """Returns mappings, lists, strings, numbers, booleans and None as YAML; keys must be plain words."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _entry(f"{key}:", item)
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def _entry(key: str, value: Any) -> Iterator[str]:
    lines = list(_lines(value))
    if isinstance(value, dict | list) and value:
        yield key
        yield from (f"  {line}" for line in lines)
    else:
        yield f"{key} {lines[0]}"
