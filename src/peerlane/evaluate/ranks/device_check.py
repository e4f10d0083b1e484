"""CUDA extensions where torch has no CUDA: nvcc compiles their device code for a GPU, and nothing is linked or loaded.

Whether a candidate of the public benchmark's kind compiles is known without a GPU, then. Its host code is parsed with torch's headers, too.
"""

import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

from peerlane.common.toolkit import find_nvcc
from peerlane.errors import CompileError, MissingDependency
from peerlane.evaluate.ranks.extensions import told
from peerlane.settings import cache_dir

ARCHITECTURE = "sm_90a"
_TIMEOUT_S = 600.0
# What load_inline puts before a source, and a header that only a CUDA build of torch has.
_IMPLICIT = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
_TORCH_WORDS = ("torch::", "at::", "c10::", "Tensor", "TORCH_")
_MISSING_HEADER = re.compile(r"fatal error: (\S+): No such file or directory")
# What torch's headers for CUDA include and a machine without a GPU may lack; found last, so the real ones count where they are.
_STAND_INS = {
    "c10/cuda/impl/cuda_cmake_macros.h": "",
    "cusparse.h": "typedef struct cusparseContext* cusparseHandle_t;\nenum cusparseStatus_t { CUSPARSE_STATUS_SUCCESS };\n",
    "cublas_v2.h": "typedef struct cublasContext* cublasHandle_t;\nenum cublasStatus_t { CUBLAS_STATUS_SUCCESS };\n",
    "cublasLt.h": "typedef struct cublasLtContext* cublasLtHandle_t;\n",
    "cusolverDn.h": "typedef struct cusolverDnContext* cusolverDnHandle_t;\n",
    "cusolver_common.h": "enum cusolverStatus_t { CUSOLVER_STATUS_SUCCESS };\n",
}


class Checked(ModuleType):
    """An extension whose device code compiles, and which cannot be called here."""

    only_checked = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{self.__name__}.{name} needs a GPU: nvcc compiled the device code here, and nothing was loaded")


def check_extensions(tell: Callable[[bool], None]) -> bool:
    """Has ``load_inline`` and ``load`` of torch only compile device code in this process, if nvcc is here; tells whether it is.

    ``tell`` is called with True when a compile begins, and with False at its end."""
    nvcc = find_nvcc()
    if nvcc is None or torch.version.cuda is not None:
        return False

    def compiled(texts: Iterable[str], flags: Sequence[str], include_dirs: Sequence[str]) -> None:
        with told(tell):
            compile_device_code(nvcc, texts, flags, include_dirs)

    def load_inline(
        name: str,
        cpp_sources: Any = "",
        cuda_sources: Any = None,
        *_: Any,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_include_paths: Sequence[str] | None = None,
        no_implicit_headers: bool = False,
        **__: Any,
    ) -> Checked:
        given = [cuda_sources] if isinstance(cuda_sources, str) else list(cuda_sources or [])
        text = "\n".join(given)
        # The headers take ten seconds: only where they are used.
        head = _IMPLICIT if not no_implicit_headers and any(word in text for word in _TORCH_WORDS) else ""
        compiled([f'{head}#line 1 "{name}.cu"\n{text}'], extra_cuda_cflags or (), extra_include_paths or ())
        return Checked(name)

    def load(
        name: str,
        sources: str | Sequence[str],
        *_: Any,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_include_paths: Sequence[str] | None = None,
        **__: Any,
    ) -> Checked:
        files = [Path(file) for file in ([sources] if isinstance(sources, str) else sources) if Path(file).suffix == ".cu"]
        texts = [f'#line 1 "{file}"\n{file.read_text()}' for file in files]
        own = [str(file.resolve().parent) for file in files]
        compiled(texts, extra_cuda_cflags or (), [*own, *(extra_include_paths or ())])
        return Checked(name)

    cpp_extension.load_inline, cpp_extension.load = load_inline, load
    return True


def compile_device_code(nvcc: str, texts: Iterable[str], flags: Sequence[str], include_dirs: Sequence[str]) -> None:
    """Compiles each text to a cubin, which is thrown away. Raises CompileError with what nvcc says, MissingDependency where nvcc lacks a
    header."""
    with tempfile.TemporaryDirectory() as folder:
        stand_ins = Path(folder) / "include"
        for name, content in _STAND_INS.items():
            (stand_ins / name).parent.mkdir(parents=True, exist_ok=True)
            (stand_ins / name).write_text(f"#pragma once\n{content}")
        paths = [*include_dirs, *cpp_extension.include_paths("cpu"), sysconfig.get_path("include")]
        kept = [flag for flag in flags if not flag.startswith(("-gencode", "-arch", "--gpu-architecture", "arch=", "-code"))]
        for text in texts:
            parts = (nvcc, torch.__version__, *kept, *include_dirs, text)
            known = cache_dir() / "device_check" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
            if known.exists():
                continue
            source = Path(folder) / "candidate.cu"
            source.write_text(text)
            command = [nvcc, "-cubin", f"-arch={ARCHITECTURE}", "-std=c++20", "-w", "--expt-relaxed-constexpr", *kept]
            command += [*(f"-I{path}" for path in paths), "-Xcompiler", f"-idirafter,{stand_ins}", str(source), "-o", os.devnull]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CompileError(f"nvcc did not compile the device code: {error}") from error
            if done.returncode and (header := _MISSING_HEADER.search(done.stderr)):
                raise MissingDependency(f"nvcc cannot compile the device code: {header[1]} is not here; install the whole CUDA toolkit")
            if done.returncode:
                raise CompileError(f"nvcc refuses the device code ({nvcc}, {ARCHITECTURE}):\n{(done.stderr or done.stdout).strip()}")
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
