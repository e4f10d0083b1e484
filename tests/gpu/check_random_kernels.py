"""The 200 random kernels of the differential test on a GPU, against the bits that the emulator leaves.

    PYTHONPATH=src timeout 300 python tests/gpu/check_random_kernels.py

Prints the kernels whose bits differ; exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

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
    print(record()["software"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
