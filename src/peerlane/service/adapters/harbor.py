"""Harbor: a task folder per problem (schema 1.4), whose agent leaves ``/app/candidate.py`` for a verifier in a container of its own.

``python -m peerlane.service.adapters.harbor export FOLDER 1-8`` writes them; the verifier calls ``... harbor reward FILE``.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlane.common.version import PACKAGE, __version__
from peerlane.errors import HarnessError, PeerlaneError, UsageError
from peerlane.evaluate.candidates import MOST_BYTES
from peerlane.generate.export import remove_answers
from peerlane.generate.machine import choose_machine
from peerlane.generate.prompt import PromptSettings, render_prompt
from peerlane.problems import Problem, select
from peerlane.results.result import Result

_TOML = """schema_version = "1.4"
artifacts = ["/app/candidate.py"]

[task]
name = "peerlane/{name}"
version = "{version}"
description = {title}
keywords = ["multi-gpu", "kernels"]

[metadata]
problem = {number}

[agent]
timeout_sec = 3600.0

[verifier]
timeout_sec = 1800.0
environment_mode = "separate"

[environment]
network_mode = "public"
build_timeout_sec = 3600.0
cpus = 16
memory_mb = 131072
gpus = {gpus}
"""
_DOCKERFILE = """FROM {image}
# Answers go in the layer that brings them, so that no layer of the agent's image holds one.
RUN pip install --no-cache-dir 'peerlane[cuda,triton]=={version}' && {remove_answers}
WORKDIR /app
"""
_TEST = """#!/bin/bash
# Writes /logs/verifier/reward.json; nothing if peerlane itself failed, which Harbor records as an error and not as a wrong candidate.
mkdir -p /logs/verifier
candidate=/logs/verifier/{number}_candidate_{ending}.py
[ -f /app/candidate.py ] && [ "$(wc -c < /app/candidate.py)" -le {most} ] && cp /app/candidate.py "$candidate" ||
    {{ echo '{{"reward": 0, "correct": 0}}' > /logs/verifier/reward.json; exit 0; }}
peerlane eval "$candidate" {options} --json --out /logs/verifier/peerlane > /logs/verifier/result.json
python3 -m peerlane.service.adapters.harbor reward /logs/verifier/result.json > /logs/verifier/reward.tmp || exit 1
mv /logs/verifier/reward.tmp /logs/verifier/reward.json
"""


@dataclass(frozen=True)
class HarborSettings:
    """Settings that all tasks share: ``gpus`` for every container, its ``image``, and how candidates are judged.

    ``hardware``: the node that instructions describe, as `peerlane prompt --hardware` takes it.
    """

    gpus: int = 8
    image: str = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel"
    preset: str = "pkb"
    track: str = "custom"
    device: str = "cuda"
    world_size: int = 8
    hardware: str = "auto"
    backend: str = "cuda"


def export_harbor(folder: Path, problems: str, settings: HarborSettings | None = None) -> list[Path]:
    """Writes the tasks of these problems; returns their folders. Raises UsageError for a folder that is there already."""
    return [_export(folder / f"p{problem.id:03d}", problem, settings or HarborSettings()) for problem in select(problems)]


def _export(task: Path, problem: Problem, settings: HarborSettings) -> Path:
    if task.exists():
        raise UsageError(f"{task} is there already: choose another folder")
    asked = {"preset": settings.preset, "track": settings.track, "device": settings.device, "world-size": str(settings.world_size)}
    options = " ".join(f"--{name} {shlex.quote(value)}" for name, value in asked.items())
    prompt = PromptSettings(choose_machine(settings.hardware), settings.backend, settings.track, settings.world_size, settings.preset)
    ending = {"kit": "cuda", "parallelkittens": "cuda"}.get(settings.backend, settings.backend)
    files = {
        "task.toml": _TOML.format(
            name=task.name, version=__version__, title=json.dumps(problem.title), number=problem.id, gpus=settings.gpus
        ),
        "instruction.md": render_prompt(problem, prompt).text
        + "\nWrite the candidate to `/app/candidate.py`; the file counts, not your reply.\n",
        "environment/Dockerfile": _DOCKERFILE.format(image=settings.image, version=__version__, remove_answers=remove_answers()),
        "tests/test.sh": _TEST.format(number=problem.id, ending=ending, options=options, most=MOST_BYTES),
    }
    if (solution := next((PACKAGE / "solutions").rglob(f"p{problem.id:03d}_*.py"), None)) is not None:
        files["solution/solve.sh"] = f"#!/bin/bash\ncat > /app/candidate.py <<'END_OF_SOLUTION'\n{solution.read_text()}END_OF_SOLUTION\n"
    for name, text in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (task / name).chmod(0o755)
    return task


def harbor_reward(document: dict[str, Any]) -> dict[str, float]:
    """Finite numbers by name, from what ``peerlane eval --json`` printed; speeds that were not measured are left out.

    Raises :class:`HarnessError` if the result says nothing about the candidate.
    """
    (record,) = document["results"]
    result = Result.model_validate(record)
    if (reward := result.reward("correct")) is None:
        raise HarnessError(f"no verdict: {result.verdict.reason}")
    speed = result.reward("log_speedup") if result.correct else None
    return {"reward": reward, "correct": reward, **({} if speed is None else {"log_speedup": speed})}


def main(words: list[str]) -> int:
    """See the module."""
    try:
        if len(words) == 3 and words[0] == "export":
            print(f"{len(export_harbor(Path(words[1]), words[2]))} tasks in {words[1]}")
        elif len(words) == 2 and words[0] == "reward":
            print(json.dumps(harbor_reward(json.loads(Path(words[1]).read_text(encoding="utf-8")))))
        else:
            raise UsageError(f"got {' '.join(words)!r}: expected `export FOLDER PROBLEMS` or `reward FILE`")
    except (PeerlaneError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
