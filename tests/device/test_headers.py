"""Every device header and every kernel of the examples compiles for every world size; host structures match the device's."""

import ctypes
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from peerlane import problems
from peerlane.device import ArenaView, compile_cubin
from peerlane.device.collectives import workspace
from peerlane.device.collectives.point_to_point import Slots
from peerlane.device.host.arena import RemoteView
from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.host.jit import INCLUDE_DIR
from peerlane.device.host.waits import RECORD_WORDS, ROLES, WaitRecord
from peerlane.device.products import gemm
from peerlane.problems.scaffolds import scaffold
from peerlane.solutions import p018_tp_rms_norm

ROOT = Path(__file__).parents[2]
EXAMPLES = [path for path in sorted((ROOT / "examples" / "cuda").glob("*_cuda.py")) if "\nSOURCE = " in path.read_text()]
RINGS = workspace.Rings(tile_bytes=1024, depth=32, stages=5, in_flight=3, summing_warps=7)
SHAPES = [f"{kind}_{what}" for kind in ("exchange", "reduce", "relay", "broadcast") for what in ("threads", "shared_bytes")]
HOST_ONLY = {"blocks", "bytes_per_kind"}
HEADERS = sorted(INCLUDE_DIR.glob("peerlane/**/*.cuh"))


def test_there_are_headers_and_examples() -> None:
    assert len(HEADERS) >= 14 and len(EXAMPLES) >= 1


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_a_header_stands_alone(header: Path) -> None:
    source = f'#include <{header.relative_to(INCLUDE_DIR)}>\nextern "C" __global__ void nothing() {{}}\n'
    compile_cubin(source, defines={**RINGS.defines(), **Slots().defines()})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (8, torch.float16),
        *(pytest.param(*less, marks=pytest.mark.long) for less in ((2, torch.float32), (3, torch.bfloat16), (4, torch.bfloat16))),
    ],
)
def test_an_example_compiles(example: Path, world_size: int, dtype: torch.dtype) -> None:
    source = runpy.run_path(str(example))["SOURCE"]
    cubin = compile_cubin(source, defines={"ELEMENT": ELEMENT_TYPES[dtype], "WORLD_SIZE": world_size, **RINGS.defines()})
    image = cubin.path.read_bytes()
    kernels = re.findall(r"^KERNEL (\w+)\(", source, re.MULTILINE)
    assert kernels
    assert all(kernel.encode() in image for kernel in kernels)


def initialised(structure: ctypes.Structure, first: int = 0xA0) -> str:
    """Gives every number in the structure a value of its own that fills it; the same as a C++20 initialiser, by name.

    Pointers and arrays are left out: a pointer is no constant.
    """
    parts = []
    for position, (name, kind) in enumerate(structure._fields_):
        if name in ("base", "stop", "fault", "timeline"):
            continue
        if issubclass(kind, ctypes.Structure):
            parts.append(f".{name} = {initialised(getattr(structure, name), first + 0x10 * position)}")
        elif issubclass(kind, ctypes.Array):
            values = [int.from_bytes([first + 8 * position + item] * 8, "little") for item in range(kind._length_)]
            getattr(structure, name)[:] = values
            parts.append(f".{name} = {{{', '.join(f'{value}ull' for value in values)}}}")
        else:
            setattr(structure, name, int.from_bytes([(first + position) % 256] * ctypes.sizeof(kind), "little"))
            parts.append(f".{name} = {getattr(structure, name)}{'f' if kind is ctypes.c_float else 'ull'}")
    return f"{{{', '.join(parts)}}}"


def test_host_structures_have_the_device_s_layout() -> None:
    """An initialised device variable lies in the cubin as the bytes of the host's structure."""
    structures = {
        "Arena": ArenaView(),
        "FaultRecord": WaitRecord(),
        "CollectiveWorkspace": workspace.Workspace(),
        "Messages": workspace.Messages(),
    }
    constants = {
        "max_epoch_blocks": workspace.MAX_EPOCH_BLOCKS,
        "packet_data_bytes": workspace.PACKET_DATA_BYTES,
        "sizeof(Vec16)": workspace.PACKET_BYTES,
        "line_bytes": workspace.LINE_BYTES,
        **{f"rings.{field.name}": getattr(RINGS, field.name) for field in fields(RINGS) if field.name not in HOST_ONLY},
        **{name: getattr(RINGS, name) for name in SHAPES},
        "sizeof(FaultRecord)": 4 * RECORD_WORDS,
        "communicator": ROLES.index("communicator"),
        **{f"sizeof({name})": ctypes.sizeof(structure) for name, structure in structures.items()},
    }
    cubin = compile_cubin(
        "#include <peerlane/collectives/relay.cuh>\nusing namespace peerlane;\n"
        + "".join(f"static_assert({name} == {value});\n" for name, value in constants.items())
        + "".join(f"__device__ {name} one_{name} = {initialised(structure)};\n" for name, structure in structures.items()),
        defines=RINGS.defines(),
    )
    image = cubin.path.read_bytes()
    for name, structure in structures.items():
        assert bytes(structure) in image, name


@pytest.mark.parametrize(("header", "structures"), [("roles", {"GroupedTiles": gemm.GroupedTiles}), ("remote", {"Remote": RemoteView})])
def test_host_parameters_have_the_devices_layout(header: str, structures: dict[str, type[ctypes.Structure]]) -> None:
    places = []
    for name, twin in structures.items():
        members = [member for member, *_ in twin._fields_ if member != "padding"]
        places += [f"__INTADDR__(&(({name}*)0)->{member}) == {getattr(twin, member).offset}" for member in members]
        places.append(f"sizeof({name}) == {ctypes.sizeof(twin)}")
    checks = "".join(f"static_assert({place});\n" for place in places)
    compile_cubin(f"#include <peerlane/{header}.cuh>\nusing namespace peerlane;\n{checks}")


ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")


def new_kernel() -> DeclaredKernel:
    """The kernel of a file that `peerlane new` writes."""
    names: dict[str, object] = {}
    exec(compile(scaffold(problems.get(1), "kit"), "new.py", "exec"), names)
    kernel = names["GATHER"]
    assert isinstance(kernel, DeclaredKernel)
    return kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_new_files_and_rows_compile(arch: str) -> None:
    types = {**dict.fromkeys(("X_TYPE", "WEIGHT_TYPE", "Y_TYPE"), "BFloat16"), "VECTORS": 2, "TOGETHER": 1}
    for kernel, defines in ((new_kernel(), {}), (p018_tp_rms_norm.RMS_NORM, types)):
        image = compile_cubin(kernel.source, defines={"WORLD_SIZE": 4, **defines}, arch=arch).path.read_bytes()
        assert kernel.name.encode() in image
