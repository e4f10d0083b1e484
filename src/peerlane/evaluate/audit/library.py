"""The kernels of the kit's library, which a candidate of the custom track may not use: known by the tokens of their source.

A backend, and free to use, are primitives, tiles, roles, rows and ``declare``. The library are the kernels that communicate by one call:
collectives, exchanges, fused products, attention, mixtures of experts, and what families of solutions share.
"""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

from peerlane.common.syntax import UNREADABLE, parse
from peerlane.device import attention, collectives, moe, products
from peerlane.device.collectives import point_to_point
from peerlane.device.collectives.kernels import KERNELS
from peerlane.device.host.declare import DeclaredKernel, LocalKernel
from peerlane.device.host.source_tokens import token_hash

try:
    from peerlane.solutions import families
except ModuleNotFoundError:  # the image of an agent holds no answers
    families = None  # type: ignore[assignment]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TEAM_COLLECTIVE = re.compile(
    r"\bnvshmemx?_\w*(?:reduce|reducescatter|fcollect|alltoall|broadcast)(?:mem)?(?:_warp|_block|_on_stream)?(?=\s*\()"
)
_ROOMS = [room for room in (collectives, products, attention, moe, families) if room is not None]


@functools.cache
def library_kernels() -> dict[str, str]:
    """Returns the name of each kernel of the library that involves other ranks, by the hash of its tokens."""
    found = {token_hash(source.text(name)): name for name, source in KERNELS.items()}
    found[token_hash(point_to_point.SOURCE)] = "point_to_point"
    for room in _ROOMS:
        for module in _modules(room):
            declared = (value for value in vars(module).values() if isinstance(value, DeclaredKernel))
            found |= {token_hash(kernel.source): kernel.name for kernel in declared if not isinstance(kernel, LocalKernel)}
    return found


def team_collectives(source: str) -> list[str]:
    """Returns the collectives of NVSHMEM's teams that device code in the strings of a candidate's source calls.

    They are inlined into kernels, where nothing tells them from puts and signals: the source is the evidence. Barriers are none of them.
    """
    return sorted({name for text in _device_code(source) for name in _TEAM_COLLECTIVE.findall(_COMMENT.sub("", text))})


def _device_code(source: str) -> Iterator[str]:
    """Yields the strings of a Python source, but for its documentation; nothing of what is no Python."""
    try:
        nodes = list(ast.walk(parse(source)))
    except UNREADABLE:
        return
    documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node.value


def _modules(room: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(room.__path__):
        yield importlib.import_module(f"{room.__name__}.{found.name}")
