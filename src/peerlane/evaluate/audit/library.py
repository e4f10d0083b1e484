"""The kernels of the kit's library, which a candidate of the custom track may not use: known by the tokens of their source.

A backend, and free to use, are primitives, tiles, roles, rows and ``declare``. The library are the kernels that communicate by one call:
collectives, exchanges, fused products, attention, mixtures of experts, and what families of solutions share.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

from peerlane.device import attention, collectives, moe, products
from peerlane.device.collectives.kernels import KERNELS
from peerlane.device.host.declare import DeclaredKernel, LocalKernel
from peerlane.device.host.source_tokens import token_hash
from peerlane.solutions import families

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TEAM_COLLECTIVE = re.compile(
    r"\bnvshmemx?_\w*(?:reduce|reducescatter|fcollect|alltoall|broadcast)(?:mem)?(?:_warp|_block|_on_stream)?(?=\s*\()"
)
_ROOMS = (collectives, products, attention, moe, families)


@functools.cache
def library_kernels() -> dict[str, str]:
    """Returns the name of each kernel of the library that involves other ranks, by the hash of its tokens."""
    found = {token_hash(source.text(name)): name for name, source in KERNELS.items()}
    for room in _ROOMS:
        for module in _modules(room):
            declared = (value for value in vars(module).values() if isinstance(value, DeclaredKernel))
            found |= {token_hash(kernel.source): kernel.name for kernel in declared if not isinstance(kernel, LocalKernel)}
    return found


def team_collectives(source: str) -> list[str]:
    """Returns the collectives of NVSHMEM's teams that kernels of this source call.

    They are inlined into kernels, where nothing tells them from puts and signals. So the source is the evidence. Its barriers and
    synchronisations of teams are no collectives.
    """
    return sorted(set(_TEAM_COLLECTIVE.findall(_COMMENT.sub("", source))))


def _modules(room: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(room.__path__):
        yield importlib.import_module(f"{room.__name__}.{found.name}")
