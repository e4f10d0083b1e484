"""Kernels declared once, in Python: fields by value, tensors, and what they keep in the arena.

    SCALE = DeclaredKernel("scale_all", SOURCE, flags=Flags(), epochs=Epochs(), x=Pointer(), rows=U32)

    launch = SCALE.bind(group, grid=8, block=256, defines={...}, sizes={"flags": 8}, rows=64)     collective; keep it: per_group
    launch(x=tensor)                                                                              a few microseconds

The source gets a structure ``ScaleAll`` with these fields, in this order, behind its last ``#include``. Its kernel has two parameters:

    extern "C" __global__ void scale_all(const __grid_constant__ Arena arena, const __grid_constant__ ScaleAll args)

The structure's twin in Python has the same layout: the compiler checks sizes and offsets. ``bind`` makes an arena of the size that is
needed and takes every part of it. Where several launches share that memory, ``reserve`` takes it and each ``bind`` of it makes a launch.
A ``LocalKernel`` has no arena: ``args`` is its only parameter. In the emulator the same declarations make the scenario.
"""

from __future__ import annotations

import ctypes
import linecache
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from peerlane.device.host.arena import Arena
from peerlane.device.host.group import DeviceKernel, DeviceLaunch, Group, per_group
from peerlane.device.host.layout import LINE_BYTES
from peerlane.device.host.roles import BlockNeeds, require_resident
from peerlane.device.host.tensor_map import TensorMap, TensorMapSpec
from peerlane.errors import EmulatedFault, LaunchError, UsageError

Key = TypeVar("Key", bound=Hashable)

MAX_EPOCH_BLOCKS = 1024
"""The macro of a kernel with ``Epochs``; 256 without it, as arena.cuh says."""
PACKET_BYTES = 16  # of packet.cuh
MAP_ALIGNMENT = 64  # of tensor maps, in C++; ctypes knows nothing of it


class PacketSpace(ctypes.Structure):
    """Mirrors ``peerlane::PacketSpace``."""

    _fields_ = (("at", ctypes.c_uint64), ("count", ctypes.c_uint32), ("unused", ctypes.c_uint32))


@dataclass(frozen=True)
class Field:
    """A field by value: its C++ type and its twin. ``count`` makes it an array."""

    cpp: str
    twin: Any
    count: int = 0

    def ctype(self) -> Any:
        return self.twin * self.count if self.count else self.twin

    def declaration(self, name: str) -> str:
        return f"{self.cpp} {name}{f'[{self.count}]' if self.count else ''};"

    def value(self, group: Group, given: Any) -> Any:
        """What a caller gives, as the structure holds it."""
        return (self.twin * self.count)(*given) if self.count else given


U32, U64, I32 = Field("u32", ctypes.c_uint32), Field("u64", ctypes.c_uint64), Field("int", ctypes.c_int32)
F32, F64 = Field("float", ctypes.c_float), Field("double", ctypes.c_double)


def array(field: Field, count: int) -> Field:
    """``count`` values in a row."""
    return Field(field.cpp, field.twin, count)


def structure(cpp: str, twin: type[ctypes.Structure]) -> Field:
    """A structure of a header, by its C++ name and its twin; sizes are compared by the compiler."""
    return Field(cpp, twin)


class Map(Field):
    """A tensor map, or ``count`` of them: what a caller gives is encoded, unless it is already."""

    def __init__(self, count: int = 0) -> None:
        super().__init__("TensorMap", TensorMap, count)

    def value(self, group: Group, given: Any) -> Any:
        if self.count:
            return (TensorMap * self.count)(*(group.encode(one) if isinstance(one, TensorMapSpec) else one for one in given))
        return group.encode(given) if isinstance(given, TensorMapSpec) else given


class Pointer(Field):
    """The address of a tensor's first element; the tensor is kept by the caller, and contiguous unless ``strided``. None is a null
    pointer."""

    def __init__(self, cpp: str = "char*", *, strided: bool = False) -> None:
        super().__init__(cpp, ctypes.c_uint64)
        object.__setattr__(self, "strided", strided)

    strided: bool

    def value(self, group: Group, given: torch.Tensor | None) -> int:
        if given is None:
            return 0
        if not self.strided and not given.is_contiguous():
            raise UsageError(f"a tensor of shape {tuple(given.shape)} and strides {given.stride()} is not contiguous; pass .contiguous()")
        return group.address(given)


class Address(Field):
    """A pointer that the caller gives as a number."""

    def __init__(self, cpp: str) -> None:
        super().__init__(cpp, ctypes.c_uint64)


class ArenaField(Field):
    """Something in the arena; the kernel gets its offset. ``nbytes(size, world_size)`` of it, where ``size`` is the caller's."""

    def __init__(self, nbytes: Callable[[int, int], int], align: int = LINE_BYTES) -> None:
        super().__init__("u64", ctypes.c_uint64)
        object.__setattr__(self, "nbytes", nbytes)
        object.__setattr__(self, "align", align)

    nbytes: Callable[[int, int], int]
    align: int

    def taken(self, offset: int, size: int) -> Any:
        """What the kernel gets."""
        return offset


class Epochs(ArenaField):
    """The counters of ``next_epoch``."""

    def __init__(self) -> None:
        super().__init__(lambda size, world_size: 4 * MAX_EPOCH_BLOCKS)


class Flags(ArenaField):
    """``size`` slots of ``Peers``: a flag on a line of its own for every slot and source."""

    def __init__(self) -> None:
        super().__init__(lambda size, world_size: size * world_size * LINE_BYTES)


class Buffer(ArenaField):
    """``size`` bytes."""

    def __init__(self, align: int = LINE_BYTES) -> None:
        super().__init__(lambda size, world_size: size, align)


class Packets(ArenaField):
    """``size`` packets of every rank, in two alternating buffers: a ``PacketSpace``."""

    def __init__(self) -> None:
        super().__init__(lambda size, world_size: 2 * world_size * size * PACKET_BYTES)
        object.__setattr__(self, "cpp", "PacketSpace")
        object.__setattr__(self, "twin", PacketSpace)

    def taken(self, offset: int, size: int) -> Any:
        return PacketSpace(offset, size)


def structure_name(kernel: str) -> str:
    """The name of the structure of a kernel's arguments."""
    return "".join(word.capitalize() for word in kernel.split("_"))


def roles_source(
    kernel: str, header: str, roles: str, *macros: str, local: bool = False, clusters: bool = True, communicator_blocks: bool = False
) -> str:
    """The source of a kernel of ``tiles/roles.cuh``: it runs the template ``roles`` of ``header`` with the macros ``SHAPE`` and ``macros``.

    ``local``: of a ``LocalKernel``. ``clusters``: its blocks come in clusters of as many as the shape says. ``communicator_blocks``: its
    arguments say how many blocks only communicate."""
    launch = f"{'__cluster_dims__(Shape::cluster_blocks) ' if clusters else ''}__launch_bounds__(Shape::roles.threads(), 1)"
    parameters = f"{'' if local else 'const __grid_constant__ Arena arena, '}const __grid_constant__ {structure_name(kernel)} args"
    made = f"Roles(args{'' if local else ', arena'})"
    return f"""
#include <peerlane/{header}>
using namespace peerlane;
using Shape = SHAPE;
using Roles = {roles}<{", ".join(("Shape", *macros, structure_name(kernel)))}>;

extern "C" __global__ void {launch} {kernel}({parameters}) {{
    run_roles({made}{", args.communicator_blocks" if communicator_blocks else ""});
}}
"""


class DeclaredKernel:
    """A kernel and its arguments; see the module."""

    def __init__(self, name: str, source: str | Path, **fields: Field) -> None:
        self.name, self.fields = name, fields
        self.settable = {name: field for name, field in fields.items() if not isinstance(field, ArenaField)}
        """the fields that callers set"""
        self.maps = {name: TensorMap for name, field in fields.items() if isinstance(field, Map) and not field.count}
        """those of one tensor map"""
        self.struct = structure_name(name)
        self.arguments: type[ctypes.Structure] = type(self.struct, (ctypes.Structure,), {"_fields_": _padded(fields)})
        self._given = source
        self._file, self._line = (source.name, 1) if isinstance(source, Path) else written_in(sys._getframe(1).f_code.co_filename, source)

    @property
    def text(self) -> str:
        """The source as its author wrote it."""
        return self._given if isinstance(self._given, str) else self._given.read_text()

    @property
    def source(self) -> str:
        """The source with the structure behind its last include; messages name the file and line where the author wrote it."""
        lines = self.text.splitlines()
        last = max((i for i, line in enumerate(lines) if re.match(r"\s*#\s*include\b", line)), default=-1) + 1
        before, behind = (f'#line {self._line + line} "{self._file}"' for line in (0, last))
        return "\n".join([before, *lines[:last], self._structure(), behind, *lines[last:], ""])

    def _structure(self) -> str:
        body = "\n".join(f"    {field.declaration(name)}" for name, field in self.fields.items())
        checks, end = "", 0
        for name in self.fields:
            place, member = getattr(self.arguments, name), f"decltype({self.struct}::{name})"
            # What offsetof would say, which NVRTC does not know: the end before it, rounded up to the alignment.
            begin = f"({end} + alignof({member}) - 1) / alignof({member}) * alignof({member})"
            checks += f'static_assert({begin} == {place.offset} && sizeof({member}) == {place.size}, "{self.struct}.{name}");\n'
            end = place.offset + place.size
        size = f'static_assert(sizeof({self.struct}) == {ctypes.sizeof(self.arguments)}, "{self.struct}");'
        return f"namespace peerlane {{\nstruct {self.struct} {{\n{body}\n}};\n{checks}{size}\n}}"

    def reserve(self, group: Group, *, sizes: Mapping[str, int] | None = None, timeout_s: float | None = None) -> Reserved:
        """Collective: what the kernel keeps in the arena, on every rank of ``group``; launches are bound to it.

        ``sizes`` say how much each arena field holds, the same on all ranks."""
        sizes = sizes or {}
        in_arena = {name: field for name, field in self.fields.items() if isinstance(field, ArenaField)}
        wanted = {name for name, field in in_arena.items() if not isinstance(field, Epochs)}
        if sizes.keys() != wanted:
            raise UsageError(f"kernel {self.name!r}: sizes of {sorted(sizes)}; expected {sorted(wanted)}, one for each field in the arena")
        places = {name: (field.nbytes(sizes.get(name, 0), group.world_size), field.align) for name, field in in_arena.items()}
        arena = Arena(sum(nbytes + align for nbytes, align in places.values()), group, timeout_s=timeout_s, name=self.name)
        offsets = {name: arena.take(nbytes, align=align, name=name) for name, (nbytes, align) in places.items()}
        arena.seal()
        taken = {name: in_arena[name].taken(offset, sizes.get(name, 0)) for name, offset in offsets.items()}
        return Reserved(self, group, arena, offsets, taken)

    def inside(self, group: Group, arena: Arena) -> Reserved:
        """Returns what launches are bound to, in the arena of other kernels; this one has no fields of its own there. Not collective."""
        if kept := [name for name, field in self.fields.items() if isinstance(field, ArenaField)]:
            raise UsageError(f"kernel {self.name!r} has fields of its own in an arena, {kept}: expected none; call reserve")
        return Reserved(self, group, arena, {}, {})

    def bind(
        self, group: Group, *, sizes: Mapping[str, int] | None = None, timeout_s: float | None = None, **shape_and_values: Any
    ) -> BoundKernel:
        """Collective: ``reserve``, and one launch bound to it: :meth:`Reserved.bind` has the other arguments."""
        return self.reserve(group, sizes=sizes, timeout_s=timeout_s).bind(**shape_and_values)


class LocalKernel(DeclaredKernel):
    """A declared kernel that no other rank takes part in: its one parameter is its structure, and it has nothing in an arena."""

    def reserve(self, group: Group, *, sizes: Mapping[str, int] | None = None, timeout_s: float | None = None) -> Reserved:
        """Not collective; there is nothing to reserve, so a group has one, which keeps what it has loaded."""
        return _reserved_nothing(group, self)


@per_group
def _reserved_nothing(group: Group, kernel: LocalKernel) -> Reserved:
    if any(isinstance(field, ArenaField) for field in kernel.fields.values()):
        raise UsageError(f"kernel {kernel.name!r} has fields in the arena; declare it as a DeclaredKernel")
    return Reserved(kernel, group, None, {}, {})


class Reserved:
    """A kernel's part of the arena, and what launches are bound to."""

    def __init__(
        self, kernel: DeclaredKernel, group: Group, arena: Arena | None, offsets: Mapping[str, int], taken: Mapping[str, Any]
    ) -> None:
        self.kernel, self.group, self.offsets = kernel, group, offsets
        self._arena, self._taken = arena, taken
        self._loaded: dict[tuple[tuple[str, str | int], ...], DeviceKernel] = {}
        self.launches: BoundLaunches[Hashable] = BoundLaunches()
        """for callers whose tensors come again"""

    @property
    def arena(self) -> Arena:
        """Raises UsageError for a kernel that has none."""
        if self._arena is None:
            raise UsageError(f"kernel {self.kernel.name!r} runs on one rank alone and has no arena; declare it as a DeclaredKernel")
        return self._arena

    def bind(
        self,
        *,
        grid: int,
        block: int,
        defines: Mapping[str, str | int] | None = None,
        shared_bytes: int = 0,
        cluster: int = 1,
        resident: bool = False,
        **values: Any,
    ) -> BoundKernel:
        """A launch. It is not collective; kernels with other macros and grids may share one reserve. ``WORLD_SIZE`` is always defined, but
        for a ``LocalKernel``.

        ``resident``: raise LaunchError where the blocks, which wait for other ranks', do not all fit on the GPU at a time. ``values`` are
        fields that do not change from call to call."""
        kernel, arena = self.kernel, self._arena
        arguments = kernel.arguments(**self._taken)
        if grid > MAX_EPOCH_BLOCKS and any(isinstance(field, Epochs) for field in kernel.fields.values()):
            raise LaunchError(f"kernel {kernel.name!r} got {grid} blocks: expected at most {MAX_EPOCH_BLOCKS}, which have an epoch each")
        loaded = self._load(_macros(kernel, self.group, defines or {}))
        if resident:
            attributes = loaded.attributes()
            needs = BlockNeeds(block, attributes["registers"], attributes["shared_bytes"] + shared_bytes)
            require_resident(kernel.name, grid, needs, self.group.sm_count)

        def launch(arguments: ctypes.Structure) -> DeviceLaunch:
            parameters = (arena.view, arguments) if arena else (arguments,)
            return loaded.bind(grid, block, parameters, shared_bytes=shared_bytes, cluster=cluster)

        bound = BoundKernel(self, launch, arguments)
        bound.set(**values)
        return bound

    def _load(self, macros: dict[str, str | int]) -> DeviceKernel:
        """The kernel with these macros, so that only the first launch with them looks for its cubin."""
        key = tuple(macros.items())
        if key not in self._loaded:
            kernel, on_failure = self.kernel, self._arena.raise_fault if self._arena else None
            self._loaded[key] = self.group.kernel(kernel.source, kernel.name, defines=macros, on_failure=on_failure)
        return self._loaded[key]

    def addresses(self, name: str) -> list[int]:
        """Where the arena field ``name`` lies on every rank, as kernels of this rank address it."""
        return [self.arena.view.base[rank] + self.offsets[name] for rank in range(self.group.world_size)]

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own memory of the arena field ``name``."""
        return self.arena.tensor(self.offsets[name], shape, dtype)

    def close(self) -> None:
        """Give the memory back, once no rank's launches use it."""
        self.launches.clear()
        if self._arena is not None:
            self._arena.close()


def compile_ahead(group: Group, kernels: Sequence[tuple[DeclaredKernel, Mapping[str, str | int]]]) -> None:
    """Ranks share the work of compiling kernels with these defines, which they bind later."""
    group.compile_ahead([(kernel.source, _macros(kernel, group, defines)) for kernel, defines in kernels])


def _macros(kernel: DeclaredKernel, group: Group, defines: Mapping[str, str | int]) -> dict[str, str | int]:
    if short := [name for name in defines if len(name) == 1]:
        raise UsageError(f"macro {short[0]!r} would replace names in the kit's headers; expected a longer one, such as X_TYPE")
    if any(isinstance(field, Epochs) for field in kernel.fields.values()):
        defines = {"MAX_EPOCH_BLOCKS": MAX_EPOCH_BLOCKS, **defines}
    return {**defines} if isinstance(kernel, LocalKernel) else {"WORLD_SIZE": group.world_size, **defines}


def written_in(path: str, source: str) -> tuple[str, int]:
    """Returns the name of the Python file that holds this text, and the text's first line there."""
    linecache.checkcache(path)
    before, found, _ = "".join(linecache.getlines(path)).partition(source)
    return (Path(path).name, before.count("\n") + 1) if found else ("source.cu", 1)


def _padded(fields: Mapping[str, Field]) -> list[tuple[str, Any]]:
    """The twin's fields, with what the alignment of tensor maps leaves free before and behind them."""
    twins: list[tuple[str, Any]] = []
    end = 0

    def pad() -> None:
        nonlocal end
        if gap := -end % MAP_ALIGNMENT:
            twins.append((f"free_{end}", ctypes.c_uint8 * gap))
        end += gap

    for name, field in fields.items():
        twin = field.ctype()
        if isinstance(field, Map):
            pad()
        twins.append((name, twin))
        end = -(-end // ctypes.alignment(twin)) * ctypes.alignment(twin) + ctypes.sizeof(twin)
    if any(isinstance(field, Map) for field in fields.values()):
        pad()
    return twins


class BoundKernel:
    """A launch of a declared kernel. Calling it sets fields and launches."""

    def __init__(self, reserved: Reserved, bind: Callable[[ctypes.Structure], DeviceLaunch], arguments: ctypes.Structure) -> None:
        self.reserved, self.group = reserved, reserved.group
        self._bind, self._launch, self._arguments = bind, bind(arguments), arguments
        self._fields, self._maps = reserved.kernel.settable, reserved.kernel.maps

    @property
    def arena(self) -> Arena:
        """The arena of its fields there; raises UsageError for a kernel that has none."""
        return self.reserved.arena

    def set(self, **values: Any) -> None:
        """Set fields, for this launch and those that follow."""
        self._set(values)

    def _set(self, values: Mapping[str, Any]) -> None:
        fields, maps, group, arguments = self._fields, self._maps, self.group, self._arguments
        for name, value in values.items():
            if type(value) is not maps.get(name):  # most calls give tensor maps, which need no conversion
                field = fields.get(name)
                if field is None:
                    known = ", ".join(fields)
                    raise UsageError(f"kernel {self.reserved.kernel.name!r} has no field {name!r} to set; expected one of {known}")
                value = field.value(group, value)
            setattr(arguments, name, value)

    def again(self, **values: Any) -> BoundKernel:
        """Another launch, with these fields set and the others as they are here now. It is not collective."""
        bound = BoundKernel(self.reserved, self._bind, type(self._arguments).from_buffer_copy(self._arguments))
        bound._set(values)
        return bound

    def __call__(self, **values: Any) -> None:
        try:
            with self.group.lock:
                if values:
                    self._set(values)
                self._launch()
        except EmulatedFault as fault:
            null = [name for name, field in self._fields.items() if isinstance(field, Pointer) and not getattr(self._arguments, name)]
            if null and "\ncrash in" in str(fault):
                raise EmulatedFault(f"{fault}; these pointers are null: {', '.join(sorted(null))}") from None
            raise

    def addresses(self, name: str) -> list[int]:
        """Where the arena field ``name`` lies on every rank, as kernels of this rank address it."""
        return self.reserved.addresses(name)

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """This rank's own memory of the arena field ``name``."""
        return self.reserved.tensor(name, shape, dtype)


def layouts(group: Group, *tensors: torch.Tensor) -> tuple[Hashable, ...]:
    """Where and how tensors lie: all that a launch bound to them knows of them. A part of a key of ``BoundLaunches``."""
    return tuple([(group.address(tensor), tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


class BoundLaunches(Generic[Key]):
    """Launches by the tensors' ``layouts`` that they were bound to, so that tensors which come again and again are described once.

    At most ``most``: then all are forgotten, for addresses that do not come again would fill any memory."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._kept: dict[Key, BoundKernel] = {}

    def find(self, key: Key) -> BoundKernel | None:
        """The launch of this key, if there is one."""
        return self._kept.get(key)

    def get(self, key: Key, bind: Callable[[], BoundKernel]) -> BoundKernel:
        """The launch of this key, made by ``bind`` if there is none."""
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == self._most:
                self._kept.clear()
            found = self._kept[key] = bind()
        return found

    def clear(self) -> None:
        self._kept.clear()
