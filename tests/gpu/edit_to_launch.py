"""How long it takes from an edited kernel to the end of its first launch: the kit's compiler, and torch's load_inline, on the same kernel.

    PYTHONPATH=src python tests/gpu/edit_to_launch.py [--times 5] [--skip-extension] [--out FILE]

Every edit changes a number in the source, so that no cache knows it. The first compilation of a process, which loads NVRTC, is told apart.
Prints seconds; ``--out`` writes them with the environment.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from local_ranks import LocalRanks

from peerlane.device import Kernel, LocalKernel, compile_cubin
from peerlane.device.products import gemm
from peerlane.hardware.environment import record

SCALE = """
extern "C" __global__ void scale(float* data, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] *= %d;
}
"""
EXTENSION = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
__global__ void scale(float* data, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) data[i] *= %d;
}
void run(torch::Tensor data) {
    scale<<<data.numel() / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(data.data_ptr<float>(), data.numel());
}
"""
COUNT = 1 << 16
_drawn = iter(random.sample(range(2, 1 << 20), 1000))


def small_kernel(factor: int) -> None:
    data = torch.ones(COUNT, device="cuda")
    kernel = Kernel(compile_cubin(SCALE % factor, arch=arch()), "scale")
    kernel.launch(COUNT // 256, 256, (data, ctypes.c_int(COUNT)))
    check(data, factor)


def matrix_product(factor: int) -> None:
    """The kit's largest kernel, with a second one in the same file that changes."""
    a, b = (torch.randint(-1, 2, (128, 128), device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    edited = LocalKernel("gemm", f"{gemm.SOURCE}\n{SCALE % factor}", **gemm.GEMM.fields)
    with mock.patch.object(gemm, "GEMM", edited):
        gemm.bind(LocalRanks(1).groups[0], a, b, out, gemm.TILINGS[0])()
    torch.cuda.synchronize()
    if not torch.equal(out, a @ b):
        raise SystemExit("the edited matrix product is wrong")


def extension(factor: int) -> None:
    from torch.utils.cpp_extension import load_inline

    data = torch.ones(COUNT, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        declaration = "void run(torch::Tensor data);"
        module = load_inline(f"edited_{factor}", declaration, cuda_sources=EXTENSION % factor, functions=["run"], build_directory=folder)
        module.run(data)
    check(data, factor)


def check(data: torch.Tensor, factor: int) -> None:
    torch.cuda.synchronize()
    if not bool((data == factor).all()):
        raise SystemExit(f"the kernel that multiplies by {factor} was not the one that ran")


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}a"


def seconds(work: Callable[[int], None]) -> float:
    factor = next(_drawn)
    begin = time.perf_counter()
    work(factor)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--skip-extension", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    found = {"small kernel, first in the process": [seconds(small_kernel)]}
    found["small kernel"] = [seconds(small_kernel) for _ in range(options.times)]
    found["matrix product"] = [seconds(matrix_product) for _ in range(options.times)]
    if not options.skip_extension:
        found["small kernel through load_inline"] = [seconds(extension) for _ in range(min(2, options.times))]
    for what, times in found.items():
        print(f"{what}: {statistics.median(times):.2f} s (n = {len(times)}, {min(times):.2f} to {max(times):.2f})")
    if options.out is not None:
        options.out.write_text(json.dumps({"environment": record(), "seconds": found}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
