"""Device source to a program for the CPU, by g++, through a cache."""

import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from peerlane import settings
from peerlane.common.files import one_process, write_atomically
from peerlane.device.host.jit import INCLUDE_DIR
from peerlane.device.host.resources import elf_section
from peerlane.emulator.ptx_front_end import Ptx, translate
from peerlane.emulator.ptx_operands import name_of
from peerlane.errors import CompileError, MissingDependency, UsageError

COMPILER = "g++"
_HERE = Path(__file__).parent
RUNTIME = _HERE / "runtime" / "runtime.cpp"
STAND_INS = _HERE / "include"
_CUDA_NAMES = STAND_INS / "peerlane_emulator" / "cuda.h"

_LANGUAGE = ("-std=c++20", "-fPIC", "-Wno-attributes", "-Wno-unknown-pragmas")
# The sanitizer's pass puts a call before every access; its library is not linked, the runtime answers the calls. Nothing may be hidden from
# the return addresses, and shared variables must be found by __tls_get_addr. A misaligned address ends in a trap.
_DEVICE = (
    "-O1", "-g1", "-fsanitize=thread", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error",
    "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1", "-fno-optimize-sibling-calls", "-fno-gnu-unique",
    "-fno-exceptions", "-ftls-model=global-dynamic", "-ffp-contract=off",
)  # fmt: skip
_RUNTIME_FLAGS = ("-O3", "-g1", "-fno-exceptions", "-fno-semantic-interposition", "-fvisibility-inlines-hidden")
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs")
_GLOBALS = "peerlane_globals"
# Variables of device code come into one section, of which every rank has a copy: the linker names its ends for the runtime.
_OWN_SECTION = (
    *(f"--rename-section={name}={_GLOBALS},alloc,load,data,contents" for name in (".data", ".data.rel.local", ".data.rel")),
    "--set-section-flags=.bss=alloc,load,data,contents",
    f"--rename-section=.bss={_GLOBALS},alloc,load,data,contents",
)

# What cuda.h makes of __global__.
_KERNEL = re.compile(r'extern "C"\s+__attribute__\(\(__flatten__, noinline\)\)\s+void\s+(\w+)\s*\(')
# nvcc takes a standard attribute after __shared__, the language does not after thread_local.
_MISPLACED = re.compile(r"\bthread_local\s+(alignas\s*\((?:[^()]|\([^()]*\))*\))")
HOST_READ, HOST_WRITE = "peerlane_host_read", "peerlane_host_write"
"""Kernels of every program: one thread reads (address, bytes) or writes (address, bytes, content), as the host does between launches."""
_CALLER = """
# 1 "host code between two launches"
extern "C" __attribute__((noinline, weak)) void peerlane_host_read(const unsigned char* at, unsigned long long bytes) {
    peerlane::emulator::peerlane_is_host();
    for (; bytes >= 8; at += 8, bytes -= 8) {
        const unsigned long long word = *reinterpret_cast<const unsigned long long*>(at);
        asm volatile("" ::"r"(word));
    }
    for (; bytes; ++at, --bytes) {
        const unsigned char byte = *at;
        asm volatile("" ::"r"(byte));
    }
}
extern "C" __attribute__((noinline, weak)) void
peerlane_host_write(unsigned char* at, unsigned long long bytes, const unsigned char* content) {
    for (; bytes >= 8 && reinterpret_cast<unsigned long long>(at) % 8 == 0; at += 8, content += 8, bytes -= 8) {
        unsigned long long word;
        __builtin_memcpy(&word, content, 8);
        *reinterpret_cast<unsigned long long*>(at) = word;
    }
    for (; bytes; ++at, ++content, --bytes) *at = *content;
}
extern "C" __attribute__((weak)) void peerlane_launch_peerlane_host_write(void** arguments) {
    unsigned char* const at = *static_cast<unsigned char**>(arguments[0]);
    peerlane_host_write(at, *static_cast<unsigned long long*>(arguments[1]), static_cast<unsigned char*>(arguments[2]));
}
namespace peerlane::emulator {
template <unsigned... i> struct Indices {};
template <unsigned n, unsigned... i> struct Count : Count<n - 1, n - 1, i...> {};
template <unsigned... i> struct Count<0, i...> { using type = Indices<i...>; };
template <class... P, unsigned... i>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(P...), void** arguments, Indices<i...>) {
    kernel(*static_cast<P*>(arguments[i])...);
}
template <class... P>
void call(void (*kernel)(P...), void** arguments) { call(kernel, arguments, typename Count<sizeof...(P)>::type{}); }
}
"""


@dataclass(frozen=True)
class Program:
    """Device code for the CPU, in the cache."""

    path: Path
    kernels: tuple[str, ...]
    globals: bytes = b""
    """the device variables as they are at first, one rank's"""


def compile_program(
    source: str | Path | Ptx, *, defines: Mapping[str, str | int] | None = None, include_dirs: Sequence[Path] = ()
) -> Program:
    """Compiles ``source`` (text, the Path of a file, or PTX) for the emulator.

    Takes what ``compile_cubin`` takes; kernels are declared ``extern "C" __global__``. Raises CompileError with the compiler's log and
    MissingDependency where there is no g++.
    """
    source = translate(source) if isinstance(source, Ptx) else source
    own_dir = [source.resolve().parent] if isinstance(source, Path) else []
    unit, kernels = _kernels(_preprocess(source, [*own_dir, *include_dirs], defines or {}))
    if not kernels:
        raise UsageError('the source has no kernel that can be found by name; declare it extern "C" __global__ void name(...)')
    emulator = runtime()
    key = hashlib.sha256("\0".join((version(), emulator.name, *_LANGUAGE, *_DEVICE, *_OWN_SECTION, unit)).encode()).hexdigest()

    def build(program: Path) -> None:
        code = program.with_suffix(".o")
        _compile(unit, code)
        _link([code], emulator, program)

    path = made(f"{key}.so", build)
    return Program(path, kernels, elf_section(path, _GLOBALS))


def compile_modules(modules: Sequence[Ptx]) -> Program:
    """Compiles PTX modules, each for itself, into one program, in which ``Ptx.symbol`` names their kernels. Raises what ``compile_program``
    raises."""
    emulator, codes = runtime(), []
    kernels: list[str] = []
    for module in modules:
        unit, names = _kernels(_preprocess(translate(module, apart=True), [], {}))
        key = hashlib.sha256("\0".join((version(), *_LANGUAGE, *_DEVICE, *_OWN_SECTION, unit)).encode()).hexdigest()
        codes.append(made(f"{key}.o", functools.partial(_compile, unit)))
        kernels += names
    key = hashlib.sha256("\0".join([emulator.name, *(code.name for code in codes)]).encode()).hexdigest()
    path = made(f"{key}.so", functools.partial(_link, codes, emulator))
    return Program(path, tuple(kernels), elf_section(path, _GLOBALS))


def variable_offset(program: Program, module: Ptx, name: str) -> int | None:
    """Returns where a device variable of a PTX module lies among the program's variables; None where no kernel uses it."""
    own = name_of(name)
    ends = (f"module_{module.digest[:16]}L{len(own)}{own}E", f"module_{module.digest[:16]}{len(own)}{own}E")
    told = subprocess.run(["nm", str(program.path)], capture_output=True, text=True, check=True).stdout
    found = {symbol: int(address, 16) for address, _, symbol in re.findall(r"^(\w+) (\w) (\S+)$", told, re.MULTILINE)}
    places = [address for symbol, address in found.items() if symbol.endswith(ends)]
    return places[0] - found[f"__start_{_GLOBALS}"] if places else None


def made(name: str, make: Callable[[Path], None]) -> Path:
    """Returns the file of this name in the cache; ``make`` writes it where it is missing."""
    path = _cached(name)
    if not path.exists():
        with one_process(path.with_suffix(".lock")):
            if not path.exists():
                with tempfile.TemporaryDirectory() as scratch:
                    made = Path(scratch) / f"made{path.suffix}"
                    make(made)
                    write_atomically(path, made.read_bytes())
    return path


def _compile(unit: str, code: Path) -> None:
    text = code.with_suffix(".ii")
    text.write_text(unit, encoding="utf-8")
    _run([*_LANGUAGE, *_DEVICE, "-c", str(text), "-o", str(code)])
    _set_variables_apart(code)


def _link(codes: Sequence[Path], emulator: Path, program: Path) -> None:
    _run([*_LINK, *map(str, codes), str(emulator), "-o", str(program)])


def _set_variables_apart(code: Path) -> None:
    try:
        subprocess.run(["objcopy", *_OWN_SECTION, str(code)], capture_output=True, text=True, check=True)
    except OSError as error:
        raise MissingDependency("the emulator needs objcopy of binutils, which comes with g++: apt-get install binutils") from error
    except subprocess.CalledProcessError as error:
        raise CompileError(f"objcopy cannot set the device variables apart:\n{error.stderr.rstrip()}") from error


def runtime() -> Path:
    """Compiles the emulator itself, once a version; returns its folder. Raises MissingDependency where there is no g++."""
    files = sorted([*RUNTIME.parent.iterdir(), *(STAND_INS / "peerlane_emulator").iterdir()])
    content = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in files if path.suffix in (".h", ".cpp"))
    key = hashlib.sha256("\0".join((version(), *_LANGUAGE, *_RUNTIME_FLAGS)).encode() + content).hexdigest()

    def build(code: Path) -> None:
        _run([*_LANGUAGE, *_RUNTIME_FLAGS, "-c", str(RUNTIME), "-o", str(code)])

    return made(f"runtime-{key}.o", build)


def _preprocess(source: str | Path, include_dirs: Sequence[Path], defines: Mapping[str, str | int]) -> str:
    options = [
        *_LANGUAGE,
        *(f"-D{macro}={value}" for macro, value in sorted(defines.items())),
        *(f"-I{folder}" for folder in (*include_dirs, STAND_INS, INCLUDE_DIR)),
        "-include",
        str(_CUDA_NAMES),
    ]
    if isinstance(source, Path):
        return _run([*options, "-x", "c++", "-E", str(source)])
    # The text's own name in messages and findings.
    return _run([*options, "-x", "c++", "-E", "-"], f'#line 1 "source.cu"\n{source}')


def _kernels(unit: str) -> tuple[str, tuple[str, ...]]:
    """Returns the preprocessed text with a caller for each kernel, and the kernels' names."""
    names = tuple(dict.fromkeys(_KERNEL.findall(unit)))
    callers = "".join(
        f'extern "C" __attribute__((weak)) void peerlane_launch_{name}(void** arguments) '
        f"{{ peerlane::emulator::call(&::{name}, arguments); }}\n"
        for name in (*names, HOST_READ)
    )
    return _MISPLACED.sub(r"\1 thread_local", unit) + _CALLER + callers, names


_libraries: list[Path] = []


def use_as_library(folder: Path) -> None:
    """Uses the compiled code in this folder from now on, without writing there: also when the cache is another one."""
    _libraries.append(folder)


def _cached(name: str) -> Path:
    """Returns the path where compiled code of this name lies, or is to be put."""
    paths = (library / name for library in _libraries)
    return next((path for path in paths if path.exists()), None) or folder() / name


def folder() -> Path:
    """Returns the folder of compiled code."""
    path = settings.cache_dir() / "emulator"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {path} can not be made ({error}); set PEERLANE_CACHE_DIR to a writable folder") from error
    return path


@cache
def version() -> str:
    return _run(["--version"]).partition("\n")[0]


def _run(options: Sequence[str], text: str | None = None) -> str:
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise MissingDependency(
            f"the emulator compiles device code with {COMPILER} 12 or newer, which is not installed: apt-get install g++ (or the like)"
        )
    done = subprocess.run([compiler, *options], input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(f"the device source does not compile for the emulator:\n{done.stderr.rstrip()}")
    return done.stdout
