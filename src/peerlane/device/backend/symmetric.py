"""torch's symmetric memory in groups that are written in Python.

A rendezvous asks the group that torch knows by a name for its store. A group written in Python has none there, and torch crashes. While a
rendezvous lasts, plain groups with the stores take the places of those groups.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup, Store

_c10d: Any = _distributed_c10d
_stand_ins: dict[str, ProcessGroup] = {}
"""Plain groups by the names of those that they stand in for."""
_rendezvous: Any = None
"""torch's own function, once :func:`_rendezvous_of_all` has replaced it."""


def serve_symmetric_memory(name: str, rank: int, world_size: int, store: Store) -> None:
    """Makes a rendezvous of the group ``name``, of which this process is ``rank``, exchange its handles through ``store``."""
    global _rendezvous
    memory = _c10d._SymmetricMemory
    _stand_ins[name] = ProcessGroup(store, rank, world_size)
    with contextlib.suppress(RuntimeError):  # older versions of torch keep the store by themselves, once for each name
        memory.set_group_info(name, rank, world_size, store)
    if _rendezvous is None:
        _rendezvous = memory.rendezvous
        memory.rendezvous = staticmethod(_rendezvous_of_all)


def forget_symmetric_memory(name: str) -> None:
    """Forgets the group ``name``, which has ended."""
    _stand_ins.pop(name, None)


def _rendezvous_of_all(*args: Any, **kwargs: Any) -> Any:
    with _standing_in():
        return _rendezvous(*args, **kwargs)


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    replaced: dict[str, Any] = {}
    try:
        for name, stand_in in _stand_ins.items():
            with contextlib.suppress(RuntimeError):  # torch does not know the group any more
                group = _c10d._resolve_process_group(name)
                if type(group) is not ProcessGroup:
                    _register(name, stand_in)
                    replaced[name] = group
        yield
    finally:
        for name, group in replaced.items():
            _register(name, group)


def _register(name: str, group: Any) -> None:
    _c10d._unregister_process_group(name)
    _c10d._register_process_group(name, group)
