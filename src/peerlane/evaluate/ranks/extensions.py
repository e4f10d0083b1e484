"""CUDA extensions of candidates: compiled once per source and node, then loaded from the cache.

Candidates written for the public benchmark import ``utils``; :func:`install_public_helpers` provides it.
"""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeAlias

import torch
from torch.utils import cpp_extension  # takes half a second, and the fork server has it before ranks are forked
from torch.utils._cpp_extension_versioner import Entry, ExtensionVersioner

from peerlane.common.files import one_process
from peerlane.common.light_headers import LIGHT_HEADERS
from peerlane.evaluate.ranks.extension_calls import ExtensionCall
from peerlane.sandbox.caches import cache_variables
from peerlane.settings import ARCHITECTURE, cache_dir

_NO_HASH = -1  # that no sources have
_OUTCOME = "peerlane-outcome-"
_BUILD_FAILED = "Error building extension"
_MACHINE_WORDS = ("Killed", "No space left", "Cannot allocate memory", "out of memory", "terminated")
"""in the log of a compiler that may succeed another time"""
_PATIENCE_S = 5.0  # with whoever holds our lock; torch has one of its own, on which the others wait for the one that compiles


def _load(name: str, library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the extension {library}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_cuda_extension(
    name: str,
    cuda_src: str,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
) -> Any:
    """``torch.utils.cpp_extension.load_inline`` of one CUDA source that holds its own bindings, with -O3, for sm_90a.

    The first process of a node compiles, the others wait for it and load the result. Raises what load_inline raises.
    """
    parts = [
        name,
        cuda_src,
        *map(str, (extra_cuda_cflags, extra_include_paths, extra_ldflags)),
        torch.__version__,
        sys.version,
        _architecture(),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_dir() / "extensions" / f"{name}-{digest}"
    library = folder / f"{name}.so"
    done = folder / "built"
    if done.exists():
        return _load(name, library)
    folder.mkdir(parents=True, exist_ok=True)
    with one_process(folder / "peerlane.lock", _PATIENCE_S) as alone:
        if done.exists():
            return _load(name, library)
        if alone:
            (folder / "lock").unlink(missing_ok=True)  # torch's, left by a build that was killed
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _architecture())
        module = cpp_extension.load_inline(  # type: ignore[no-untyped-call]
            name=name,
            cpp_sources="",
            cuda_sources=cuda_src,
            extra_cuda_cflags=["-O3", *(extra_cuda_cflags or [])],
            extra_include_paths=list(extra_include_paths or []),
            extra_ldflags=list(extra_ldflags or []),
            build_directory=str(folder),
            verbose=False,
        )
        if not getattr(module, "only_checked", False):  # of device_check: there is no library
            done.touch()
        return module


def _architecture() -> str:
    return os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHITECTURE)


def use_cache(folder: str | None) -> None:
    """Sends everything that this process compiles to a candidate's own cache; None: to the user's, which all share."""
    if folder is not None:
        os.environ.update(cache_variables(Path(folder)))


def use_own_build_folder(source: bytes) -> Path:
    """Sends what torch.utils.cpp_extension builds for a candidate of this source to a folder of its own in the cache; returns it.

    Two candidates may give their extensions the same name; and a build that was killed leaves a lock, on which torch waits for ever.
    """
    folder = cache_dir() / "torch_extensions" / hashlib.sha256(source).hexdigest()[:24]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    return folder


def remove_stale_locks(folder: Path) -> None:
    """Removes the locks of builds that were killed, and what is kept of earlier builds. For the one process that builds."""
    for stale in (*folder.glob("*/lock"), *folder.glob(f"*/{_OUTCOME}*")):
        stale.unlink(missing_ok=True)


def install_public_helpers() -> None:
    """Makes ``utils.cuda_helpers``, ``utils.triton_utils`` and ``utils.parallelkittens_runtime`` importable."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "utils"]:
        del sys.modules[name]
    package = sys.modules["utils"] = ModuleType("utils")
    package.__path__ = [str(Path(__file__).parent / "public_helpers")]


Tell = Callable[[bool], None]


@contextlib.contextmanager
def told(tell: Tell) -> Iterator[None]:
    """Calls ``tell`` with True, and at the end of the block with False."""
    tell(True)
    try:
        yield
    finally:
        tell(False)


def report_builds(tell: Tell) -> None:
    """Has ``tell`` called with True when torch's extension loader begins to compile in this process, or to wait for another one that
    does, and with False when it is done.

    What a builder has compiled is loaded, without a look at its sources. What failed there fails with the same message, at once.
    """
    loaded = set[str]()

    def repeat(build: Build, asked: Asked) -> Any:
        done, name, versions = _Outcome.of(asked), str(asked["name"]), _versions()
        if (failure := done.failure()) is not None:
            raise RuntimeError(failure)
        if done.built and (name in loaded or versions.get_version(name) is None):
            loaded.add(name)
            versions.entries[name] = Entry(0, _NO_HASH)  # another extension of this name gets another version
            load: Any = cpp_extension._import_module_from_library
            return load(name, asked["build_directory"], asked["is_python_module"])
        if versions.get_version(name) is None:
            done.forget_built()  # what comes now takes its place
        with told(tell):
            return build(asked)

    _replace_build(repeat)


def compile_cheaply(tell: Tell) -> None:
    """Has torch's extension loader compile with fewer headers where that succeeds, and keep how it went for the ranks; ``tell`` as for
    :func:`report_builds`. For the one process that builds."""

    def attempt(build: Build, asked: Asked) -> Any:
        done, name = _Outcome.of(asked), str(asked["name"])
        with told(tell):
            try:
                try:
                    found = build(_cheaper(asked))
                except Exception:
                    _versions().entries.pop(name, None)  # or the second attempt would have another name
                    found = build(asked)
                if _versions().get_version(name) == 0:
                    done.set_built()
                return found
            except Exception as error:
                if _BUILD_FAILED in str(error) and not any(word in str(error) for word in _MACHINE_WORDS):
                    done.set_failure(str(error))
                raise

    _replace_build(attempt)


Asked: TypeAlias = dict[str, Any]
"""the arguments of torch's function that compiles"""
Build: TypeAlias = Callable[[Asked], Any]


def _versions() -> Any:
    """Torch's own record of the names that this process has used."""
    return cpp_extension.JIT_EXTENSION_VERSIONER


def _replace_build(replacement: Callable[[Build, Asked], Any]) -> None:
    build = cpp_extension._jit_compile
    signature = inspect.signature(build)

    @functools.wraps(build)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(lambda asked: build(**asked), dict(bound.arguments))

    cpp_extension._jit_compile = replaced


def _cheaper(asked: Asked) -> Asked:
    """The same build without a main.cpp that holds nothing, and with a part of torch's headers in the place of all."""
    sources = list(asked["sources"])
    if len(sources) > 1:
        sources = [
            source for source in sources if Path(source).name != "main.cpp" or _text(source).strip() != "#include <torch/extension.h>"
        ]
    return {**asked, "sources": sources, "extra_include_paths": [str(LIGHT_HEADERS), *(asked["extra_include_paths"] or [])]}


def _text(source: str) -> str:
    return Path(source).read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True)
class _Outcome:
    """The outcome of the builder's build, in files beside it. ``digest`` stands for all that it was made of."""

    folder: Path
    name: str
    digest: str

    @classmethod
    def of(cls, asked: Asked) -> Self:
        flags = [f"{name}={value!r}" for name, value in asked.items() if name.startswith(("extra_", "with_", "is_"))]
        parts = [str(asked["name"]), torch.__version__, os.environ.get("TORCH_CUDA_ARCH_LIST", ""), *flags]
        for source in asked["sources"]:
            with contextlib.suppress(OSError):
                parts.append(_text(source))
        digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:24]
        return cls(Path(str(asked["build_directory"])), str(asked["name"]), digest)

    @property
    def built(self) -> bool:
        """The library of this name is the one that was asked for: of two, the later one lies there."""
        with contextlib.suppress(OSError):
            library = self.folder / f"{self.name}{cpp_extension.LIB_EXT}"
            return library.exists() and _text(str(self._built)) == self.digest
        return False

    def set_built(self) -> None:
        self._built.write_text(self.digest)

    def forget_built(self) -> None:
        self._built.unlink(missing_ok=True)

    def failure(self) -> str | None:
        with contextlib.suppress(OSError):
            return _text(str(self._failed))
        return None

    def set_failure(self, message: str) -> None:
        self._failed.write_text(message, encoding="utf-8", errors="replace")

    @property
    def _built(self) -> Path:
        return self.folder / f"{_OUTCOME}{self.name}.built"

    @property
    def _failed(self) -> Path:
        return self.folder / f"{_OUTCOME}{self.digest}.failed"


def compile_ahead(calls: Iterable[ExtensionCall]) -> Exception | None:
    """Makes these calls as the candidate will, but loads nothing; returns the first failure of the compiler."""
    load = cpp_extension._import_module_from_library
    first: Exception | None = None
    cpp_extension._import_module_from_library = lambda *_: None
    try:
        for call in calls:
            if torch.version.cuda is None and _needs_cuda(call):
                continue
            cpp_extension.JIT_EXTENSION_VERSIONER = ExtensionVersioner()  # each is the first of its name, as in the ranks
            try:
                _FUNCTIONS[call.function](*copy.deepcopy(call.args), **copy.deepcopy(dict(call.kwargs)))
            except Exception as error:  # of any other than a compiler, the ranks will tell, if they make this call at all
                if _BUILD_FAILED in str(error):
                    first = first or error
    finally:
        cpp_extension._import_module_from_library = load
    return first


def _needs_cuda(call: ExtensionCall) -> bool:
    sources = call.kwargs.get("sources") or (call.args[1] if call.function == "load" and len(call.args) > 1 else ())
    named = [sources] if isinstance(sources, str) else list(sources or ())
    if call.function == "compile_cuda_extension" or any(str(source).endswith((".cu", ".cuh")) for source in named):
        return True
    return call.function == "load_inline" and bool(call.kwargs.get("cuda_sources") or len(call.args) > 2)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "load_inline": lambda *args, **kwargs: cpp_extension.load_inline(*args, **kwargs),  # type: ignore[no-untyped-call]
    "load": lambda *args, **kwargs: cpp_extension.load(*args, **kwargs),
    "compile_cuda_extension": compile_cuda_extension,
}
