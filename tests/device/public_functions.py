"""Kernels that call every public function of CUDA's headers for device code, as few sources: what the emulator has to know."""

import importlib.util
import re
from pathlib import Path

_TYPES = ("half", "half2", "nv_bfloat16", "nv_bfloat162")
_DECLARED = r"^__CUDA_(?:HOSTDEVICE_)?{}_DECL__\s+([\w ]+?[\w*])\s+(\w+)\s*\(([^)]*)\)"
# Variables of the kernel that a parameter of this type takes.
_ARGUMENTS = {
    "__half": "h", "__half2": "h2", "__nv_bfloat16": "b", "__nv_bfloat162": "b2", "float": "f", "float2": "f2", "double": "d",
    "double2": "double2{d, d}",
    "signed char": "i", "char": "i", "unsigned char": "i", "short int": "i", "short": "i", "unsigned short int": "i", "unsigned short": "i",
    "int": "i", "unsigned int": "i", "unsigned": "i", "long long int": "i", "long long": "i", "unsigned long long int": "i",
    "unsigned long long": "i", "__half_raw": "__half_raw(h)", "__half2_raw": "__half2_raw(h2)", "__nv_bfloat16_raw": "__nv_bfloat16_raw(b)",
    "__nv_bfloat162_raw": "__nv_bfloat162_raw(b2)", "__nv_saturation_t": "__NV_SATFINITE", "__nv_fp8_storage_t": "(__nv_fp8_storage_t)i",
    "__nv_fp8x2_storage_t": "(__nv_fp8x2_storage_t)i", "__nv_fp8_interpretation_t": "{kind}",
    "cudaRoundMode": "cudaRoundZero", "__nv_fp8x4_storage_t": "(__nv_fp8x4_storage_t)i", "float4": "float4{f, f, f, f}",
    "double4": "double4{d, d, d, d}",
}  # fmt: skip
_POINTERS = {"__half": "ph", "__half2": "ph2", "__nv_bfloat16": "pb", "__nv_bfloat162": "pb2"}


def _header(name: str) -> str:
    spec = importlib.util.find_spec("nvidia.cu13")
    assert spec is not None and spec.submodule_search_locations, "CUDA's headers come with nvidia-cuda-nvrtc"
    return (Path(next(iter(spec.submodule_search_locations))) / "include" / name).read_text()


def _calls(header: str, kind: str) -> list[str]:
    """Returns a statement for each function that the header declares; one that is declared for several types has one of each."""
    calls = []
    for result, name, parameters in re.findall(_DECLARED.format(kind), _header(header), re.MULTILINE):
        arguments = []
        for parameter in filter(None, (item.strip() for item in parameters.split(","))):
            words = re.sub(r"\b(const|__restrict__|enum)\b", "", parameter.partition("=")[0])
            pointed = "*" in words
            kept = re.sub(r"[*\s]+\w+\s*$", "", words).strip() if not pointed else words.partition("*")[0].strip()
            arguments.append((_POINTERS if pointed else _ARGUMENTS)[" ".join(kept.split())])
        call = f"{name}({', '.join(arguments)})"
        for each in ("__NV_E4M3", "__NV_E5M2") if "{kind}" in call else ("",):
            made = call.replace("{kind}", each)
            calls.append(f"{made};" if result.strip() == "void" else f"keep({made});")
    return calls


def small_floats(header: str, kind: str) -> str:
    """Returns a source that calls all functions of one of the headers of small floats."""
    includes = "".join(f"#include <cuda_{name}.h>\n" for name in ("fp16", "bf16", "fp8"))
    calls = "\n    ".join(_calls(header, kind))
    return f"""{includes}
extern "C" __global__ void calls(
    char* out, float f, float2 f2, double d, int i, __half* ph, __half2* ph2, __nv_bfloat16* pb, __nv_bfloat162* pb2) {{
    __half h = ph[threadIdx.x];
    __half2 h2 = ph2[threadIdx.x];
    __nv_bfloat16 b = pb[threadIdx.x];
    __nv_bfloat162 b2 = pb2[threadIdx.x];
    int at = 0;
    auto keep = [&](auto value) {{ *reinterpret_cast<decltype(value)*>(out + 16 * at++) = value; }};
    {calls}
}}
"""


def atomics(scope: str) -> str:
    """Returns a source that calls the functions of ``cuda/atomic`` in a scope."""
    lines = []
    for kind, orders in (("int", _ORDERS), ("unsigned long long", _ORDERS), ("float", _ORDERS[3:4]), ("double", _ORDERS[3:4])):
        lines.append(f"{{ {kind} x = v, y = w; cuda::atomic_ref<{kind}, cuda::thread_scope_{scope}> a(*reinterpret_cast<{kind}*>(p));")
        for order in orders:
            to = f"cuda::memory_order_{order}"
            if order not in ("acq_rel", "release"):
                lines.append(f"x += a.load({to});")
            if order not in ("acq_rel", "acquire"):
                lines.append(f"a.store(x, {to});")
            lines.append(
                f"x += a.exchange(y, {to}) + a.fetch_add(x, {to}) + a.fetch_sub(y, {to}) + a.fetch_min(x, {to}) + a.fetch_max(y, {to});"
            )
            lines.append(f"x += a.compare_exchange_strong(y, x, {to}) + a.compare_exchange_weak(y, x, {to}, cuda::memory_order_relaxed);")
            if "f" not in kind and "double" not in kind:
                lines.append(f"x += a.fetch_and(x, {to}) + a.fetch_or(y, {to}) + a.fetch_xor(x, {to});")
        lines.append(f"a.wait(x); a.notify_one(); a.notify_all(); *reinterpret_cast<{kind}*>(p + 1) = x; }}")
    lines += [f"cuda::atomic_thread_fence(cuda::memory_order_{order}, cuda::thread_scope_{scope});" for order in _ORDERS[1:]]
    lines.append("{ auto& flag = *reinterpret_cast<cuda::std::atomic_flag*>(p + 2); flag.test_and_set(); flag.clear(); }")
    lines.append("{ auto& whole = *reinterpret_cast<cuda::atomic<int>*>(p + 3); ++whole; whole += 2; whole--; }")
    return _kernel("#include <cuda/atomic>", "unsigned long long* p, int v, int w", lines)


_ORDERS = ("relaxed", "acquire", "release", "acq_rel", "seq_cst")


def _kernel(head: str, parameters: str, lines: list[str]) -> str:
    body = "\n    ".join(lines)
    return f'{head}\nextern "C" __global__ void calls({parameters}) {{\n    {body}\n}}\n'


def barriers() -> str:
    """Returns a source that calls the functions of ``cuda/barrier``."""
    lines = [
        "__shared__ cuda::barrier<cuda::thread_scope_block> b; __shared__ alignas(16) char copied[128];",
        "if (threadIdx.x == 0) init(&b, blockDim.x);",
        "__syncthreads();",
        "b.arrive_and_wait();",
        "auto token = b.arrive(); b.wait(cuda::std::move(token));",
        "token = b.arrive(1); while (!b.try_wait_for(cuda::std::move(token), cuda::std::chrono::nanoseconds(50))) {}",
        "(void)b.arrive(); b.wait_parity(1); (void)b.try_wait_parity_for(0, cuda::std::chrono::nanoseconds(50)); (void)b.max();",
        "if (threadIdx.x == 0) { cuda::memcpy_async(copied, p, cuda::aligned_size_t<16>(64), b); cuda::device::barrier_native_handle(b); }",
        "if (threadIdx.x == 1) cuda::device::memcpy_async_tx(copied + 64, p + 64, cuda::aligned_size_t<16>(64), b);",
        "token = cuda::device::barrier_arrive_tx(b, 1, threadIdx.x == 1 ? 64 : 0); b.wait(cuda::std::move(token));",
        "cuda::device::barrier_expect_tx(b, 0);",
        "b.arrive_and_drop();",
        "auto& wide = *reinterpret_cast<cuda::barrier<cuda::thread_scope_device>*>(p + 256); wide.arrive_and_wait();",
        "p[threadIdx.x] = copied[threadIdx.x];",
    ]
    return _kernel("#include <cuda/barrier>", "char* p", lines)


def groups() -> str:
    """Returns a source that calls the functions of ``cooperative_groups``, without clusters."""
    head = "".join(f"#include <cooperative_groups{name}.h>\n" for name in ("", "/reduce", "/scan", "/memcpy_async"))
    lines = [
        "namespace cg = cooperative_groups; __shared__ alignas(16) int copied[64];",
        "auto grid = cg::this_grid(); grid.sync(); auto t = grid.barrier_arrive(); grid.barrier_wait(cuda_move(t));",
        "auto block = cg::this_thread_block(); block.sync(); block.barrier_wait(block.barrier_arrive());",
        "v += grid.size() + grid.thread_rank() + grid.block_rank() + grid.num_blocks() + grid.is_valid() + block.thread_index().x",
        "   + block.group_index().y + block.size() + block.num_threads() + block.dim_threads().x + block.thread_rank();",
        "auto tile = cg::tiled_partition<8>(block); tile.sync(); auto warp = cg::tiled_partition<32>(block);",
        "auto some = cg::coalesced_threads();",
        "v += tile.shfl(v, 1) + tile.shfl_up(v, 1) + tile.shfl_down(v, 1) + tile.shfl_xor(v, 1) + tile.any(v)",
        "   + tile.all(v) + tile.ballot(v)",
        "   + tile.match_any(v) + tile.meta_group_rank() + tile.meta_group_size();",
        "int same = 0; v += warp.match_all(v, same) + some.shfl(v, 0) + some.shfl_up(v, 1);",
        "v += some.shfl_down(v, 1) + some.any(v) + some.ballot(v);",
        "v += cg::reduce(tile, v, cg::plus<int>()) + cg::reduce(warp, v, cg::less<int>()) + cg::reduce(some, v, cg::bit_xor<int>());",
        "x += cg::reduce(warp, x, cg::plus<float>()); v += cg::inclusive_scan(warp, v) + cg::exclusive_scan(tile, v, cg::plus<int>());",
        "auto parts = cg::labeled_partition(warp, v & 1); auto halves = cg::binary_partition(warp, v > 0);",
        "v += parts.size() + halves.thread_rank();",
        "v += cg::invoke_one_broadcast(warp, [&] { return v; }); cg::invoke_one(warp, [&] { p[1] = v; });",
        "cg::memcpy_async(block, copied, p, sizeof(int) * 64); cg::wait(block); cg::wait_prior<0>(block);",
        "cg::reduce_store_async(warp, p + 2, v, cg::plus<int>());",
        "p[threadIdx.x] = v + copied[threadIdx.x] + int(x);",
    ]
    return _kernel(
        head + "template <class T> __device__ T&& cuda_move(T& t) { return static_cast<T&&>(t); }", "int* p, int v, float x", lines
    )


def others() -> str:
    """Returns a source with calls of functions, printf and assert, programmatic launches, and mathematics."""
    math = ("sinf", "cosf", "tanf", "expf", "exp2f", "exp10f", "logf", "log2f", "log10f", "log1pf", "expm1f", "sinhf", "coshf", "tanhf",
            "asinf", "acosf", "atanf", "erff", "erfcf", "rsqrtf", "cbrtf", "roundf", "ceilf", "lgammaf", "tgammaf",
            "__sinf", "__expf", "__logf",
            "__frcp_rn", "normcdff", "j0f", "exp", "log", "sin", "erf", "rsqrt", "cbrt", "tgamma")  # fmt: skip
    two = (
        "powf", "fmodf", "atan2f", "hypotf", "remainderf", "fdimf", "copysignf", "nextafterf", "__fdividef", "__powf", "pow", "fmod",
        "atan2",
    )  # fmt: skip
    integers = ("__popc(v)", "__clz(v)", "__ffs(v)", "__brev(v)", "__byte_perm(v, w, 0x3210)", "__dp4a(v, w, v)", "__dp2a_lo(v, w, v)",
                "__dp2a_hi(v, w, v)", "__sad(v, w, 1)", "__mul24(v, w)", "__mulhi(v, w)", "__hadd(v, w)", "__rhadd(v, w)",
                "__funnelshift_l(v, w, 3)",
                "__vadd4(v, w)", "__vabsdiffu4(v, w)", "__vmaxs2(v, w)", "__viaddmax_s32(v, w, v)", "__vcmpgtu4(v, w)", "__usad(v, w, 1)",
                "__match_any_sync(~0u, v)", "__reduce_add_sync(~0u, v)", "__activemask()")  # fmt: skip
    lines = [f"x += {name}(x);" for name in math] + [f"x += {name}(x, y);" for name in two]
    lines += [f"v += {call};" for call in integers]
    lines += ['printf("%d %f\\n", v, x); assert(v != 7);', "v += apart(p, w); if (w) v += recursive(w);"]
    lines += ["v += __isGlobal(p) + __isShared(p);"]
    lines += ["p[0] = v + int(x); __nanosleep(5); __trap();"]
    functions = """__noinline__ __device__ int apart(int* p, int i) { return p[i] + 1; }
__noinline__ __device__ int recursive(int n) { return n < 2 ? n : recursive(n - 1) + recursive(n - 2); }"""
    return _kernel(functions, "int* p, int v, int w, double x, double y", lines)
