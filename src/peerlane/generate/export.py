"""A task folder for an agent from elsewhere, which works with the same commands."""

from pathlib import Path

from peerlane.errors import UsageError
from peerlane.generate.prompt import PromptSettings, render_prompt
from peerlane.problems import Problem

ANSWERS = ("solutions", "ops", "nn", "examples", "evaluate/selftest/corpus")
"""folders of the package that hold answers to problems, or the kernels of which they are made"""

_HOW = """
# How to work

Write the file `candidate_{backend}.py` in this folder. These commands help; none of them shows the expected values.

```bash
python -m py_compile {file}                                            # syntax
peerlane eval {file} --preset small --track {track} --world-size {ranks} --mode eager    # right or wrong, and why
peerlane eval {file} --preset {preset} --track {track} --world-size {ranks}    # both launch modes, speedup, roofline
peerlane race {file}                                                   # races of device-kit kernels, without a GPU
peerlane show {number}                                                 # signature, shapes, error model, known wrong answers
```

You are done when the third command says `correct` and you cannot make it faster. The last version of the file counts.
Work in this folder only.
"""


def export_task(problem: Problem, settings: PromptSettings, ranks: int, folder: Path) -> list[Path]:
    """Writes TASK.md and the notes; returns the files. Raises UsageError for a folder that holds something already."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--export got {folder}, which is not empty: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    ending = {"kit": "cuda", "nvshmem": "cuda", "nccl": "cuda", "parallelkittens": "cuda"}.get(settings.backend, settings.backend)
    file = f"{problem.id}_candidate_{ending}.py"
    how = _HOW.replace("candidate_{backend}.py", file).format(
        file=file, track=settings.track, ranks=ranks, preset=settings.preset, number=problem.id
    )
    text = render_prompt(problem, settings).text.partition("## Output")[0] + how.lstrip("\n")
    written = [folder / "TASK.md"]
    written[0].write_text(text)
    for note in sorted((Path(__file__).parent / "prompts" / "notes").glob("*.md")):
        target = folder / "notes" / note.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(note.read_text())
        written.append(target)
    return written


def remove_answers() -> str:
    """Returns a shell command that takes the answers out of the installed package; `peerlane eval` works without them."""
    find = "import importlib.util; print(importlib.util.find_spec('peerlane').submodule_search_locations[0])"
    return f'cd "$(python3 -c "{find}")" && rm -rf {" ".join(ANSWERS)}'
