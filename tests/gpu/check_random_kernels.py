"""The 200 random kernels of the differential test on a GPU, against the bits that the emulator leaves, and the instruction kernels against
what PTX defines.

    PYTHONPATH=src timeout 300 python tests/gpu/check_random_kernels.py

Prints the kernels and results that differ; exits with 1 if there are any.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from device import instruction_kernels as instructions
from device import random_kernels as kernels
from peerlane.device import compile_cubin
from peerlane.device.host.launch import Kernel
from peerlane.hardware.environment import record


def main() -> int:
    """Returns the exit code."""
    digests = []
    for module in range(kernels.KERNELS // kernels.KERNELS_OF_A_MODULE):
        cubin = compile_cubin(kernels.source(module))
        first = module * kernels.KERNELS_OF_A_MODULE
        for number in range(first, first + kernels.KERNELS_OF_A_MODULE):
            given = torch.tensor(kernels.inputs(number), dtype=torch.int64).to(torch.int32).cuda()
            out = torch.zeros(kernels.THREADS * kernels.RESULTS, dtype=torch.int32, device="cuda")
            Kernel(cubin, f"random_{number}").launch(1, kernels.THREADS, [given, out])
            digests.append(kernels.digest(out.cpu().numpy().tobytes()))
    wrong = [number for number, (here, emulated) in enumerate(zip(digests, kernels.digests(), strict=True)) if here != emulated]
    print(f"{torch.cuda.get_device_name()}: {len(digests) - len(wrong)} of {len(digests)} kernels leave the emulator's bits")
    for number in wrong:
        print(f"random_{number} differs")
    differing = [text for kernel in instructions.KERNELS for text in _differences(kernel)]
    print(f"{len(instructions.KERNELS)} kernels of single instructions: {len(differing)} results differ")
    print("\n".join(differing[:40]))
    print(record()["software"])
    return 1 if wrong or differing else 0


def _differences(kernel: str) -> list[str]:
    """Returns the results of a kernel of single instructions that are not what PTX defines."""
    given = torch.tensor(instructions.inputs(kernel), dtype=torch.int64).to(torch.int32).cuda()
    out = torch.zeros(instructions.THREADS, instructions.RESULTS, dtype=torch.int32, device="cuda")
    Kernel(compile_cubin(instructions.SOURCE), kernel).launch(1, instructions.THREADS, [given, out])
    got = [[word % 2**32 for word in row] for row in out.tolist()]
    return [
        f"{kernel}: thread {thread}, result {i}: {got[thread][i]:#x}, expected {value:#x}"
        for thread, row in enumerate(instructions.expected(kernel))
        for i, value in enumerate(row)
        if got[thread][i] != value
    ]


if __name__ == "__main__":
    sys.exit(main())
