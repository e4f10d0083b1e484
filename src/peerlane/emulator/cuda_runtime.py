"""The CUDA runtime that C++ code of emulated ranks finds: ``cuda_host/runtime.cpp`` in a library, and what it asks Python for.

There is one for a process, once an extension has been loaded. From then on tensors that a rank makes lie where kernels see them, so that
``data_ptr()`` is one address for C++, for Python and for the emulator.
"""

import contextlib
import ctypes
import functools
import hashlib
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peerlane.device.host.resources import Resources
from peerlane.device.host.roles import SHARED_LIMIT_BYTES, BlockNeeds
from peerlane.emulator.build import COMPILER, made, version
from peerlane.emulator.cuda_blas import Product, multiply
from peerlane.emulator.cuda_graphs import CUDAGraph, capturing, recorded
from peerlane.emulator.emulated_rank import EmulatedRank, PtxLaunch, emulated_rank
from peerlane.emulator.gpu_code import needs_of
from peerlane.emulator.job import BASE, VARIABLES
from peerlane.emulator.ptx_front_end import NOT_KNOWN, Ptx, UnknownPtx, cluster_of, kernel_of
from peerlane.emulator.ptx_operands import TYPES
from peerlane.emulator.ptx_text import Function, parse
from peerlane.emulator.stream_kernels import MOVING_THREADS, SIGNALS, WAIT, WRITE, moves
from peerlane.errors import CompileError, LaunchError

_HERE = Path(__file__).with_name("cuda_host")
SOURCES, HEADERS = [_HERE / "runtime.cpp", _HERE / "blas.cpp"], _HERE / "include"
_BEGIN, _BYTES = BASE + (1 << 28), 1 << 36
_HOST_CODE = "of C++ host code"
_TORCH = Path(torch.__file__).parent

_Words = ctypes.POINTER(ctypes.c_uint32)
_Arguments = ctypes.POINTER(ctypes.c_void_p)
_PLACE = (ctypes.c_uint64, ctypes.c_uint64)
_CALLBACKS: dict[str, tuple[Any, int]] = {
    "launch": (
        ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_int, _Words, _Words, _Arguments, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
        ),
        1,
    ),
    "copy": (ctypes.CFUNCTYPE(ctypes.c_int, *_PLACE, *_PLACE, ctypes.c_uint64, ctypes.c_uint64), 1),
    "set": (ctypes.CFUNCTYPE(ctypes.c_int, *_PLACE, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64), 1),
    "variable": (ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p), 0),
    "exported": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64), 1),
    "occupancy": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64), -1),
    "attributes": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)), 1),
    "multiply": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Product)), 1),
    "word": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int), 1),
    "graph": (ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int), -1),
    "sm_count": (ctypes.CFUNCTYPE(ctypes.c_int), 1),
    "world_size": (ctypes.CFUNCTYPE(ctypes.c_int), 1),
}
"""What C++ asks Python for, in the order of ``runtime.cpp``, and what it gets if that fails. ``Runtime`` has a method for each."""


class _Python(ctypes.Structure):
    _fields_ = (*((name, kind) for name, (kind, _) in _CALLBACKS.items()), ("shared_bytes", ctypes.c_int))


@dataclass(frozen=True)
class Block:
    """Memory that a rank's C++ code has taken."""

    begin: int
    nbytes: int
    rank: int
    exported: bool
    """whether other ranks may use it"""


@dataclass(frozen=True)
class Module:
    """The device code of an extension."""

    ptx: Ptx

    @functools.cached_property
    def entries(self) -> dict[str, Function]:
        return {entry.name: entry for entry in parse(self.ptx.text).entries}


class Runtime:
    """The library, loaded."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.peerlane_take.restype = ctypes.c_uint64
        self.modules: list[Module] = []
        self._pending = threading.local()
        self._graphs: list[CUDAGraph] = []
        calls = (kind(self._guarded(getattr(self, f"_{name}"), failed)) for name, (kind, failed) in _CALLBACKS.items())
        self._callbacks = _Python(*calls, SHARED_LIMIT_BYTES)
        self._library.peerlane_open(ctypes.c_uint64(_BEGIN), ctypes.c_uint64(_BYTES), ctypes.byref(self._callbacks))

    def holds(self, address: int) -> bool:
        """Tells whether an address is one of emulated memory."""
        return _BEGIN <= address < _BEGIN + _BYTES

    def take(self, nbytes: int) -> int:
        """Returns the address of new memory."""
        return int(self._library.peerlane_take(ctypes.c_uint64(nbytes)))

    def adopt(self, tensor: torch.Tensor) -> None:
        """Moves a tensor's storage to where kernels see it."""
        if not self.holds(tensor.untyped_storage().data_ptr()):
            self._library.peerlane_adopt(ctypes.c_void_p(tensor.untyped_storage()._cdata))

    def keep(self, address: int) -> Block | None:
        """Returns the memory in which an address lies, and keeps it for ever; None where there is none."""
        begin, nbytes, rank, exported = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_int()
        values = (ctypes.byref(begin), ctypes.byref(nbytes), ctypes.byref(rank), ctypes.byref(exported))
        if not self._library.peerlane_keep(ctypes.c_uint64(address), *values):
            return None
        return Block(begin.value, nbytes.value, rank.value, bool(exported.value))

    @contextlib.contextmanager
    def entered(self, rank: int) -> Iterator[None]:
        """While this lasts, this thread is that of a rank."""
        before = self._library.peerlane_enter(rank)
        try:
            yield
        finally:
            self._library.peerlane_enter(before)

    @contextlib.contextmanager
    def loading(self, module: Module) -> Iterator[None]:
        """While this lasts, a library that is loaded registers the kernels of this module."""
        self.modules.append(module)
        self._library.peerlane_load(len(self.modules) - 1)
        try:
            yield
        finally:
            self._library.peerlane_load(-1)

    def raise_pending(self) -> None:
        """Raises what a launch from C++ has raised in this thread."""
        error, self._pending.error = getattr(self._pending, "error", None), None
        if error is not None:
            raise error

    def _guarded(self, act: Callable[..., int], failed: int) -> Callable[..., int]:
        """Returns ``act`` for C++: what it raises is kept until the C++ code has returned."""

        @functools.wraps(act)
        def guarded(*args: Any) -> int:
            if getattr(self._pending, "error", None) is not None:
                return failed
            try:
                return act(*args)
            except BaseException as error:
                self._pending.error = error
                return failed

        return guarded

    def _launch(self, kernel: bytes, number: int, grid: Any, block: Any, arguments: Any, shared: int, cluster: int, dependent: int) -> int:
        module, name = self.modules[number], kernel.decode()
        if name not in module.entries:
            raise LaunchError(f"kernel {name} is not among those that were compiled: {', '.join(module.entries)}")
        sizes = [(length or 1) * TYPES[kind][1] for kind, _, _, length in module.entries[name].parameters]
        values = [(ctypes.c_char * size).from_buffer_copy(ctypes.string_at(arguments[i], size)) for i, size in enumerate(sizes)]
        cluster = cluster_of(module.entries[name], cluster)
        launch = PtxLaunch(module.ptx, name, tuple(grid[:3]), tuple(block[:3]), values, shared, cluster, bool(dependent))
        group = emulated_rank(name)
        for word in (word for value in values for word in memoryview(bytes(value)[: len(value) // 8 * 8]).cast("Q")):
            if self.holds(word) and (part := group.team.world.space.at(word)) is not None and part.name == VARIABLES:
                raise UnknownPtx(f"kernel {kernel_of(name)}: the address of a __device__ variable as an argument {NOT_KNOWN}")
        group.launch_ptx(launch)
        return 0

    def _copy(self, to: int, to_pitch: int, source: int, from_pitch: int, width: int, height: int) -> int:
        self.move("cudaMemcpyAsync", [(to, to_pitch), (source, from_pitch)], width, height)
        return 0

    def _set(self, to: int, pitch: int, value: int, width: int, height: int) -> int:
        self.move("cudaMemsetAsync", [(to, pitch)], width, height, value)
        return 0

    def move(self, what: str, places: Sequence[tuple[int, int]], width: int, height: int = 1, value: int = 0) -> None:
        """Copies rows of bytes to the first of the places, which have an address and a pitch, or sets them, if it is the only one.

        Does so by a kernel of every rank where others may use the memory, or else at once.
        """
        if all(pitch == width for _, pitch in places):
            width, height = width * height, 1
        group = emulated_rank(what)
        parts = [self._part(group, what, at, (height - 1) * pitch + width) for at, pitch in places if self.holds(at)]
        (to, to_pitch), (source, from_pitch) = places[0], places[-1]

        def act() -> None:
            for row in range(height):
                if len(places) == 1:
                    ctypes.memset(to + row * to_pitch, value, width)
                else:
                    ctypes.memmove(to + row * to_pitch, source + row * from_pitch, width)

        if len(parts) < len(places) or not any(part.symmetric for part in parts):
            if not recorded(act):
                act()
            return
        numbers = (to, to_pitch, source, from_pitch, width, width * height, value * 0x0101010101010101)
        size = next(size for size in (8, 4, 1) if not any(number % size for number in numbers[:-1]))
        values = [ctypes.c_uint64(number) for number in numbers]
        group.launch_ptx(PtxLaunch(moves(what, copies=len(places) > 1), f"{what}_{size}", (1,), (MOVING_THREADS,), values))

    def _multiply(self, asked: Any) -> int:
        multiply(Product.from_buffer_copy(asked.contents), self.move)  # a graph asks again
        return 0

    def _word(self, address: int, value: int, condition: int) -> int:
        """Writes a word, or waits for one."""
        name = "cuStreamWriteValue32" if condition < 0 else "cuStreamWaitValue32"
        group = emulated_rank(name)
        self._part(group, name, address, 4)
        values = [ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint32(max(condition, 0))]
        group.launch_ptx(PtxLaunch(SIGNALS, WRITE if condition < 0 else WAIT, (1,), (1,), values))
        return 0

    def _graph(self, act: int, number: int) -> int:
        """Begins or ends a capture, replays a graph, or tells whether the thread captures one."""
        if act == 0:
            graph = self._pending.graph = CUDAGraph()
            graph.capture_begin()
        elif act == 1:
            if not capturing():
                raise LaunchError("cudaStreamEndCapture: the stream captures nothing; expected cudaStreamBeginCapture before")
            self._graphs.append(self._pending.graph)
            self._graphs[-1].capture_end()
            return len(self._graphs)
        elif act == 2:
            if not 0 < number <= len(self._graphs):
                raise LaunchError("cudaGraphLaunch: expected a graph that cudaGraphInstantiate has made")
            self._graphs[number - 1].replay()
        return int(capturing())

    def _part(self, group: EmulatedRank, what: str, address: int, nbytes: int) -> Any:
        part = group.team.world.space.at(address)
        if part is None or address + nbytes > part.address + part.nbytes:
            where = "freed or never allocated memory" if part is None else f"{part.name}, which ends earlier"
            raise LaunchError(f"{what} of {nbytes} bytes at {address:#x} of {where}")
        return part

    def _variable(self, number: int, name: bytes) -> int:
        group, module = emulated_rank(_HOST_CODE), self.modules[number]
        return int(group.team.variable(module.ptx, name.decode(), group.rank))

    def _exported(self, address: int) -> int:
        emulated_rank("cudaIpcGetMemHandle").team.world.space.at(address).symmetric = True
        return 0

    def _occupancy(self, number: int, kernel: bytes, threads: int, shared_bytes: int) -> int:
        known = self._resources(number, kernel)
        return BlockNeeds(threads, known.registers, known.static_bytes + shared_bytes).per_sm()

    def _attributes(self, number: int, kernel: bytes, values: Any) -> int:
        known = self._resources(number, kernel)
        values[0], values[1], values[2] = known.registers, known.static_bytes, known.frame_bytes
        return 0

    def _sm_count(self) -> int:
        return emulated_rank(_HOST_CODE).sm_count

    def _world_size(self) -> int:
        return int(emulated_rank(_HOST_CODE).team.world.size)

    def _resources(self, number: int, kernel: bytes) -> Resources:
        ptx = self.modules[number].ptx
        return needs_of(ptx).get(ptx.symbol(kernel.decode()), Resources())


_runtime: Runtime | None = None


def runtime() -> Runtime | None:
    """Returns the runtime of this process; None until an extension needs it."""
    return _runtime


def start(cuda_include: Path) -> Runtime:
    """Returns the runtime, compiled once a version, loaded once a process."""
    global _runtime
    if _runtime is None:
        _runtime = Runtime(_compiled(cuda_include))
        _make_tensors_for_cuda()
    return _runtime


_factories = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _make_tensors_for_cuda() -> None:
    """Has torch's factories return CPU tensors where C++ code asks for tensors of a GPU."""

    def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):  # type: ignore[no-untyped-def]
        return torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)

    def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):  # type: ignore[no-untyped-def]
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    _factories.impl("record_stream", lambda tensor, stream: None, "CPU")  # type: ignore[no-untyped-call]
    _factories.impl("empty.memory_format", empty, "CUDA")  # type: ignore[no-untyped-call]
    _factories.impl("empty_strided", empty_strided, "CUDA")  # type: ignore[no-untyped-call]


def _compiled(cuda_include: Path) -> Path:
    parts = (version(), torch.__version__, str(cuda_include), sysconfig.get_platform())
    content = b"\0".join(path.read_bytes() for path in sorted(_HERE.rglob("*")) if path.is_file())
    key = hashlib.sha256("\0".join(parts).encode() + content).hexdigest()

    def build(library: Path) -> None:
        includes = (HEADERS, _TORCH / "include", cuda_include, HEADERS.with_name("last"))
        command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in includes), *map(str, SOURCES)]
        command += [f"-L{_TORCH / 'lib'}", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}", "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"the CUDA runtime of emulated ranks does not compile:\n{done.stderr.rstrip()}")

    return made(f"cuda-runtime-{key}.so", build)


@contextlib.contextmanager
def thread_of(rank: int) -> Iterator[None]:
    """While this lasts, this thread is that of a rank, if there is a runtime. What C++ code left is raised at its end."""
    if _runtime is None:
        yield
        return
    with _runtime.entered(rank):
        yield
        _runtime.raise_pending()
