"""Counts of code lines of the expert solutions: host code and device code, without blank lines, comments and docstrings.

python -m peerlane.report.line_counts > docs/device/lines.md
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from peerlane.report.tables import TextTable

_ROOMS = ("peerlane.device.", "peerlane.solutions.")
_BASIC = "host"  # the room that every kernel stands on
_OWN_HEADER = re.compile(r"Host side of ``peerlane/([\w/]+)\.cuh``")
_HEADER = re.compile(r"#\s*include\s*<peerlane/([\w/]+)\.cuh>")
_PAGE = """# Lines of the solutions

After this page you know how much code a kernel takes, on the host and on the device. `make docs` counts anew.

* Blank lines, comments, docstrings and the docstring of the file do not count. Imports and lines of one bracket do.
* *Host* is a solution's Python. *Device* is the CUDA source in it. A solution without device code calls kernels of the kit.
* *Shared pieces* are the modules of `peerlane.device` and of `solutions/families` that a solution imports, and the headers that its
  source includes. `peerlane.device.host`, which every kernel uses, is left out.

{own}
## Shared pieces

A piece counts once: its own module, the source in it, and the header that it is the host side of. Other headers are not in its row.

{shared}"""
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True)
class Lines:
    """Lines of one Python file, and of the CUDA source in its strings."""

    host: int
    device: int
    pieces: tuple[str, ...]
    """modules that it shares with others, as room/module, and headers that its source includes"""


def read_lines(path: Path) -> Lines:
    """Counts a Python file's lines. A line that holds a part of a statement counts once; imports and closing brackets count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    code: set[int] = set()
    strings: list[ast.Constant] = []
    pieces: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(_lines(node))  # a docstring: its place comes before what is inside its function
        elif isinstance(node, ast.stmt):
            code |= set(_lines(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "__global__" in node.value:
            strings.append(node)
        if isinstance(node, ast.ImportFrom):
            pieces += _modules(node)
    for node in strings:
        code -= set(_lines(node))
    text = path.read_text(encoding="utf-8").splitlines()
    host = sum(1 for number in code if text[number - 1].strip() and not text[number - 1].lstrip().startswith("#"))
    sources = [str(node.value) for node in strings]
    pieces += [f"{name}.cuh" for source in sources for name in _HEADER.findall(source)]
    return Lines(host, sum(map(device_lines, sources)), tuple(sorted(set(pieces))))


def _modules(node: ast.ImportFrom) -> list[str]:
    """Returns the shared modules that an import names, as room/module."""
    names = [item.name for item in node.names]
    if node.module == "peerlane.device":
        return ["collectives/communicator"] if "communicator" in names else []
    if not (node.module or "").startswith(_ROOMS):
        return []
    room, *module = str(node.module).split(".")[2:]
    return [] if room == _BASIC else [f"{room}/{name}" for name in (module or names)]


def device_lines(source: str) -> int:
    """Counts the lines of CUDA source that hold more than a comment."""
    return sum(1 for line in _COMMENT.sub("", source).splitlines() if line.strip())


def lines_report(solutions: Path) -> str:
    """Returns the page: a row for each solution, and a row for each piece of the kit that solutions share."""
    device, headers = solutions.parent / "device", solutions.parent / "device" / "include" / "peerlane"
    own = TextTable(("problem", "host", "device", "shared pieces"), right=("host", "device"))
    used: dict[str, int] = {}
    for path in [*sorted(solutions.glob("p[0-9]*.py")), *sorted(solutions.glob("internode/p[0-9]*.py"))]:
        counted = read_lines(path)
        own.add(
            f"{int(path.stem[1:4])} {path.stem[5:]}",
            str(counted.host),
            str(counted.device),
            ", ".join(f"`{name}`" for name in counted.pieces),
        )
        for piece in counted.pieces:
            used[piece] = used.get(piece, 0) + 1
    shared = TextTable(("piece", "host", "device", "solutions"), right=("host", "device", "solutions"))
    for piece, count in sorted(used.items()):
        if piece.endswith(".cuh"):
            lines, header = Lines(0, 0, ()), piece.removesuffix(".cuh")
        else:
            module = (solutions if piece.startswith("families/") else device) / f"{piece}.py"
            lines, found_header = read_lines(module), _OWN_HEADER.search(module.read_text(encoding="utf-8"))
            header = found_header[1] if found_header else ""
        in_header = device_lines((headers / f"{header}.cuh").read_text(encoding="utf-8")) if header else 0
        shared.add(f"`{piece}`", str(lines.host), str(lines.device + in_header), str(count))
    return _PAGE.format(own=own.markdown(), shared=shared.markdown())


def _lines(node: ast.stmt | ast.expr) -> range:
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or node.lineno) + 1)


if __name__ == "__main__":
    print(lines_report(Path(__file__).parents[1] / "solutions"), end="")
