"""Every device header and every kernel of the examples compiles for every world size; host structures match the device's."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from peerlane.device import ArenaView, all_reduce, compile_cubin
from peerlane.device.jit import INCLUDE_DIR

pytest.importorskip("cuda.bindings.nvrtc", reason="needs pip install 'peerlane[cuda]'")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "cuda").glob("*_cuda.py"))
HEADERS = sorted(INCLUDE_DIR.glob("peerlane/*.cuh"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_headers_and_examples() -> None:
    assert len(HEADERS) >= 4 and len(EXAMPLES) >= 2


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_header_stands_alone(header: Path) -> None:
    compile_cubin(f'#include <peerlane/{header.name}>\nextern "C" __global__ void nothing() {{}}\n')


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.bfloat16), (8, torch.float16)])
def test_an_example_compiles(example: Path, world_size: int, dtype: torch.dtype) -> None:
    source = load(example).SOURCE
    cubin = compile_cubin(source, defines={"ELEMENT": all_reduce.ELEMENT_TYPES[dtype], "WORLD_SIZE": world_size})
    image = cubin.path.read_bytes()
    kernels = re.findall(r"^KERNEL (\w+)\(", source, re.MULTILINE)
    assert {"one_shot", "two_shot", "two_shot_ring"} <= set(kernels)
    assert all(kernel.encode() in image for kernel in kernels)


def initialised(structure: ctypes.Structure, without: tuple[str, ...] = ()) -> str:
    """Gives every number in the structure a value of its own that fills it; the same as a C++20 initialiser, by name."""
    parts = []
    for position, (name, kind) in enumerate(structure._fields_):
        if name not in without:
            setattr(structure, name, int.from_bytes([0xA0 + position] * ctypes.sizeof(kind), "little"))
            parts.append(f".{name} = {getattr(structure, name)}ull")
    return f"{{{', '.join(parts)}}}"


def test_host_structures_have_the_device_s_layout() -> None:
    """An initialised device variable lies in the cubin as the bytes of the host's structure. Pointers are zero: they are no constants."""
    arena, workspace = ArenaView(), all_reduce.Workspace()
    constants = {
        "max_epoch_blocks": all_reduce._MAX_EPOCH_BLOCKS,
        "packet_data_bytes": all_reduce._PACKET_DATA_BYTES,
        "ring_depth": all_reduce._RING_DEPTH,
        "tile_vectors * sizeof(Vec16)": all_reduce._TILE_BYTES,
        "sizeof(Arena)": ctypes.sizeof(arena),
        "sizeof(AllReduceWorkspace)": ctypes.sizeof(workspace),
    }
    cubin = compile_cubin(
        "#include <peerlane/all_reduce.cuh>\nusing namespace peerlane;\n"
        + "".join(f"static_assert({name} == {value});\n" for name, value in constants.items())
        + f"__device__ Arena arena = {initialised(arena, without=('base', 'fault'))};\n"
        + f"__device__ AllReduceWorkspace workspace = {initialised(workspace)};\n"
    )
    image = cubin.path.read_bytes()
    assert bytes(arena) in image
    assert bytes(workspace) in image


@pytest.mark.parametrize("world_size", range(2, 9))
def test_plans_fit_the_workspace_and_the_device(world_size: int) -> None:
    packet_bytes = all_reduce._sizes(world_size)[0]
    limit = all_reduce.PACKET_LIMIT_BYTES
    for nbytes in (2, 4, 12, 4096, 65536, limit // 3, limit - 2, limit, limit + 2, 1 << 28, (1 << 33) + 2):
        chosen = all_reduce.plan(nbytes, world_size, sm_count=132)
        packets = -(-nbytes // 12)
        needed = {"one_shot": world_size * packets * 16, "two_shot": 2 * world_size * -(-packets // world_size) * 16, "two_shot_ring": 0}
        assert needed[chosen.kernel] <= packet_bytes
        assert 1 <= chosen.grid <= 132 and chosen.block in (128, 256, 512) and chosen.grid <= all_reduce._MAX_EPOCH_BLOCKS
        if chosen.kernel == "two_shot_ring":
            assert chosen.grid <= all_reduce.RING_BLOCKS


def test_small_tensors_go_in_one_shot_and_large_ones_through_the_ring() -> None:
    kernels = [all_reduce.plan(nbytes, 4, 132).kernel for nbytes in (4 << 10, 2 << 20, 64 << 20)]
    assert kernels == ["one_shot", "two_shot", "two_shot_ring"]
    assert all_reduce.plan(2 << 20, 2, 132).kernel == "one_shot"
