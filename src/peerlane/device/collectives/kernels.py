"""The kernels of the collectives: one source each, compiled when it is first used, for one world size, element type and reduction."""

from dataclasses import dataclass

import torch

from peerlane.device.collectives.reductions import reduced_type
from peerlane.device.collectives.workspace import RINGS, Rings
from peerlane.device.host.jit import Cubin, compile_cubin

_SOURCE = """
#include <peerlane/collectives/{header}.cuh>
using namespace peerlane;
extern "C" __global__ void __launch_bounds__({threads}, 1) {name}(
    const __grid_constant__ Arena arena, const __grid_constant__ CollectiveWorkspace space, const __grid_constant__ Messages messages,
    const char* in, char* out, u64 bytes, int root) {{
    {call};
}}
"""


@dataclass(frozen=True)
class Source:
    """A kernel: its header, the call it consists of, whether it adds elements, and the threads of its blocks (by default at most 512)."""

    header: str
    call: str
    sums: bool = False
    threads: str = "512"

    def text(self, name: str) -> str:
        """Returns CUDA C++, to be compiled with WORLD_SIZE and, for a sum, ELEMENT. All kernels take the same arguments."""
        return _SOURCE.format(name=name, header=self.header, call=self.call, threads=self.threads)


ROUNDS = "_rounds"
"""How the names of kernels end that send packets in several rounds."""


def _by_packets(name: str, header: str, call: str, arguments: str, *, sums: bool = False) -> dict[str, Source]:
    """Returns a kernel for messages that the packet buffers hold, and the same one for longer ones, which it sends in several rounds."""
    element = "ELEMENT, " if sums else ""
    return {
        name: Source(header, f"{call}<{element}WORLD_SIZE>({arguments})", sums),
        name + ROUNDS: Source(header, f"{call}<{element}WORLD_SIZE, true>({arguments})", sums),
    }


KERNELS = {
    "all_reduce_one_shot": Source("all_reduce", "one_shot<ELEMENT, WORLD_SIZE>(arena, space, in, out, bytes)", sums=True),
    **_by_packets("all_reduce_two_shot", "two_shot", "two_shot", "arena, space, AllReduceRoute<WORLD_SIZE>{}, in, out, bytes", sums=True),
    **_by_packets("reduce_two_shot", "two_shot", "two_shot", "arena, space, ReduceRoute<WORLD_SIZE>{root}, in, out, bytes", sums=True),
    **_by_packets("broadcast_two_shot", "two_shot", "broadcast_two_shot", "arena, space, root, in, out, bytes"),
    **_by_packets("reduce_packets", "exchange_packets", "reduce_by_packets", "arena, space, messages, in, out", sums=True),
    **_by_packets("exchange_packets", "exchange_packets", "exchange_by_packets", "arena, space, messages, in, out"),
    "all_reduce_relay": Source(
        "relay",
        "relay<ELEMENT, WORLD_SIZE>(arena, space, AllReduceRoute<WORLD_SIZE>{}, in, out, bytes)",
        sums=True,
        threads="relay_threads",
    ),
    "all_reduce_staged": Source("staged", "all_reduce_staged<ELEMENT, WORLD_SIZE>(arena, space, in, out, bytes)", sums=True),
    "reduce_relay": Source(
        "relay",
        "relay<ELEMENT, WORLD_SIZE>(arena, space, ReduceRoute<WORLD_SIZE>{root}, in, out, bytes)",
        sums=True,
        threads="relay_threads",
    ),
    "reduce_ring": Source(
        "exchange", "reduce_scatter<ELEMENT, WORLD_SIZE>(arena, space, messages, in, out)", sums=True, threads="reduce_threads"
    ),
    "broadcast_relay": Source("relay", "broadcast<WORLD_SIZE>(arena, space, root, in, out, bytes)", threads="broadcast_threads"),
    "exchange_ring": Source("exchange", "exchange<WORLD_SIZE>(arena, space, messages, in, out)", threads="exchange_threads"),
}
"""Every kernel of the collectives, by name."""


def compile_kernel(name: str, world_size: int, dtype: torch.dtype, arch: str | None = None, rings: Rings = RINGS) -> Cubin:
    """Compiles a kernel for a world size; ``dtype`` matters where it sums."""
    source, defines = kernel_source(name, world_size, dtype, rings)
    return compile_cubin(source, arch=arch, defines=defines)


def kernel_source(
    name: str, world_size: int, dtype: torch.dtype, rings: Rings = RINGS, reduction: str = "sum"
) -> tuple[str, dict[str, str | int]]:
    """Returns the source and the macros of a kernel. ``reduction`` is the name of one, for kernels that sum."""
    kernel = KERNELS[name]
    defines: dict[str, str | int] = {"WORLD_SIZE": world_size, **rings.defines()}
    if kernel.sums:
        defines["ELEMENT"] = reduced_type(reduction, dtype)
    return kernel.text(name), defines
