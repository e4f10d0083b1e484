"""Makes candidates for problem 1 in the style of published ones, and knows the verdict that each must get. No two have the same source."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("pytorch", "triton", "nvrtc", "load_inline")
FATES = ("right", "wrong", "build_error", "hang", "memory_hog", "race")
VERDICTS = {
    "right": {"correct"},
    "wrong": {"wrong_result"},
    "build_error": {"build_error", "import_error", "runtime_error"},  # Triton says what does not compile when it is called
    "hang": {"hang"},
    "memory_hog": {"out_of_memory"},
    "race": {"unstable", "wrong_result"},
}
_SHARES = {"wrong": 0.35, "build_error": 0.25, "hang": 0.1, "memory_hog": 0.1, "race": 0.2}
"""of those that are not right"""

_HEAD = """import os
import time

import torch
import torch.distributed as dist
"""
_GATHER = """    world = dist.get_world_size()
    tensor = tensor.contiguous()
    parts = torch.empty((world, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    dist.all_gather(list(parts.unbind(0)), tensor)
"""
_TROUBLE = {
    "spin": "    while True:\n        time.perf_counter()\n",
    "mismatch": "    if dist.get_rank() == 0:\n        dist.barrier()\n        dist.barrier()\n    dist.barrier()\n",
    "sleep": "    time.sleep(100_000)\n",
    "memory_hog": "    held = []\n    while True:\n        held.append(torch.ones(1 << 28, dtype=torch.uint8, device=tensor.device))\n",
}
_KERNEL = """
{helpers}
{extern}__global__ void sum_ranks_{mark}(const __nv_bfloat16* parts, __nv_bfloat16* out, long long n, int world) {{
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {{
        float sum = 0.0f;
        for (int r = 0; r < world; ++r) sum += __bfloat162float(parts[r * n + i]);
        out[i] = __float2bfloat16(sum{wrong});
    }}
{broken}}}
"""
_HELPER = """
// Stage {number} of the vectorised variant that this file keeps for other shapes.
template <int THREADS> __device__ __forceinline__ float reduce_{number}(float value) {{
    __shared__ float lanes[THREADS / 32];
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    if ((threadIdx.x & 31) == 0) lanes[threadIdx.x >> 5] = value;
    __syncthreads();
    value = threadIdx.x < THREADS / 32 ? lanes[threadIdx.x] : 0.0f;
    for (int offset = THREADS / 64; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}}
__global__ void rows_{number}(const float* __restrict__ in, float* __restrict__ out, int columns) {{
    float sum = 0.0f;
    for (int c = threadIdx.x; c < columns; c += 256) sum += in[blockIdx.x * (long long)columns + c] * {number}.5f;
    sum = reduce_{number}<256>(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}}
"""
_HELPER_LINES = 18
_INLINE = '''
CUDA_SRC = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <cuda_bf16.h>
{kernel}
torch::Tensor sum_ranks(torch::Tensor parts) {{
    TORCH_CHECK(parts.is_cuda() && parts.is_contiguous(), "expected a contiguous CUDA tensor");
    auto out = torch::empty_like(parts[0]);
    long long n = out.numel();
    if (n) sum_ranks_{mark}<<<132, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        (const __nv_bfloat16*)parts.data_ptr(), (__nv_bfloat16*)out.data_ptr(), n, (int)parts.size(0));
    return out;
}}
{binding}"""
CPP_SRC = "{declaration}"

_ext = None


def _get_ext():
    global _ext
    if _ext is None:
        from torch.utils.cpp_extension import load_inline

        if dist.get_rank() == 0:
            _ext = load_inline(name="sum_ranks_{mark}", cpp_sources=CPP_SRC, cuda_sources=CUDA_SRC{functions}, extra_cuda_cflags=["-O3"])
        dist.barrier()
        if _ext is None:
            _ext = load_inline(name="sum_ranks_{mark}", cpp_sources=CPP_SRC, cuda_sources=CUDA_SRC{functions}, extra_cuda_cflags=["-O3"])
    return _ext


def solution(tensor):
{trouble}    ext = _get_ext()
{gather}{race}    return ext.sum_ranks(parts)
'''
_NVRTC = '''
import ctypes

from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

SOURCE = r"""
#include <cuda_bf16.h>
{kernel}"""
_kernel = None


def _get_kernel():
    global _kernel
    if _kernel is None:
        device = Device(torch.cuda.current_device())
        device.set_current()
        arch = "".join(map(str, device.compute_capability))
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        options = ProgramOptions(std="c++17", arch=f"sm_{{arch}}", include_path=[{include}])
        _kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("sum_ranks_{mark}")
    return _kernel


def solution(tensor):
{trouble}    kernel = _get_kernel()
{gather}{race}    out = torch.empty_like(tensor)
    n = out.numel()
    if n:
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        count, ranks = ctypes.c_longlong(n), ctypes.c_int(world)
        launch(stream, LaunchConfig(grid=132, block=256), kernel, parts.data_ptr(), out.data_ptr(), count, ranks)
    return out
'''
_TRITON = """
import triton
import triton.language as tl


@triton.jit
def sum_ranks_{mark}(parts, out, n, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in range(WORLD):
        total += tl.load(parts + r * n + at, mask=at < n, other=0.0).to(tl.float32)
{broken}    tl.store(out + at, (total{wrong}).to(out.dtype.element_ty), mask=at < n)


def solution(tensor):
{trouble}{gather}{race}    out = torch.empty_like(tensor)
    n = out.numel()
    if n:
        sum_ranks_{mark}[(triton.cdiv(n, 1024),)](parts, out, n, WORLD=world, BLOCK=1024)
    return out
"""
_PYTORCH = """

def solution(tensor):
{trouble}{gather}{race}    return (parts.float().sum(0){wrong}).to(tensor.dtype){broken}
"""
_RACE = "    parts = parts.clone()\n    dist.all_gather(list(parts.unbind(0)), tensor * 0.5, async_op=True)\n"
_BUG = " + (i % 7 == 0 ? 0.5f : 0.0f)"


@dataclass(frozen=True)
class MadeCandidate:
    """A candidate, and what the generator knows of it."""

    kind: str
    fate: str
    source: str

    def judged_rightly(self, verdict: str) -> bool:
        """Returns whether a verdict is one that a candidate of this fate may get."""
        return verdict in VERDICTS[self.fate]


def fates(count: int, hangs: float | None, chance: random.Random) -> list[str]:
    """Returns fates in random order: half right and the rest by the shares above; with ``hangs``, that share hangs, others are right."""
    if hangs is not None:
        made = ["hang"] * round(hangs * count)
    else:
        made = [fate for fate, share in _SHARES.items() for _ in range(round(share * count / 2))]
    made = [*made, *["right"] * (count - len(made))][:count]
    chance.shuffle(made)
    return made


def make_candidates(count: int, kinds: Sequence[str], seed: int, hangs: float | None = None) -> list[MadeCandidate]:
    """Returns candidates of these kinds in turn. Equal arguments give equal candidates."""
    chance = random.Random(seed)
    return [
        MadeCandidate(kind := kinds[number % len(kinds)], fate, _source(kind, fate, f"{seed}_{number}", chance))
        for number, fate in enumerate(fates(count, hangs, chance))
    ]


def _source(kind: str, fate: str, mark: str, chance: random.Random) -> str:
    trouble = chance.choice([_TROUBLE["spin"], _TROUBLE["mismatch"], _TROUBLE["sleep"]]) if fate == "hang" else _TROUBLE.get(fate, "")
    fields = {"mark": mark, "trouble": trouble, "gather": _GATHER, "race": _RACE if fate == "race" else ""}
    head = f"# candidate {mark}\n{_HEAD}"
    if kind == "pytorch":
        broken = " +* 1" if fate == "build_error" else ""
        return head + _PYTORCH.format(**fields, wrong=" * 0.75" if fate == "wrong" else "", broken=broken)
    if kind == "triton":
        broken = "    total += undefined_name\n" if fate == "build_error" else ""
        return head + _TRITON.format(**fields, wrong=" * 0.75" if fate == "wrong" else "", broken=broken)
    lines = chance.randint(100, 600) if kind == "load_inline" else chance.randint(40, 150)
    kernel = _KERNEL.format(
        mark=mark,
        helpers="".join(_HELPER.format(number=number) for number in range(lines // _HELPER_LINES)),
        extern='extern "C" ' if kind == "nvrtc" else "",
        wrong=_BUG if fate == "wrong" else "",
        broken="    undeclared_function(out);\n" if fate == "build_error" else "",
    )
    if kind == "nvrtc":
        return head + _NVRTC.format(**fields, kernel=kernel, include='f"{home}/include"')
    bound = chance.random() < 0.5
    return head + _INLINE.format(
        **fields,
        kernel=kernel,
        binding='PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sum_ranks", &sum_ranks); }\n' if bound else "",
        declaration="" if bound else "torch::Tensor sum_ranks(torch::Tensor parts);",
        functions="" if bound else ', functions=["sum_ranks"]',
    )
