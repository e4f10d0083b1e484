"""Runs the random kernels of tests/device/random_kernels.py on a GPU and writes what each leaves: expected values for the emulator.

python tests/gpu/run_random_kernels.py tests/device/random_kernels.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from device import random_kernels as kernels
from peerlane.device import Kernel, compile_cubin


def main() -> None:
    results: dict[str, str] = {}
    for number in range(kernels.KERNELS):
        if number % kernels.KERNELS_OF_A_MODULE == 0:
            cubin = compile_cubin(kernels.source(number // kernels.KERNELS_OF_A_MODULE))
        given = torch.tensor(kernels.inputs(number), dtype=torch.int64).to(torch.int32).cuda()
        out = torch.zeros(kernels.THREADS * kernels.RESULTS, dtype=torch.int32, device="cuda")
        Kernel(cubin, f"random_{number}").launch(1, kernels.THREADS, [given, out])
        results[str(number)] = out.cpu().numpy().tobytes().hex()
    Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=0) + "\n")
    print(f"{len(results)} kernels on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
