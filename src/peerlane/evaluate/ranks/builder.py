"""The builder: one process that imports a candidate with no GPU in sight, before it takes any time of a GPU.

What the import compiles is in the cache when the ranks come to it.
"""

import os
from pathlib import Path
from typing import Any

import torch

from peerlane.emulator import cuda_extensions
from peerlane.errors import CompileError, MissingDependency
from peerlane.evaluate import wire
from peerlane.evaluate.rank_interface import BuilderInterface
from peerlane.evaluate.ranks import device_check, extensions, out_of_reach
from peerlane.evaluate.ranks.candidate import import_candidate, solution_of
from peerlane.evaluate.ranks.extension_calls import find_extension_calls
from peerlane.evaluate.ranks.rank import RankProcess, classify, refused_source, wants_gpu
from peerlane.evaluate.timing.cores import cores_beside

_NICE = 10  # candidates may be timed meanwhile


class Builder(RankProcess, BuilderInterface):
    """Compiles candidates. Has no process group, and no GPU is visible to it."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__({**config, "device": "cpu"}, rank, memory_fd)
        if timed_ranks := config["timed_ranks"]:
            os.nice(_NICE)
            os.sched_setaffinity(0, cores_beside(timed_ranks))

    def build_candidate(
        self, path: str, source: str, cache: str | None, granted: dict[str, str], on_cpu: bool, gpu_only: bool, emulated: bool
    ) -> wire.Built:
        file, text = Path(path), source.encode("latin-1")
        extensions.use_cache(cache)
        extensions.remove_stale_locks(extensions.use_own_build_folder(text))
        out_of_reach.refuse_answers(granted)
        if emulated:
            self._build_for_emulated_ranks(file, text)
            return wire.Built(None, False)
        extensions.compile_cheaply(self.report_building)
        by_nvcc = gpu_only and device_check.check_extensions(self.report_building)
        module, raised = None, None
        try:
            module = import_candidate(file, text)
        except Exception as error:
            if classify(error) == "build_error":
                mended = on_cpu and torch.version.cuda is None and not refused_source(error)
            else:
                mended = not gpu_only or wants_gpu(f"{type(error).__name__}: {error}")
            if not mended:
                raise
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"[: wire.NAME_CHARACTERS]
        failure = extensions.compile_ahead(find_extension_calls(text, None if module is None else vars(module)))
        if gpu_only:
            if failure is not None:
                raise failure
            if module is not None:
                solution_of(module, file)
        return wire.Built(raised, by_nvcc)

    def _build_for_emulated_ranks(self, path: Path, source: bytes) -> None:
        """Compiles what the import of the candidate compiles, and what its source shows that its calls will. Raises what nvcc says."""

        def build(asked: cuda_extensions.Source) -> cuda_extensions.Built:
            with extensions.told(self.report_building):
                return cuda_extensions.build(asked)

        for place, members in cuda_extensions.extension_stand_ins(build):
            for name, member in members.items():
                setattr(place, name, member)
        try:
            import_candidate(path, source)
        except (CompileError, MissingDependency):
            raise
        except Exception:  # the rank, which has more of a GPU's names, will tell
            pass
        for call in find_extension_calls(source):
            build(cuda_extensions.SOURCES[call.function](str(path), *call.args, **call.kwargs))
