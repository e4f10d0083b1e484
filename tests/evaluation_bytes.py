"""Compute what an evaluation takes on a GPU at sizes of real models, without a GPU.

    PYTHONPATH=src python tests/evaluation_bytes.py --world-size 4 --ranks-per-gpu 4 --memory-gib 80 [--preset bandwidth] [--problem 1-87]

Inputs, references and oracles run on tensors without contents, which shows what is alive at the worst moment. A line for each problem, in
GiB: inputs and outputs of a slot on a rank, what a call of the reference and an oracle take besides, slots of the timed block, and for the
whole GPU what judging and timing take. Each is the larger of the first and the last rank's, and counts for all ranks. `-` is not known:
contents decide it. Reference attention by PyTorch's operator counts as on a CPU, with all its scores.
A problem that exceeds the memory is marked, with the largest part.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peerlane import problems
from peerlane.evaluate.memory.layouts import slots_that_fit
from peerlane.evaluate.memory.slots import describe_answer, place_slots, strip_overlap
from peerlane.evaluate.plan import presets_of
from peerlane.evaluate.timing.benchmark import _ARENA_SHARE, _MOST_CALLS
from peerlane.problems.contract.judge import expected_leaves
from peerlane.problems.contract.spec import Case, Problem
from peerlane.problems.contract.tree import describe, resolve_groups
from peerlane.report.catalogue import _Shapes

GIB = 2.0**30
CONTEXT_BYTES = 0.6 * GIB
"""Of a process on a GPU: its context, what torch loads, and the tensor that flushes the cache."""
COPIED_SLOTS = 3
"""Of a block, whose outputs wait to be judged, or as many as there are slots."""


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the tensors that operators make: ``peak_bytes`` is the most that was alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in (item.untyped_storage() for item in tree_leaves(made) if isinstance(item, torch.Tensor)):
            known = self._known.get(storage._cdata)
            if known is None or known[0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._known = {key: item for key, item in self._known.items() if not item[0].expired()}
                self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._known.values()))
        return made


def measured(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the most bytes that lived besides its arguments; (None, -1) if contents decide."""
    alive = Alive()
    try:
        with alive:
            return call(), alive.peak_bytes
    except (NotImplementedError, RuntimeError, ValueError, TypeError):
        return None, -1


@dataclass(frozen=True)
class Bytes:
    """What one case takes on a rank: a slot's inputs and outputs, a call of the reference, an oracle. -1: not known."""

    inputs: int
    outputs: int
    reference: int
    oracle: int

    @property
    def slot(self) -> int:
        return max(self.inputs, self.outputs)

    def waiting(self, slots: int) -> int:
        """Of outputs that are copied and not judged: large slots are chosen one at a time."""
        return min(slots, COPIED_SLOTS if self.inputs + self.outputs < GIB else 1) * self.outputs

    def judging(self, ranks: int, world_size: int, slots: int) -> dict[str, float]:
        """Of a GPU while the oracle works: one rank of a GPU at a time holds the inputs of all."""
        return {
            "slots": ranks * slots * (2 * self.inputs + self.outputs),
            "answers that wait": ranks * min(slots, COPIED_SLOTS) * self.outputs,
            "inputs of all ranks": world_size * self.inputs,
            "oracle": max(self.oracle, 0),
            "processes": 2 * ranks * CONTEXT_BYTES,
        }

    def timing(self, ranks: int, slots: int) -> dict[str, float]:
        """Of a GPU while both sides have captured the reference, or the candidate as much as that."""
        return {
            "slots": ranks * (slots * (2 * self.inputs + self.outputs) + self.outputs),
            "both sides' calls": 2 * ranks * max(self.reference, 0),
            "answers that wait": ranks * self.waiting(slots),
            "processes": 2 * ranks * CONTEXT_BYTES,
        }


class Sent:
    """A message between tensors without contents, which needs no time."""

    def wait(self) -> None: ...


def bytes_of(problem: Problem, case: Case, me: int) -> Bytes:
    """Of the rank ``me``, in a process group of its own; raises RuntimeError if contents decide how large the inputs are."""
    dist.init_process_group("fake", store=FakeStore(), rank=me, world_size=case.world_size)
    try:
        return _bytes_of(problem, case, me)
    finally:
        dist.destroy_process_group()


def _bytes_of(problem: Problem, case: Case, me: int) -> Bytes:
    groups = {}
    for name, members_of in problem.process_groups(case).items():
        made = [(dist.new_group(list(members)), members) for members in members_of]
        groups[name] = next((group for group, members in made if me in members), None)

    def inputs(rank: int) -> tuple[Any, ...]:
        return problem.inputs(case, rank, _Shapes(secret="", case_key=case.key, slot=0, block=0, rank=rank, device="meta"))

    tree = strip_overlap(inputs(me))
    args = resolve_groups(tree, groups.__getitem__)
    returned, reference = measured(lambda: problem.reference_of(case.variant)(*args))
    everyone = [inputs(rank) for rank in range(case.world_size)]
    expected, oracle = measured(lambda: problem.oracle(case, everyone, me))
    outputs = 0
    if reference >= 0:
        outputs = place_slots([describe_answer(problem.answer(returned, args))])[1]
    elif oracle >= 0:
        outputs = sum(leaf.value.numel() * leaf.dtype.itemsize for leaf in expected_leaves(expected))
    return Bytes(place_slots([describe(tree)])[1], outputs, reference, oracle)


def row(problem: Problem, case: Case, ranks: int, memory: float) -> tuple[str, bool]:
    """The line of a case, and whether it fits into ``memory`` bytes of a GPU that ``ranks`` ranks share."""
    first, last = (vars(bytes_of(problem, case, rank)) for rank in (0, case.world_size - 1))
    found = Bytes(**{name: max(first[name], last[name]) for name in first})
    slots = slots_that_fit(_MOST_CALLS, max(1, found.slot), _ARENA_SHARE * memory / ranks)
    judging, timing = found.judging(ranks, case.world_size, slots), found.timing(ranks, slots)
    parts = max(judging, timing, key=lambda item: sum(item.values()))
    fits = sum(parts.values()) <= memory
    sizes = "".join(f"{size / GIB:9.2f}" if size >= 0 else "        -" for size in (*vars(found).values(),))
    whole = f"{slots:6d}{sum(judging.values()) / GIB:9.1f}{sum(timing.values()) / GIB:9.1f}"
    largest = max(parts, key=lambda name: parts[name])
    said = "" if fits else f"  does not fit: {largest} take {parts[largest] / GIB:.1f}"
    return f"{problem.id:3d} {problem.slug[:34]:34s}{sizes}{whole}{said}", fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--ranks-per-gpu", type=int, default=4)
    parser.add_argument("--memory-gib", type=float, default=79.0)
    parser.add_argument("--preset", default="production_first")
    parser.add_argument("--problem", default="1-87")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.batch_isend_irecv = cast(Any, lambda transfers: [Sent() for _ in transfers])
    names = ("inputs", "outputs", "call", "oracle")
    print(f"{'GiB':38s}{''.join(f'{name:>9s}' for name in names)}{'slots':>6s}{'judging':>9s}{'timing':>9s}")
    refused = []
    for problem in problems.select(options.problem):
        if options.world_size not in problem.world_sizes:
            continue
        for preset in presets_of(problem, (options.preset,), options.world_size):
            if not (cases := problem.cases(preset, options.world_size)):
                continue
            try:
                line, fits = row(problem, cases[0], options.ranks_per_gpu, options.memory_gib * GIB)
            except RuntimeError:
                line, fits = f"{problem.id:3d} {problem.slug:34s} contents decide the size of its inputs", True
            print(line, flush=True)
            refused += [] if fits else [problem.id]
    print(f"do not fit: {', '.join(map(str, refused)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
