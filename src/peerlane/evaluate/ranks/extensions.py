"""CUDA extensions of candidates: compiled once per source and node, then loaded from the cache.

Candidates written for the public benchmark import ``utils``; :func:`install_public_helpers` provides it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension  # takes half a second, and the fork server has it before ranks are forked

from peerlane.files import one_process
from peerlane.sandbox.caches import cache_variables
from peerlane.settings import ARCHITECTURE, cache_dir

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
    """Removes the locks of builds that were killed. For the one process that builds."""
    for lock in folder.glob("*/lock"):
        lock.unlink(missing_ok=True)


def install_public_helpers() -> None:
    """Makes ``utils.cuda_helpers``, ``utils.triton_utils`` and ``utils.parallelkittens_runtime`` importable."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "utils"]:
        del sys.modules[name]
    package = sys.modules["utils"] = ModuleType("utils")
    package.__path__ = [str(Path(__file__).parent / "public_helpers")]


Tell = Callable[[bool], None]


def report_builds(tell: Tell) -> None:
    """Has ``tell`` called with True when torch's extension loader begins to compile in this process, or to wait for another one that
    does, and with False when it is done."""
    build = cpp_extension._jit_compile

    @functools.wraps(build)
    def reported(*args: Any, **kwargs: Any) -> Any:
        tell(True)
        try:
            return build(*args, **kwargs)
        finally:
            tell(False)

    cpp_extension._jit_compile = reported
