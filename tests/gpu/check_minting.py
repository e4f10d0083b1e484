"""Whether inputs that are drawn by a CUDA graph are those that are drawn call by call, and how long either takes. One GPU does.

    python tests/gpu/check_minting.py [--problem all] [--world-size 2] [--preset pkb] [--slots 12]

Prints a line per case: milliseconds that the host needs to generate a block call by call and by replay, or that its inputs are not
captured.
Ends with 1 if a replay's contents are not those that are drawn call by call, or if ranks draw different amounts of what all of them draw
alike.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from peerlane import problems
from peerlane.evaluate.memory.input_generation import _CAPTURED_BYTES, InputGenerator, Inputs
from peerlane.evaluate.memory.slots import ArgumentSlots, end_of, place_slots, strip_overlap
from peerlane.problems.contract import RANDOM, BlockGenerators, Case, Problem, describe

SECRET = "check"


def lay_out(inputs: Inputs, count: int) -> tuple[torch.Tensor, ArgumentSlots]:
    """Memory for so many slots, and the slots."""
    described = [describe(strip_overlap(inputs.of(slot, 0).args)) for slot in range(count)]
    layout, _ = place_slots(described)
    memory = torch.zeros(end_of(layout), dtype=torch.uint8, device=inputs.device)
    return memory, ArgumentSlots(memory, layout, lambda name: name)


def generated_s(input_generator: InputGenerator, block: int, count: int) -> float:
    """Seconds until a block's contents are there."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    input_generator.generate_inputs(block, [RANDOM] * count)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def check(problem: Problem, case: Case, rank: int, slots: int) -> tuple[str, bool]:
    """What there is to say of a case, and whether all is well."""
    inputs = Inputs(problem, case, rank, SECRET, torch.device("cuda"))
    memory, laid_out = lay_out(inputs, slots)
    if laid_out.end(slots) > _CAPTURED_BYTES * slots:
        return "too large to be captured", True
    input_generator, plain = InputGenerator(inputs, laid_out), InputGenerator(inputs, laid_out)
    plain.captures = False
    for block in range(2):
        generated_s(plain, block, slots)
        generated_s(input_generator, block, slots)
    plain_s = min(generated_s(plain, block, slots) for block in range(2, 5))
    if not input_generator.captures:
        return f"{plain_s * 1e3:8.2f} ms, not captured", True
    well, replay_s = True, []
    for block in (7, 8):
        replay_s.append(generated_s(input_generator, block, slots))
        replayed = memory.clone()
        memory.zero_()
        plain.generate_inputs(block, [RANDOM] * slots)
        well = well and torch.equal(replayed, memory)
    return f"{plain_s * 1e3:8.2f} ms {min(replay_s) * 1e3:8.2f} ms{'' if well else '  WRONG'}", well


def drawn_alike(problem: Problem, case: Case) -> bool:
    """Whether all ranks are as far in the generator that they share when they have drawn a call's inputs."""
    offsets = set()
    for rank in range(case.world_size):
        inputs = Inputs(problem, case, rank, SECRET, torch.device("cuda"))
        generators = BlockGenerators(inputs.device)
        generators.begin(secret=SECRET, case_key=case.key, block=0, rank=rank)
        inputs.of(0, 0, RANDOM, generators)
        offsets.add(generators.shared.get_offset())
    return len(offsets) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="all")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--preset", default="pkb")
    parser.add_argument("--slots", type=int, default=12)
    options = parser.parse_args()
    ok = True
    for problem in problems.select(options.problem):
        if options.world_size not in problem.world_sizes:
            continue
        for case in problem.cases(options.preset, options.world_size):
            said, well = check(problem, case, options.world_size - 1, options.slots)
            alike = drawn_alike(problem, case)
            print(f"{problem.id:3} {case.key:40} {said}{'' if alike else '  RANKS DRAW DIFFERENT AMOUNTS'}", flush=True)
            ok = ok and well and alike
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
