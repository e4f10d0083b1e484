"""PTX to C++ for the emulator: what NVRTC, nvcc or Triton made of a kernel runs under the same scheduler, with the same checks.

    scenario = Scenario("mine", Ptx(cubin.ptx()), world_size=2)

Every instruction is translated by a rule of its own in ``ptx_rules.py``. One without a rule, or with a modifier that its rule does not
know, is an error that quotes it: nothing is guessed. Source lines come from ``.loc``: those of the kernel, into which others were inlined.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peerlane.emulator.ptx_operands import TYPES, name_of
from peerlane.emulator.ptx_rules import Rules
from peerlane.emulator.ptx_text import Function, Place, Statement, Variable, parse
from peerlane.errors import UsageError

_HEAD = """#include <peerlane_emulator/ptx_code.h>
#include <peerlane_emulator/ptx_matrix.h>
#include <peerlane_emulator/ptx_multimem.h>
using namespace peerlane::emulator;
using namespace peerlane::emulator::ptx_code;
"""
_TENSOR_COPIES = "#include <peerlane/ptx/ptx_tensor.cuh>\n"
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
_STORED = {"pred": "bool", "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "b128": "u128"}


@dataclass(frozen=True)
class Ptx:
    """The text of a PTX module, as the source of a scenario. With the cubin that was made of it, the resources of its kernels are known."""

    text: str
    cubin: Path | None = field(default=None, compare=False)

    @functools.cached_property
    def digest(self) -> str:
        """The hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def symbol(self, kernel: str) -> str:
        """Returns the name of a kernel where several modules, which may have kernels of one name, are in one program."""
        return f"{kernel}{_MODULE}{self.digest[:16]}"


_MODULE = "_of_ptx_"


def kernel_of(symbol: str) -> str:
    """Returns the name of the kernel that ``symbol`` stands for."""
    return symbol.partition(_MODULE)[0]


NOT_KNOWN = "is not known to the emulator"
"""Part of the message of every UnknownPtx."""


class UnknownPtx(UsageError):
    """PTX that the emulator cannot run."""


def translate(ptx: Ptx, *, apart: bool = False) -> str:
    """Returns the module's kernels as C++ for the emulator; ``apart``: under the names that ``Ptx.symbol`` gives. Raises UnknownPtx,
    which quotes the instruction."""
    module = parse(ptx.text)
    if not module.entries:
        raise UnknownPtx("the PTX has no .entry; expected that of one kernel or more")
    used = ptx.text
    shared = {variable.name for entry in module.entries for variable in _variables(entry) if variable.space == "shared"}
    shared |= {variable.name for variable in module.variables if variable.space == "shared"}
    dynamic = {variable.name for variable in module.variables if variable.space == "shared" and variable.length == 0}
    named = {variable.name for variable in module.variables if variable.space in ("global", "const")}
    lines = [(_TENSOR_COPIES if ".tensor." in ptx.text else "") + _HEAD]
    # Constants of headers come with every module, though nothing reads them.
    kept = [variable for variable in module.variables if used.count(variable.name) > 1 or variable.space == "shared"]
    lines += [_declared(variable) for variable in kept if variable.name not in dynamic]
    for entry in module.entries:
        lines += [_declared(variable) for variable in _variables(entry) if variable.space == "shared"]
        lines += _kernel(entry, shared, dynamic, named, ptx.symbol(entry.name) if apart else entry.name)
    if apart:
        space = f"module_{ptx.digest[:16]}"
        lines.insert(1, f"namespace {space} {{")
        lines += ["}", *(f"using {space}::{ptx.symbol(entry.name)};" for entry in module.entries)]
    return "\n".join(lines)


def _variables(entry: Function) -> list[Variable]:
    return [statement.variable for statement in entry.statements if statement.variable is not None]


def _declared(variable: Variable) -> str:
    """Returns the variable as bytes of a thread, of a block or of a rank."""
    size = TYPES[variable.type][1] if variable.type in TYPES else 0
    if not size:
        raise UnknownPtx(f"a variable of type .{variable.type} ({variable.name}) {NOT_KNOWN}")
    align, nbytes = variable.align or size, size * max(variable.length, 1)
    # The host may write a variable that no kernel writes.
    storage = {"shared": "thread_local ", "local": ""}.get(variable.space, "__attribute__((used)) static ")
    initial = ""
    if variable.initial:
        content = b"".join(_bytes_of(item, size, variable.name) for item in variable.initial.strip("{} ").split(","))
        initial = " = {" + ", ".join(map(str, content)) + "}"
    return f"alignas({align}) {storage}unsigned char {name_of(variable.name)}[{nbytes}]{initial};"


def _bytes_of(item: str, size: int, name: str) -> bytes:
    item = item.strip()
    try:
        value = int(item[2:], 16) if item[:2] in ("0f", "0d", "0F", "0D") else int(item, 0)
    except ValueError:
        raise UnknownPtx(f"the initial value {item!r} of variable {name} {NOT_KNOWN}; expected a number") from None
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def _kernel(entry: Function, shared: set[str], dynamic: set[str], named: set[str], symbol: str) -> list[str]:
    rules = Rules(shared, dynamic, named | {parameter[2] for parameter in entry.parameters})
    structs, arguments = [], []
    for kind, align, name, nbytes in entry.parameters:
        spelt = name_of(name)
        if nbytes:
            structs.append(f"struct alignas({align or 1}) T_{spelt} {{ unsigned char at[{nbytes * TYPES[kind][1]}]; }};")
            arguments.append(f"T_{spelt} {spelt}")
        else:
            arguments.append(f"{_STORED.get(kind) or 'u' + str(8 * TYPES[kind][1])} {spelt}")
    lines = [*structs, f'extern "C" __global__ void {symbol}({", ".join(arguments)}) {{']
    place: Place = ("", 0)
    for number, statement in enumerate(entry.statements):
        if statement.kind == "line":
            if statement.place != place:
                place = statement.place
                lines.append(f'#line {place[1]} "{place[0]}"')
            continue
        if statement.kind == "instruction":
            made = rules.translated(statement.text)
            if made is None:
                where = f" ({place[0]}:{place[1]})" if place[1] else ""
                raise UnknownPtx(f"kernel {entry.name}: {statement.text!r}{where} {NOT_KNOWN}; nothing was run")
        elif statement.kind == "registers":
            made = _registers(statement.text)
        elif statement.kind == "label":
            made = f"{name_of(statement.text)}: ;"
        elif statement.variable is not None:
            made = _declared(statement.variable) if statement.variable.space == "local" else ""
        elif statement.kind == "open":
            # Labels of a scope, which inline assembly in a loop repeats, are its own.
            labels = [name_of(label) for label in _labels(entry.statements[number + 1 :])]
            made = "{" + (f" __label__ {', '.join(labels)};" if labels else "")
        else:
            made = "}"
        lines.append(made)
        if place[1]:
            lines.append(f'#line {place[1]} "{place[0]}"')  # one statement of C++ is one line, but the next is of the same place
    return [*lines, "}"]


def _labels(statements: Sequence[Statement]) -> Iterator[str]:
    """Yields the labels of the scope that begins here."""
    depth = 1
    for statement in statements:
        depth += (statement.kind == "open") - (statement.kind == "close")
        if depth == 0:
            return
        if statement.kind == "label" and depth == 1:
            yield statement.text


def _registers(text: str) -> str:
    found = _REGISTERS.match(text)
    if found is None or (found[1] not in TYPES and found[1] != "pred"):
        raise UnknownPtx(f"one of the registers {text!r} {NOT_KNOWN}")
    stored = "bool" if found[1] == "pred" else f"u{8 * TYPES[found[1]][1]}"
    names = []
    for item in found[2].split(","):
        item = item.strip()
        if many := re.fullmatch(r"(.*)<(\d+)>", item):
            names += [name_of(f"{many[1]}{number}") for number in range(int(many[2]))]
        else:
            names.append(name_of(item))
    return f"{stored} {', '.join(names)};"
