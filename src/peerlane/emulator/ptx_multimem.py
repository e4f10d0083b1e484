"""Rules for PTX instructions on multicast addresses: each takes part in every rank's memory. See ``ptx_rules.py``."""

import re
from dataclasses import dataclass

from peerlane.emulator.ptx_halves import HALVES
from peerlane.emulator.ptx_operands import NUMBERS, TYPES, Modifiers, OperandRules, Operands, name_of, split_operands

_SCOPES = {"cta": "block_scope", "cluster": "gpu_scope", "gpu": "gpu_scope", "sys": "system_scope"}
_JOINS = {"add": "add(a, b)", "min": "least(a, b)", "max": "greatest(a, b)", "and": "a & b", "or": "a | b", "xor": "a ^ b"}
_HALF_JOINS = {"add": "a + b", "min": "std::fmin(a, b)", "max": "std::fmax(a, b)"}
_ORDERS = {"ld_reduce": ("relaxed", "acquire"), "st": ("relaxed", "release"), "red": ("relaxed", "release")}


@dataclass(frozen=True)
class _Multimem:
    order: str
    """empty for an ordinary access"""
    scope: str
    operation: str
    """empty for a store"""
    wide: bool
    """whether halves are added in fp32"""
    count: int
    kind: str


class MultimemRules(OperandRules):
    """Rules for ``multimem``. Returns None for what it does not know."""

    def _multimem(self, modifiers: Modifiers, operands: Operands) -> str | None:
        what, *more = modifiers
        if what not in _ORDERS or len(operands) != 2 or (said := _said(what, more)) is None:
            return None
        cpp, nbytes = TYPES[said.kind]
        place, registers = operands[::-1] if what == "ld_reduce" else operands
        items = split_operands(registers.strip("{} "))
        if len(items) != said.count:
            return None
        begin = f"{{ Parts parts; find_parts(parts, {self.pointer(place, 'global')}, {said.count * nbytes});"
        ordinary = str(not said.order).lower()
        access = f"Access{{{ordinary}, {said.scope or 'system_scope'}, {said.order or 'relaxed'}}}"
        join = f"[]({cpp} a, {cpp} b) {{ return static_cast<{cpp}>({_join(said)}); }}" if said.operation else ""
        if what == "ld_reduce":
            half = HALVES.get(said.kind)
            same = f"[]({cpp} a) {{ return a; }}"
            by = f"widened<{half}, {cpp}>, add_floats, narrowed<{half}, {cpp}>" if said.wide else f"{same}, {join}, {same}"
            # All are read before a register changes: one of them may hold the address.
            reads = [f"const {cpp} read{i} = joined<{cpp}>(parts, {i}, {access}, {by});" for i in range(said.count)]
            made = [*reads, *(f"set({name_of(item)}, read{i});" for i, item in enumerate(items))]
        else:
            values = [self.value(item, said.kind) for item in items]
            call, last = ("store_on_all", "") if what == "st" else ("update_on_all", f", {join}")
            made = [f"{call}<{cpp}>(parts, {i}, {access}, {value}{last});" for i, value in enumerate(values)]
        return f"{begin} {' '.join(made)} }}"


def _said(what: str, modifiers: Modifiers) -> _Multimem | None:
    """Returns what the modifiers say; None where one of them is not known."""
    order, scope, operation, wide, count = "", "", "", False, 1
    *flags, kind = modifiers or [""]
    halves = kind in HALVES
    if kind not in NUMBERS and not halves:
        return None
    for flag in flags:
        if flag in _ORDERS[what]:
            order = flag
        elif flag in _SCOPES:
            scope = _SCOPES[flag]
        elif what != "st" and flag in (_HALF_JOINS if halves else _JOINS) and not operation:
            operation = flag
        elif flag == "acc::f32" and what == "ld_reduce" and halves and operation == "add":
            wide = True
        elif re.fullmatch("v[248]", flag) and (halves or kind == "f32"):
            count = int(flag[1])
        elif flag not in ("global", "weak") or (flag == "weak" and what == "red"):
            return None
    if what == "red":
        order, scope = order or "relaxed", scope or "system_scope"
    if bool(order) != bool(scope) or (what != "st" and not operation) or count * TYPES[kind][1] > 16:
        return None
    if what != "st" and (operation in ("and", "or", "xor")) != (kind[0] == "b" and not halves):
        return None
    if operation != "add" and what != "st" and (kind in ("f32", "f64") or (halves and what == "red")):
        return None
    return _Multimem(order, scope, operation, wide, count, kind)


def _join(said: _Multimem) -> str:
    """Returns the values ``a`` and ``b`` of two ranks as one, in C++."""
    if said.kind in HALVES:
        function = f"[](double a, double b) {{ return {_HALF_JOINS[said.operation]}; }}"
        return f"of_halves<{HALVES[said.kind]}, {TYPES[said.kind][0]}>({function}, a, b)"
    return _JOINS[said.operation]
