"""Virtual clusters on GPUs: references and solutions between nodes are right, their bytes meet the bound, and memory ends at a node.

    python tests/gpu/check_clusters.py [--nodes 2] [--world-size 4] [--preset pkb] [--baseline nccl]

Prints a line for every evaluation, with the bytes between nodes over the bound. Ranks may share one GPU.
"""

import argparse
import sys

from peerlane import Evaluator, problems
from peerlane.evaluate import discover
from peerlane.evaluate.candidates import reference_candidate
from peerlane.results.result import Result

ACROSS = """import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from peerlane.device import Arena, group_of
def solution(*args):
    {attempt}
"""
ATTEMPTS = {
    "arena": ("Arena(64, group_of(dist.group.WORLD))", "on another host"),
    "symmetric memory": ("symmetric.rendezvous(symmetric.empty(64, device='cuda'), dist.group.WORLD)", "cannot be mapped"),
}


def line(name: str, result: Result, right: bool) -> bool:
    ratio = None if result.network is None else result.network.over_least
    told = "" if ratio is None else f"{ratio:.2f} x the bound between nodes"
    told = told if right else f"{told} {result.verdict.reason}"
    print("ok  " if right else "FAIL", name, result.problem.id, result.verdict.kind, told, *result.flags, sep="  ", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--baseline", choices=("peerlane", "nccl"))
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    asked = parser.parse_args()
    chosen, right = [problem.id for problem in problems.all_problems(asked.nodes)], []
    options = {"nodes": asked.nodes, "presets": (asked.preset,), "modes": (), "baseline": asked.baseline}
    with Evaluator(asked.world_size, asked.device, **options) as evaluator:
        for number in chosen:
            result = evaluator.evaluate(number, candidate=reference_candidate())
            right.append(line("reference", result, result.correct and result.network is not None))
        for candidate in (item for item in discover(["solutions"]) if item.problem in chosen):
            result = evaluator.evaluate(candidate=candidate)
            near = result.network is not None and (result.network.over_least or 1.0) <= 1.1
            right.append(line(candidate.name, result, result.correct and near))
        for name, (attempt, refusal) in ATTEMPTS.items() if asked.device == "cuda" else ():
            result = evaluator.evaluate(chosen[0], ACROSS.format(attempt=attempt))
            right.append(line(f"{name} across nodes", result, refusal in result.verdict.reason))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
