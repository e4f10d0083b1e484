"""Names that host code of emulated ranks cannot use. Each raises an error that says what to use."""

import importlib
import sys
from types import ModuleType
from typing import Any, NoReturn

from peerlane.emulator.torch_cuda import NOT_EMULATED, runs_candidate
from peerlane.errors import UsageError

_MESSAGES = "symmetric memory: store to a peer's buffer, then handle.put_signal and handle.wait_signal"
NOT_HERE: dict[str, dict[str, str]] = {
    "torch.distributed": {
        **dict.fromkeys(("send", "recv", "isend", "irecv", "batch_isend_irecv"), _MESSAGES),
        **dict.fromkeys(("gather", "reduce", "scatter"), "all_gather, all_reduce or broadcast"),
        **dict.fromkeys(("gather_object", "scatter_object_list", "send_object_list", "recv_object_list"), "all_gather_object"),
        **dict.fromkeys(("all_gather_coalesced", "all_reduce_coalesced", "reduce_scatter_base"), "one collective a tensor"),
        **dict.fromkeys(("new_subgroups", "new_subgroups_by_enumeration", "split_group"), "new_group"),
        "monitored_barrier": "barrier",
    },
    "torch.distributed.device_mesh": {"init_device_mesh": "dist.new_group"},
    "torch.distributed._symmetric_memory": {
        **dict.fromkeys(("get_mem_pool", "get_mempool_allocator", "set_signal_pad_size"), "symm_mem.empty, whose pad has 2048 bytes"),
        **dict.fromkeys(("_fused_all_gather_matmul", "_fused_matmul_reduce_scatter"), "a collective and torch.matmul"),
    },
    "torch.cuda": {
        **dict.fromkeys(("mem_get_info", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"), "a GPU"),
        **dict.fromkeys(("MemPool", "use_mem_pool", "caching_allocator_alloc", "change_current_allocator"), "torch.empty"),
        **dict.fromkeys(("FloatTensor", "HalfTensor", "IntTensor", "LongTensor", "ByteTensor"), 'torch.tensor(..., device="cuda")'),
        "make_graphed_callables": "torch.cuda.graph",
        "cudart": "torch.cuda or cuda.core",
        "_compile_kernel": "cuda.core.Program",
        "_sleep": "schedules, which delay threads by themselves",
    },
    "torch": {"compile": "the function as it is"},
    "torch.multiprocessing": {"spawn": "solution() or @peerlane.race: every rank calls it"},
    "cuda.core": {
        **dict.fromkeys(("Linker", "ObjectCode"), "Program(...).compile('cubin')"),
        **dict.fromkeys(("DeviceMemoryResource", "PinnedMemoryResource", "ManagedMemoryResource", "Buffer"), "torch.empty"),
        "TensorMapDescriptor": "the kit's tensor maps, peerlane.device",
    },
}
"""module: name: what to use"""


class _NotHere:
    """Stands for a function or class that emulated ranks do not have."""

    def __init__(self, name: str, instead: str, original: Any) -> None:
        self._name, self._instead, self._original = name, instead, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_candidate():
            self._refuse()
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if runs_candidate() and not name.startswith("__"):
            self._refuse()
        return getattr(self._original, name)

    def _refuse(self) -> NoReturn:
        raise UsageError(f"{self._name} {NOT_EMULATED}: use {self._instead}")


def not_here() -> list[tuple[ModuleType, dict[str, Any]]]:
    """Returns the imported modules of ``NOT_HERE`` with what raises in place of their members."""
    found = []
    for path, names in NOT_HERE.items():
        if path == "torch.distributed.device_mesh":
            importlib.import_module(path)
        if (module := sys.modules.get(path)) is not None:
            made = {name: _NotHere(f"{path}.{name}", use, getattr(module, name)) for name, use in names.items() if hasattr(module, name)}
            found.append((module, made))
    return found
