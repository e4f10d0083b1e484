"""Kernels of a cubin, and launches whose arguments are bound beforehand.

A bound launch costs a few microseconds of host time: it reads the current stream and makes one driver call. It goes to PyTorch's current
stream, so it can be captured in a CUDA graph like any operator.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from peerlane.device.host import cuda_bindings
from peerlane.device.host.jit import Cubin
from peerlane.device.host.lane import Lane
from peerlane.device.host.waits import Waits
from peerlane.errors import LaunchError, UsageError

Argument = Any
"""A ctypes value (``c_uint32(3)``, a Structure: passed by value) or a tensor (passed as its address)."""

# One loaded module per cubin and device: its kernels share their global variables, and loading twice would cost time.
_modules: dict[tuple[str, int], Any] = {}
_sources: Counter[str] = Counter()
"""How often kernels of each source were loaded, by the hash of its tokens."""


class Kernel:
    """The ``extern "C"`` kernel ``name`` of ``cubin``, loaded into the current device's context.

    ``on_failure`` is called when a launch fails, before LaunchError is raised; it may raise something that says more
    (``Arena.raise_fault``, say).
    """

    def __init__(self, cubin: Cubin, name: str, on_failure: Callable[[], None] | None = None) -> None:
        self.name = name
        self.source_hash = cubin.source_hash
        _sources[cubin.source_hash] += 1
        self.device = torch.cuda.current_device()
        self.on_failure = on_failure
        self._granted_shared_bytes = 0
        driver = cuda_bindings.driver()
        status, self._function = driver.cuModuleGetFunction(module_of(cubin, self.device), name.encode())
        if status:
            raise LaunchError(f'no kernel {name!r} in {cubin.path}: {cuda_bindings.describe(status)}; declare it extern "C" __global__')
        # Now: at its first launch the driver would wait for the kernels that run, and these may wait for other ranks.
        (status,) = driver.cuFuncLoad(self._function)
        if status:
            raise LaunchError(f"kernel {name!r} of {cubin.path} can not be loaded: {cuda_bindings.describe(status)}")

    def bind(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> "Launch":
        """A launch with these arguments. Change ``launch.args[i].value`` between calls; what was launched keeps the old value.

        ``cluster`` is what the source's ``__cluster_dims__`` says; only the emulator needs it. ``cooperative`` makes the driver refuse a
        grid whose blocks can not all be resident.
        """
        if shared_bytes > self._granted_shared_bytes:
            self._grant_shared(shared_bytes)
        return Launch(
            self, (three(grid), three(block), shared_bytes), tuple(argument(i, value) for i, value in enumerate(args)), cooperative
        )

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        stream: torch.cuda.Stream | None = None,
        cooperative: bool = False,
    ) -> None:
        """Bind and launch at once, on ``stream`` or PyTorch's current one. Does not wait for the kernel."""
        bound = self.bind(grid, block, args, shared_bytes=shared_bytes, cooperative=cooperative)
        bound() if stream is None else bound(stream.cuda_stream)

    def attributes(self) -> dict[str, int]:
        """``registers`` and ``local_bytes`` (spills and stack) of a thread, static ``shared_bytes`` of a block."""
        driver = cuda_bindings.driver()
        names = {
            "registers": driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
            "local_bytes": driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            "shared_bytes": driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        }
        return {name: driver.cuFuncGetAttribute(attribute, self._function)[1] for name, attribute in names.items()}

    def _grant_shared(self, shared_bytes: int) -> None:
        """Always asked for: what a block gets without asking, 48 KiB, has to hold its static shared memory too."""
        driver = cuda_bindings.driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _, before = driver.cuFuncGetAttribute(attribute, self._function)  # another Kernel of this function may need more
        (status,) = driver.cuFuncSetAttribute(self._function, attribute, max(before, shared_bytes))
        if status:
            raise LaunchError(
                f"kernel {self.name!r} asks for {shared_bytes} bytes of dynamic shared memory beside {self.attributes()['shared_bytes']} "
                f"static ones: {cuda_bindings.describe(status)}; ask for less (a block of an H100 or H200 has 232448 bytes for both)"
            )
        self._granted_shared_bytes = shared_bytes


class Launch:
    """A kernel with grid, block and arguments. Calling it launches."""

    def __init__(
        self, kernel: Kernel, shape: tuple[tuple[int, int, int], tuple[int, int, int], int], args: tuple[Any, ...], cooperative: bool
    ) -> None:
        driver = cuda_bindings.driver()
        grid, block, shared_bytes = shape
        self.kernel = kernel
        self.args = args
        self._pointers = (ctypes.c_void_p * max(len(args), 1))(*(ctypes.addressof(value) for value in args))
        self._fixed = (kernel._function, *grid, *block, shared_bytes)
        # The cooperative call has no `extra` parameter.
        self._last = (ctypes.addressof(self._pointers),) if cooperative else (ctypes.addressof(self._pointers), 0)
        self._call = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        self._device = kernel.device
        self._arena = next((value for value in args if hasattr(value, "before_launch")), None)
        group = getattr(self._arena, "group", None)
        self._waits: Waits | None = None if group is None else group.waits
        self._lane: Lane | None = None if group is None else group.lane
        self._check_call: Callable[[str], None] | None = None if group is None else group.check_call
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def __call__(self, stream: int | None = None) -> None:
        """Launch on the raw ``stream``, or PyTorch's current one."""
        if self._arena is not None and self._arena.before_launch is not None:
            self._arena.before_launch()
        if self._waits is not None and self._waits.stopped:
            self._waits.check()
        if stream is None:
            stream = self._current_stream(self._device)
        if self._lane is None:
            (status,) = self._call(*self._fixed, stream, *self._last)
        elif self._check_call is None:
            (status,) = self._lane.run(stream, lambda: self._call(*self._fixed, stream, *self._last))
        else:
            with self._lane.lock:  # so that the order of what is compared is that of the launches
                self._check_call(self.kernel.name)
                (status,) = self._lane.run(stream, lambda: self._call(*self._fixed, stream, *self._last))
        if status:
            self._fail(status)

    def _fail(self, status: Any) -> NoReturn:
        if self.kernel.on_failure is not None:
            self.kernel.on_failure()
        _, *sizes = self._fixed
        raise LaunchError(
            f"kernel {self.kernel.name!r} was not launched (grid {sizes[:3]}, block {sizes[3:6]}, {sizes[6]} bytes of shared memory): "
            f"{cuda_bindings.describe(status)}; an error of an earlier kernel shows up here too: "
            "run with CUDA_LAUNCH_BLOCKING=1 to see which"
        )


def excuse(kernel: Any) -> None:
    """Take a kernel out of ``loaded_sources``: it serves torch.distributed, whose calls are counted apart."""
    _sources[getattr(kernel, "source_hash", "")] -= 1


def loaded_sources() -> list[str]:
    """Returns the hashes of the sources whose kernels this process has loaded, but for those that were excused."""
    return sorted(tokens for tokens, count in _sources.items() if tokens and count > 0)


def loaded_cubins() -> list[Path]:
    """The files of all cubins that this process has loaded."""
    return sorted({Path(path) for path, _ in _modules})


def module_of(cubin: Cubin, device: int) -> Any:
    """Returns the module of a cubin, loaded into the device's context on first use."""
    key = (str(cubin.path), device)
    if key not in _modules:
        torch.empty(1, device=f"cuda:{device}")  # makes PyTorch's context the current one of this thread
        driver = cuda_bindings.driver()
        status, module = driver.cuModuleLoadData(cubin.path.read_bytes())
        if status:
            major, minor = torch.cuda.get_device_capability(device)
            raise LaunchError(
                f"{cubin.path}, compiled for {cubin.arch}, can not be loaded on a device of compute capability {major}.{minor}: "
                f"{cuda_bindings.describe(status)}; compile for the device's own architecture"
            )
        _modules[key] = module
    return _modules[key]


def three(size: int | Sequence[int]) -> tuple[int, int, int]:
    """A grid or block of one to three dimensions as one of three."""
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    return x, y, z


def argument(index: int, value: Argument) -> Any:
    """A kernel argument as a ctypes value; raises UsageError where it can not be one."""
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return value
    raise UsageError(
        f"kernel argument {index} is a {type(value).__name__}; expected a tensor or a ctypes value, which says its width: "
        "ctypes.c_uint32(...), ctypes.c_uint64(...), ctypes.c_float(...)"
    )
