"""How long it takes from an edited kernel to the end of its first launch: the kit's compiler, and torch's load_inline, on the same kernel.

    PYTHONPATH=src python tests/gpu/edit_to_launch.py [--times 5] [--skip-extension] [--out FILE]

Every edit changes a number in the source, so that no cache knows it. The first compilation of a process, which loads NVRTC, is told apart.
Prints seconds; ``--out`` writes them with the environment.
"""

import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from harness import Row, report, script
from local_ranks import LocalRanks

from peerlane.device import Kernel, LocalKernel, compile_cubin
from peerlane.device.products import gemm

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
    kernel = Kernel(compile_cubin(SCALE % factor), "scale")
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
        raise RuntimeError("the edited matrix product is wrong")


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
        raise RuntimeError(f"the kernel that multiplies by {factor} was not the one that ran")


def seconds(name: str, work: Callable[[int], None], times: int) -> Row:
    took = []
    for _ in range(times):
        factor, begin = next(_drawn), time.perf_counter()
        work(factor)
        took.append(time.perf_counter() - begin)
    return {"what": name, "median_s": round(statistics.median(took), 3), "seconds": took}


def rows_of(times: int, extensions: int) -> Iterator[Row]:
    torch.zeros(1, device="cuda")
    yield seconds("small kernel, first in the process", small_kernel, 1)
    yield seconds("small kernel", small_kernel, times)
    yield seconds("matrix product", matrix_product, times)
    if extensions:
        yield seconds("small kernel through load_inline", extension, extensions)


if __name__ == "__main__":
    parser = script(__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--skip-extension", action="store_true")
    options = parser.parse_args()
    report([rows_of(options.times, 0 if options.skip_extension else min(2, options.times))], options.out)
