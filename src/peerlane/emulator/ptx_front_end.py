"""PTX to C++ for the emulator: what NVRTC, nvcc or Triton made of a kernel runs under the same scheduler, with the same checks.

    scenario = Scenario("mine", Ptx(cubin.ptx()), world_size=2)

Every instruction is translated by a rule of its own in ``ptx_rules.py``. One without a rule, or with a modifier that its rule does not
know, is an error that quotes it: nothing is guessed. Source lines come from ``.loc``, with the calls that were inlined.
"""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peerlane.emulator.ptx_operands import TYPES, name_of
from peerlane.emulator.ptx_rules import Rules
from peerlane.emulator.ptx_text import CALLED_FROM, Function, Parameter, Place, Statement, Variable, parse
from peerlane.errors import UsageError

_HEAD = """#include <peerlane_emulator/ptx_code.h>
#include <peerlane_emulator/ptx_matrix.h>
#include <peerlane_emulator/ptx_multimem.h>
using namespace peerlane::emulator;
using namespace peerlane::emulator::ptx_code;
"""
_TENSOR_COPIES = "#include <peerlane/ptx/ptx_tensor.cuh>\n"
_REGISTERS = re.compile(r"\.reg\s*(?:\.v([24])\s*)?\.(\w+)\s+(.*)")
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
    """Returns the name of the kernel that ``symbol`` stands for, as C++ has it."""
    name = symbol.partition(_MODULE)[0]
    return torch._C._demangle(name) if name.startswith("_Z") else name


NOT_KNOWN = "is not known to the emulator"
"""Part of the message of every UnknownPtx."""


class UnknownPtx(UsageError):
    """PTX that the emulator cannot run."""


def cluster_of(kernel: Function, launched: int) -> int:
    """Returns the blocks of a kernel's cluster: as it says itself, or as ``launched``. Raises UnknownPtx if they are not along x."""
    if any(size > 1 for size in kernel.cluster[1:]):
        raise UnknownPtx(f"kernel {kernel.name}: a cluster of {kernel.cluster} blocks {NOT_KNOWN}, which has clusters along x")
    return kernel.cluster[0] if kernel.cluster else launched


_counted: dict[str, Counter[str]] = {}
"""How many instructions of each translated kernel are approximate, by instruction, and exact ("")."""
_APPROXIMATE = re.compile(r"\.approx\b|\.full\b|^(?:mma|wgmma)\b|^multimem\.(?:ld_reduce|red)\b.*f\d|^fma\.r[zmp]\b")
"""Instructions whose rounding is the CPU's, or whose sums have an order of their own."""


def fidelity() -> dict[str, dict[str, Any]]:
    """Returns how many instructions of the kernels that ran from PTX in this process are exact, and which are approximate, by kernel."""
    return {
        kernel_of(kernel): {"exact": counts[""], "approximate": {name: count for name, count in sorted(counts.items()) if name}}
        for kernel, counts in _counted.items()
    }


def translate(ptx: Ptx, *, apart: bool = False) -> str:
    """Returns the module's kernels as C++ for the emulator; ``apart``: under the names that ``Ptx.symbol`` gives. Raises UnknownPtx,
    which quotes the instruction."""
    module = parse(ptx.text)
    if not module.entries:
        raise UnknownPtx("the PTX has no .entry; expected that of one kernel or more")
    used = ptx.text
    called = set(re.findall(r"\bcall(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([$\w]+)", used))
    functions = [function for function in module.functions if function.name in called]
    bodies = [*module.entries, *functions]
    shared = {variable.name for entry in bodies for variable in _variables(entry) if variable.space == "shared"}
    shared |= {variable.name for variable in module.variables if variable.space == "shared"}
    dynamic = {variable.name for variable in module.variables if variable.space == "shared" and variable.length == 0}
    lines = [(_TENSOR_COPIES if ".tensor." in ptx.text else "") + _HEAD]
    # Constants of headers come with every module, though nothing reads them.
    kept = [variable for variable in module.variables if used.count(variable.name) > 1 or variable.space == "shared"]
    lines += [_declared(variable) for variable in kept if variable.name not in dynamic]
    if "%envreg1" in used:  # where a grid's barrier counts, in every rank's memory; all launches are cooperative here
        lines.append("alignas(16) static unsigned char grid_workspace[64] = {64};")
    lines += [f"{_head(function)};" for function in functions]
    others = {variable.name for variable in kept if variable.space != "shared"}
    counts: dict[str, Counter[str]] = {}
    for entry in bodies:
        lines += [_declared(variable) for variable in _variables(entry) if variable.space == "shared"]
        rules = Rules(shared, dynamic, {parameter[2] for parameter in entry.parameters} | others)
        rules.functions, rules.counts = {function.name: function for function in functions}, counts.setdefault(entry.name, Counter())
        if entry in functions:
            lines += _function(entry, rules)
        else:
            lines += _kernel(entry, rules, ptx.symbol(entry.name) if apart else entry.name)
    called_counts = sum((counts[function.name] for function in functions), Counter())
    _counted.update({entry.name: counts[entry.name] + called_counts for entry in module.entries})
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


def _kernel(entry: Function, rules: Rules, symbol: str) -> list[str]:
    structs, arguments = [], []
    for kind, align, name, nbytes in entry.parameters:
        spelt = name_of(name)
        if nbytes:
            structs.append(f"struct alignas({align or 1}) T_{spelt} {{ unsigned char at[{nbytes * TYPES[kind][1]}]; }};")
            arguments.append(f"T_{spelt} {spelt}")
        else:
            arguments.append(f"{_STORED.get(kind) or 'u' + str(8 * TYPES[kind][1])} {spelt}")
    return [*structs, f'extern "C" __global__ void {symbol}({", ".join(arguments)}) {{', *_body(entry, rules), "}"]


def _function(function: Function, rules: Rules) -> list[str]:
    """Returns a function that others call. It takes and returns bytes, as calls in PTX do."""
    lines = [f"{_head(function)} {{"]
    if function.result is not None:
        rules.result = function.result[2]
        rules.parameters.add(rules.result)
        lines.append(f"{_bytes(function.result)} {name_of(rules.result)};")
    rules.is_kernel = False
    return [*lines, *_body(function, rules), "}"]


def _head(function: Function) -> str:
    arguments = ", ".join(f"{_bytes(parameter)} {name_of(parameter[2])}" for parameter in function.parameters)
    result = "void" if function.result is None else _bytes(function.result)
    return f"static __attribute__((noinline)) {result} {name_of(function.name)}({arguments})"


def _bytes(parameter: Parameter) -> str:
    kind, _, name, length = parameter
    if kind not in TYPES:
        raise UnknownPtx(f"a parameter of type .{kind} ({name}) {NOT_KNOWN}")
    return f"Bytes<{TYPES[kind][1] * max(length, 1)}>"


def _body(entry: Function, rules: Rules) -> list[str]:
    lines = ["bool carry = false;"] if any(".cc." in statement.text for statement in entry.statements) else []
    place: Place = ("", 0)
    unknown: dict[str, str] = {}
    for number, statement in enumerate(entry.statements):
        if statement.kind == "line":
            if statement.place != place:
                place = statement.place
                lines.append(f'#line {place[1]} "{place[0]}"')
            continue
        if statement.kind == "instruction":
            made = rules.translated(statement.text)
            name = re.sub(r"^@\S+\s+", "", statement.text).split()[0]
            rules.counts[name if _APPROXIMATE.search(name) else ""] += 1
            if made is None:
                file, _, called_from = place[0].partition(CALLED_FROM)
                where = f" ({file}:{place[1]}{called_from and CALLED_FROM + called_from})" if place[1] else ""
                unknown.setdefault(name, f"{'kernel' if rules.is_kernel else 'function'} {entry.name}: {statement.text!r}{where}")
                continue
        elif statement.kind == "registers":
            made = _registers(statement.text, rules)
        elif statement.kind == "label":
            made = f"{name_of(statement.text)}: ;"
        elif statement.kind == "parameter" and statement.variable is not None:
            variable = statement.variable
            rules.parameters.add(variable.name)
            made = f"{_bytes((variable.type, variable.align, variable.name, variable.length))} {name_of(variable.name)};"
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
    if unknown:
        first, *more = unknown.values()
        others = f", and neither is {', '.join(list(unknown)[1:])}" if more else ""
        raise UnknownPtx(f"{first} {NOT_KNOWN}{others}; nothing was run")
    return lines


def _labels(statements: Sequence[Statement]) -> Iterator[str]:
    """Yields the labels of the scope that begins here."""
    depth = 1
    for statement in statements:
        depth += (statement.kind == "open") - (statement.kind == "close")
        if depth == 0:
            return
        if statement.kind == "label" and depth == 1:
            yield statement.text


def _registers(text: str, rules: Rules) -> str:
    found = _REGISTERS.match(text)
    if found is None or (found[2] not in TYPES and found[2] != "pred"):
        raise UnknownPtx(f"one of the registers {text!r} {NOT_KNOWN}")
    stored = "bool" if found[2] == "pred" else f"u{8 * TYPES[found[2]][1]}"
    names: list[str] = []
    for item in found[3].split(","):
        item = item.strip()
        if found[1]:
            rules.vectors[item] = int(found[1])
            names += map(name_of, rules.elements(item))
        elif many := re.fullmatch(r"(.*)<(\d+)>", item):
            names += [name_of(f"{many[1]}{number}") for number in range(int(many[2]))]
        else:
            names.append(name_of(item))
    return f"{stored} {', '.join(names)};"
