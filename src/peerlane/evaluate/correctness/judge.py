"""Judges what one call left on one rank, for trusted ranks and for a race in this process alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.problems.contract.judge import any_differs, digests, expected_leaves, score
from peerlane.problems.contract.spec import Case, Problem, Score
from peerlane.problems.contract.tree import Tree, leaves


@dataclass(frozen=True)
class Judged:
    """An output compared with the oracle: its worst tensor, and checksums of the tensors that must be the same on all ranks."""

    worst: Score
    digests: tuple[tuple[str, int], ...]


def judge_output(problem: Problem, case: Case, got: Tree, expected: Tree, kind: str) -> Judged:
    """Compares an output of the right type with the oracle's. A ratio that is no number counts as infinite."""
    scores = [replace(item, ratio=math.inf) if math.isnan(item.ratio) else item for item in score(problem, case, got, expected, kind)]
    named = zip(expected_leaves(expected), leaves(got), strict=True) if problem.replicated else ()
    alike = [(leaf.name, tensor) for leaf, tensor in named if problem.is_replicated(leaf.name)]
    sums = digests([tensor for _, tensor in alike])
    return Judged(max(scores, key=lambda item: item.ratio), tuple(zip([name for name, _ in alike], sums, strict=True)))


def compare_arguments(problem: Problem, before: Sequence[Any], after: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters that a call may not change, and whether it did: flags on their device, which is not waited for."""
    made = []
    for name, mine, theirs in zip(problem.parameters, before, after, strict=False):
        pairs = [(a, b) for a, b in zip(leaves(mine), leaves(theirs), strict=True) if a.numel()]
        if pairs and name not in problem.changeable:
            made.append((name, any_differs(pairs)))
    return made


def changed_names(flags: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names whose flag is set, each once. Waits for the device."""
    found = torch.stack([flag for _, flag in flags]).tolist() if flags else []
    return list(dict.fromkeys(name for (name, _), changed in zip(flags, found, strict=True) if changed))
