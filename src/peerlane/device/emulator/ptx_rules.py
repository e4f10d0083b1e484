"""Rules for PTX instructions: each operation as C++, with the modifiers that it knows. Used by ``ptx_front_end.py``.

A rule returns None for what it does not know. Rounding of approximate functions is the CPU's; everything else is as PTX defines it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

TYPES = {
    **{f"{sign}{8 * size}": (f"{sign}{8 * size}", size) for sign in "us" for size in (1, 2, 4, 8)},
    **{f"b{8 * size}": (f"u{8 * size}", size) for size in (1, 2, 4, 8, 16)},
    "f32": ("f32", 4),
    "f64": ("f64", 8),
    "f16x2": ("u32", 4),
    "bf16x2": ("u32", 4),
    "f16": ("u16", 2),
    "bf16": ("u16", 2),
}
"""PTX type: the C++ type that an instruction reads, and its bytes"""
_NUMBERS = {name for name in TYPES if name not in ("f16x2", "bf16x2", "f16", "bf16", "b128")}
_AXES = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
_SPECIAL = {
    **{f"%{name}.{axis}": f"{cpp}.{axis}" for name, cpp in _AXES.items() for axis in "xyz"},
    "%laneid": "lane()",
    "%warpid": "(first_lane() / 32)",
    "%clock64": "u64(peerlane_time())",
    "%clock": "u32(peerlane_time())",
    "%globaltimer": "u64(peerlane_time())",
    "%lanemask_eq": "(1u << lane())",
    "%lanemask_lt": "((1u << lane()) - 1)",
    "%lanemask_le": "((2u << lane()) - 1)",
    "%lanemask_gt": "(~((2u << lane()) - 1))",
    "%lanemask_ge": "(~((1u << lane()) - 1))",
    "%cluster_ctarank": "peerlane_cluster_rank()",
}
_SCOPES = {"cta": "block_scope", "gpu": "gpu_scope", "sys": "system_scope"}
_ORDERS = {"relaxed": "relaxed", "acquire": "acquire", "release": "release", "acq_rel": "acquire_release"}
_SPACES = {"global", "shared", "local", "const", "param", "shared::cta"}
_HINTS = re.compile(r"nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+|level::\w+|unified")
_ROUNDING = {"rn": 0, "rz": 2, "rm": -1, "rp": 1, "rni": 0, "rzi": 2, "rmi": -1, "rpi": 1}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_NO_EFFECT = ("prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol", "setmaxnreg", "createpolicy")
_FUNCTIONS = {
    "sqrt": "std::sqrt({a})",
    "rsqrt": "(1 / std::sqrt({a}))",
    "rcp": "(1 / {a})",
    "ex2": "std::exp2({a})",
    "lg2": "std::log2({a})",
    "sin": "std::sin({a})",
    "cos": "std::cos({a})",
    "tanh": "std::tanh({a})",
}

Modifiers = list[str]
Operands = list[str]


def name_of(name: str) -> str:
    """Returns a name of PTX as one of C++."""
    if name == "_":
        return "Sink{}"
    spelt = re.sub(r"\W", "_", name)
    return f"R{spelt}" if name.startswith("%") else f"V_{spelt}"


def _split(text: str) -> Operands:
    """Splits operands at the commas outside of brackets."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "[{(") - (char in "]})")
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [*parts, part.strip()] if part.strip() else parts


class Rules:
    """The rules for one kernel, whose variables in shared memory and parameters are named."""

    def __init__(self, shared: set[str], dynamic: set[str], parameters: set[str]) -> None:
        self._shared, self._dynamic, self._parameters = shared, dynamic, parameters

    def translated(self, text: str) -> str | None:
        """Returns the instruction in C++; None if it is not known."""
        found = re.match(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        if found is None:
            return None
        operation, *modifiers = [part for part in re.split(r"\.", found[3]) if part]
        operands = _split(found[4])
        rule: Callable[[Modifiers, Operands], str | None] | None = getattr(self, f"_{operation}", None)
        if operation in _NO_EFFECT:
            made: str | None = ";"
        elif operation in _FUNCTIONS:
            made = self._function(operation, modifiers, operands)
        else:
            made = rule(modifiers, operands) if rule is not None else None
        if made is None or found[2] is None:
            return made
        return f"if ({found[1]}{name_of(found[2])}) {{ {made} }}"

    # ---- operands

    def value(self, operand: str, kind: str) -> str:
        """Returns an operand as a value of the PTX type ``kind``."""
        cpp = "bool" if kind == "pred" else TYPES[kind][0]
        if operand in _SPECIAL:
            return f"as<{cpp}>({_SPECIAL[operand]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
            return f"as<{cpp}>(0x{operand[2:]}u)"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", operand):
            return f"as<{cpp}>(0x{operand[2:]}ull)"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            if kind == "pred":
                return str(bool(number)).lower()
            return f"static_cast<{cpp}>({number % (1 << 64)}ull)"
        if operand.startswith("!"):
            return f"!{name_of(operand[1:])}"
        if operand.startswith("%") or not self._is_symbol(operand):
            return name_of(operand) if kind == "pred" else f"as<{cpp}>({name_of(operand)})"
        return f"as<{cpp}>({self.address_of(operand)})"

    def _is_symbol(self, operand: str) -> bool:
        """Registers of inline assembly have names without a sign; those of variables are not declared as registers."""
        return operand.partition("+")[0] in self._shared | self._dynamic | self._parameters or operand.startswith(("_Z", "__"))

    def address_of(self, symbol: str) -> str:
        """Returns the address of a variable, in the window of its space."""
        name, _, offset = symbol.partition("+")
        plus = f" + {offset}" if offset else ""
        if name in self._dynamic:
            return f"(u64(peerlane_shared_address(peerlane_dynamic_shared())){plus})"
        if name in self._shared:
            return f"(u64(peerlane_shared_address(&{name_of(name)})){plus})"
        return f"(reinterpret_cast<u64>(&{name_of(name)}){plus})"

    def pointer(self, operand: str, space: str) -> str:
        """Returns the place that ``[...]`` names, as a char*."""
        inside = operand.strip("[] ")
        base, sign, offset = inside.partition("+")
        if not sign:
            base, sign, offset = (inside[:1] + inside[1:].partition("-")[0], *inside[1:].partition("-")[1:])
        base = base.strip()
        plus = f" {sign} {offset.strip()}" if sign else ""
        if base.startswith("%") or not self._is_symbol(base):
            address = f"({name_of(base) if not base.isdecimal() else base}{plus})"
        else:
            address = f"({self.address_of(base)}{plus})"
        return f"shared({address})" if space.startswith("shared") else f"generic({address})"

    # ---- data

    def _mov(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if len(modifiers) != 1 or (modifiers[0] not in TYPES and modifiers[0] != "pred"):
            return None
        (kind,), (target, source) = modifiers, operands
        if source.startswith("{"):
            parts = _split(source.strip("{}"))
            whole, size = TYPES[kind][0], 8 * TYPES[kind][1] // len(parts)
            joined = " | ".join(f"{whole}(as<u{size}>({self._part(part, size)})) << {i * size}" for i, part in enumerate(parts))
            return f"set({name_of(target)}, {whole}({joined}));"
        if target.startswith("{"):
            parts = _split(target.strip("{}"))
            size = 8 * TYPES[kind][1] // len(parts)
            takes = " ".join(f"set({name_of(part)}, as<u{size}>(whole >> {i * size}));" for i, part in enumerate(parts))
            return f"{{ const auto whole = {self.value(source, kind)}; {takes} }}"
        return f"set({name_of(target)}, {self.value(source, kind)});"

    def _part(self, operand: str, bits: int) -> str:
        return self.value(operand, f"b{bits}")

    def _cvta(self, modifiers: Modifiers, operands: Operands) -> str | None:
        to = "to" in modifiers
        space = next((item for item in modifiers if item in _SPACES), "")
        if modifiers[-1] not in ("u64", "u32"):
            return None
        value = self.value(operands[1], "u64")
        if space.startswith("shared"):
            value = f"u64(peerlane_shared_address(generic({value})))" if to else f"reinterpret_cast<u64>(shared(u32({value})))"
        return f"set({name_of(operands[0])}, {value});"

    def _cvt(self, modifiers: Modifiers, operands: Operands) -> str | None:
        flags, (to, source) = modifiers[:-2], modifiers[-2:]
        how = next((_ROUNDING[item] for item in flags if item in _ROUNDING), 0)
        if any(item not in _ROUNDING and item not in ("ftz", "sat", "satfinite", "relu") for item in flags) or "relu" in flags:
            return None
        if to in ("bf16x2", "f16x2") and source == "f32" and how == 0 and len(operands) == 3:
            narrow = "narrow_bf16" if to == "bf16x2" else "narrow_f16"
            high, low = (f"{narrow}({self.value(item, 'f32')})" for item in operands[1:])
            return f"set({name_of(operands[0])}, u32({low}) | u32({high}) << 16);"
        if len(operands) != 2:
            return None
        target = name_of(operands[0])
        if source in ("f16", "bf16") and to in ("f32", "f64"):
            widen = "widen_f16" if source == "f16" else "widen_bf16"
            return f"set({target}, {TYPES[to][0]}({widen}({self.value(operands[1], 'b16')})));"
        if to in ("f16", "bf16") and source == "f32" and how == 0:
            narrow = "narrow_f16" if to == "f16" else "narrow_bf16"
            return f"set({target}, u16({narrow}({self.value(operands[1], 'f32')})));"
        if to not in _NUMBERS or source not in _NUMBERS or "satfinite" in flags:
            return None
        value, cpp = self.value(operands[1], source), TYPES[to][0]
        floats = (to[0] == "f", source[0] == "f")
        if floats == (True, True):
            if any(item in ("rni", "rzi", "rmi", "rpi") for item in flags):
                function = {0: "std::nearbyint", 2: "std::trunc", -1: "std::floor", 1: "std::ceil"}[how]
                value = f"{cpp}({function}({value}))"
            elif to == "f32" and source == "f64":
                value = f"rounded({value}, {how})"
            else:
                value = f"{cpp}({value})"
            if "sat" in flags:
                value = f"{cpp}(saturated(float({value})))"
        elif floats == (False, True):
            value = f"to_integer<{cpp}>({value}, {how})"
        elif floats == (True, False):
            if how:
                return None
            value = f"{cpp}({value})"
        elif "sat" in flags:
            return None
        else:
            value = f"{cpp}({value})"
        return f"set({target}, {value});"

    def _selp(self, modifiers: Modifiers, operands: Operands) -> str | None:
        (kind,) = modifiers
        target, first, second, which = operands
        return f"set({name_of(target)}, {self.value(which, 'pred')} ? {self.value(first, kind)} : {self.value(second, kind)});"

    def _setp(self, modifiers: Modifiers, operands: Operands) -> str | None:
        comparison, *more, kind = [item for item in modifiers if item != "ftz"]
        if kind not in _NUMBERS or (more and more != ["and"] and more != ["or"] and more != ["xor"]):
            return None
        target, first, second, *other = operands
        a, b = self.value(first, kind), self.value(second, kind)
        if comparison in ("num", "nan"):
            said = f"({a} != {a} || {b} != {b})"
            said = said if comparison == "nan" else f"!{said}"
        elif kind[0] == "f" and comparison.endswith("u") and comparison[:-1] in _COMPARISONS:
            said = f"(!({a} == {a} && {b} == {b}) || {a} {_COMPARISONS[comparison[:-1]]} {b})"
        elif comparison == "ne" and kind[0] == "f":
            said = f"({a} < {b} || {a} > {b})"
        elif comparison in _COMPARISONS:
            said = f"({a} {_COMPARISONS[comparison]} {b})"
        else:
            return None
        targets = target.split("|")
        results = [said, f"!{said}"]
        if more:
            sign = {"and": "&&", "or": "||", "xor": "!="}[more[0]]
            results = [f"({result} {sign} {self.value(other[0], 'pred')})" for result in results]
        taken = [f"const bool result{i} = {results[i]};" for i in range(len(targets))]
        return "{ " + " ".join(taken + [f"set({name_of(item)}, result{i});" for i, item in enumerate(targets)]) + " }"

    # ---- arithmetic

    def _two(self, function: str, modifiers: Modifiers, operands: Operands, allowed: Sequence[str]) -> str | None:
        *flags, kind = modifiers
        if kind not in _NUMBERS or any(flag not in allowed for flag in flags):
            return None
        value = f"{function}({self.value(operands[1], kind)}, {self.value(operands[2], kind)})"
        if "ftz" in flags and kind == "f32":
            value = f"flushed({value})"
        if "sat" in flags:
            value = f"saturated({value})" if kind == "f32" else ""
        return f"set({name_of(operands[0])}, {value});" if value else None

    def _add(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("add", modifiers, operands, ("rn", "ftz", "sat"))

    def _sub(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("sub", modifiers, operands, ("rn", "ftz", "sat"))

    def _mul(self, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if "hi" in flags:
            return self._two("high", [kind], operands, ())
        if "wide" in flags:
            wide = TYPES[f"{kind[0]}{16 * TYPES[kind][1]}"][0]
            return (
                f"set({name_of(operands[0])}, {wide}({wide}({self.value(operands[1], kind)}) * {wide}({self.value(operands[2], kind)})));"
            )
        return self._two("mul", modifiers, operands, ("lo", "rn", "ftz", "sat"))

    def _mad(self, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if kind[0] == "f":
            return self._fma(modifiers, operands)
        if "wide" in flags:
            wide = f"{kind[0]}{16 * TYPES[kind][1]}"
            product = f"{TYPES[wide][0]}({self.value(operands[1], kind)}) * {TYPES[wide][0]}({self.value(operands[2], kind)})"
            return f"set({name_of(operands[0])}, add<{TYPES[wide][0]}>({product}, {self.value(operands[3], wide)}));"
        if any(flag not in ("lo", "hi") for flag in flags):
            return None
        product = f"{'high' if 'hi' in flags else 'mul'}({self.value(operands[1], kind)}, {self.value(operands[2], kind)})"
        return f"set({name_of(operands[0])}, add({product}, {self.value(operands[3], kind)}));"

    def _fma(self, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if kind not in ("f32", "f64") or any(flag not in (*_ROUNDING, "ftz", "sat") for flag in flags):
            return None
        how = next((_ROUNDING[flag] for flag in flags if flag in _ROUNDING), 0)
        a, b, c = (self.value(item, kind) for item in operands[1:])
        if how and kind == "f64":
            return None
        value = f"rounded(double({a}) * double({b}) + double({c}), {how})" if how else f"std::fma({a}, {b}, {c})"
        if "ftz" in flags:
            value = f"flushed({value})"
        if "sat" in flags:
            value = f"saturated({value})"
        return f"set({name_of(operands[0])}, {value});"

    def _div(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("div", modifiers, operands, ("rn", "approx", "full", "ftz"))

    def _rem(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("rem", modifiers, operands, ())

    def _min(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("least", modifiers, operands, ("ftz",)) if len(operands) == 3 else None

    def _max(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._two("greatest", modifiers, operands, ("ftz",)) if len(operands) == 3 else None

    def _logic(self, sign: str, modifiers: Modifiers, operands: Operands) -> str | None:
        (kind,) = modifiers
        if kind == "pred":
            return f"set({name_of(operands[0])}, bool({self.value(operands[1], kind)} {sign} {self.value(operands[2], kind)}));"
        cpp = TYPES[kind][0]
        return f"set({name_of(operands[0])}, {cpp}({self.value(operands[1], kind)} {sign} {self.value(operands[2], kind)}));"

    def _and(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._logic("&", modifiers, operands)

    def _or(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._logic("|", modifiers, operands)

    def _xor(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._logic("^", modifiers, operands)

    def _one(self, expression: str, modifiers: Modifiers, operands: Operands, result: str = "") -> str | None:
        *flags, kind = modifiers
        if (kind not in _NUMBERS and kind != "pred") or any(flag != "ftz" for flag in flags):
            return None
        cpp = result or ("bool" if kind == "pred" else TYPES[kind][0])
        return f"{{ const auto a = {self.value(operands[1], kind)}; set({name_of(operands[0])}, {cpp}({expression})); }}"

    def _not(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("!a" if modifiers == ["pred"] else "~a", modifiers, operands)

    def _cnot(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("a == 0", modifiers, operands)

    def _neg(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("-a" if modifiers[-1][0] == "f" else "sub<decltype(+a)>(0, a)", modifiers, operands)

    def _abs(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("std::fabs(a)" if modifiers[-1][0] == "f" else "a < 0 ? sub<decltype(+a)>(0, a) : a", modifiers, operands)

    def _popc(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("__builtin_popcountll(a)", modifiers, operands, "u32")

    def _clz(self, modifiers: Modifiers, operands: Operands) -> str | None:
        width = 8 * TYPES[modifiers[0]][1]
        return self._one(f"a ? __builtin_clzll(a) - {64 - width} : {width}", modifiers, operands, "u32")

    def _brev(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("reversed(a)", modifiers, operands)

    def _shl(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"set({name_of(operands[0])}, shift_left({self.value(operands[1], modifiers[0])}, {self.value(operands[2], 'u32')}));"

    def _shr(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"set({name_of(operands[0])}, shift_right({self.value(operands[1], modifiers[0])}, {self.value(operands[2], 'u32')}));"

    def _shf(self, modifiers: Modifiers, operands: Operands) -> str | None:
        direction, mode, kind = modifiers
        low, high, by = (self.value(item, "u32") for item in operands[1:])
        count = f"({by} & 31)" if mode == "wrap" else f"({by} < 32 ? {by} : 32)"
        if kind != "b32":
            return None
        both = f"(u64({high}) << 32 | {low})"
        value = f"u32({both} >> {count})" if direction == "r" else f"u32({both} << {count} >> 32)"
        return f"set({name_of(operands[0])}, {value});"

    def _bfe(self, modifiers: Modifiers, operands: Operands) -> str | None:
        at, bits = (self.value(item, "u32") for item in operands[2:])
        return f"set({name_of(operands[0])}, field({self.value(operands[1], modifiers[0])}, {at}, {bits}));"

    def _bfi(self, modifiers: Modifiers, operands: Operands) -> str | None:
        a, b = (self.value(item, modifiers[0]) for item in operands[1:3])
        at, bits = (self.value(item, "u32") for item in operands[3:])
        return f"set({name_of(operands[0])}, inserted({a}, {b}, {at}, {bits}));"

    def _prmt(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers != ["b32"]:
            return None
        return f"set({name_of(operands[0])}, permuted({', '.join(self.value(item, 'b32') for item in operands[1:])}));"

    def _lop3(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers != ["b32"]:
            return None
        return f"set({name_of(operands[0])}, looked_up({', '.join(self.value(item, 'b32') for item in operands[1:])}));"

    def _copysign(self, modifiers: Modifiers, operands: Operands) -> str | None:
        sign, size = (self.value(item, modifiers[0]) for item in operands[1:])
        return f"set({name_of(operands[0])}, std::copysign({size}, {sign}));"

    def _function(self, operation: str, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if kind not in ("f32", "f64") or any(flag not in ("approx", "rn", "ftz") for flag in flags):
            return None
        value = _FUNCTIONS[operation].format(a=self.value(operands[1], kind))
        return f"set({name_of(operands[0])}, {f'flushed({value})' if 'ftz' in flags and kind == 'f32' else value});"

    # ---- memory

    def _access(self, modifiers: Modifiers) -> tuple[str, str, str, str, int, str] | None:
        """Returns space, order ("" for an ordinary access), scope, type, elements of a vector, and "volatile" if it is."""
        *flags, kind = modifiers
        if kind not in TYPES:
            return None
        space, order, scope, count, volatile = "", "", "", 1, ""
        for flag in flags:
            if flag in _SPACES:
                space = flag
            elif flag in _ORDERS:
                order = _ORDERS[flag]
            elif flag in _SCOPES:
                scope = _SCOPES[flag]
            elif flag in ("v2", "v4"):
                count = int(flag[1])
            elif flag == "volatile":
                order, scope, volatile = "relaxed", "system_scope", flag
            elif flag not in ("weak",) and not _HINTS.fullmatch(flag):
                return None
        return space, order, scope or "gpu_scope", kind, count, volatile

    def _ld(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if (access := self._access(modifiers)) is None or len(operands) != 2:
            return None
        space, order, scope, kind, count, _ = access
        cpp = TYPES[kind][0]
        place = self.pointer(operands[1], space)
        targets = [name_of(item) for item in _split(operands[0].strip("{}"))]
        whole = cpp if count == 1 else f"Vector<{cpp}, {count}>"
        typed = f"reinterpret_cast<const {whole}*>({place})"
        if space == "param":
            value = f"[&] {{ {whole} read; __builtin_memcpy(&read, {place}, sizeof read); return read; }}()"
        else:
            value = f"load({typed}, {scope}, {order})" if order else f"*{typed}"
        if count == 1:
            return f"set({targets[0]}, {value});"
        return f"{{ const {whole} read = {value}; {' '.join(f'set({item}, read.at[{i}]);' for i, item in enumerate(targets))} }}"

    _ldu = _ld

    def _st(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if (access := self._access(modifiers)) is None or len(operands) != 2:
            return None
        space, order, scope, kind, count, _ = access
        cpp = TYPES[kind][0]
        place = self.pointer(operands[0], space)
        values = [self.value(item, kind) for item in _split(operands[1].strip("{}"))]
        whole = cpp if count == 1 else f"Vector<{cpp}, {count}>"
        value = values[0] if count == 1 else f"{whole}{{{{{', '.join(values)}}}}}"
        typed = f"reinterpret_cast<{whole}*>({place})"
        if space == "param":
            return None
        return f"store({typed}, {whole}({value}), {scope}, {order});" if order else f"*{typed} = {value};"

    def _atom(self, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, operation, kind = modifiers
        if (access := self._access([*flags, kind])) is None or access[4] != 1 or kind not in _NUMBERS:
            return None
        space, order, scope, _, _, _ = access
        cpp = TYPES[kind][0]
        place = f"reinterpret_cast<{cpp}*>({self.pointer(operands[1], space)})"
        values = [self.value(item, kind) for item in operands[2:]]
        if operation == "cas":
            return f"set({name_of(operands[0])}, compare_exchange({place}, {values[0]}, {values[1]}, {scope}, {order or 'relaxed'}));"
        after = {
            "add": "add(old, by)",
            "min": "least(old, by)",
            "max": "greatest(old, by)",
            "and": "old & by",
            "or": "old | by",
            "xor": "old ^ by",
            "exch": "by",
            "inc": "old >= by ? 0 : old + 1",
            "dec": "old == 0 || old > by ? by : old - 1",
        }.get(operation)
        if after is None or (kind[0] == "f" and operation not in ("add", "exch")):
            return None
        change = f"[by](const {cpp} old) {{ return static_cast<{cpp}>({after}); }}"
        updated = f"update({place}, {scope}, {change}, {order or 'relaxed'})"
        return f"{{ const {cpp} by = {values[0]}; set({name_of(operands[0])}, {updated}); }}"

    def _red(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._atom(modifiers, ["_", *operands])

    def _fence(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers[0] == "proxy":
            if modifiers[1:] == ["async"]:
                return "peerlane_proxy_fence(all_proxies);"
            return "peerlane_proxy_fence(shared_proxy);" if modifiers[1:] == ["async", "shared::cta"] else None
        if modifiers == ["mbarrier_init", "release", "cluster"]:
            return "peerlane_mbarrier_init_fence();"
        order, scope = modifiers if len(modifiers) == 2 else ("", "")
        if order not in ("acq_rel", "sc", "acquire", "release") or scope not in _SCOPES:
            return None
        return f"peerlane_fence({_SCOPES[scope]});" if order in ("acq_rel", "sc") else None

    def _membar(self, modifiers: Modifiers, operands: Operands) -> str | None:
        scope = {"cta": "block_scope", "gl": "gpu_scope", "sys": "system_scope"}.get(modifiers[0])
        return f"peerlane_fence({scope});" if scope and len(modifiers) == 1 else None

    # ---- threads

    def _bar(self, modifiers: Modifiers, operands: Operands) -> str | None:
        kind = [item for item in modifiers if item not in ("cta", "aligned")]
        if kind == ["warp", "sync"]:
            return f"peerlane_warp_barrier({self.value(operands[0], 'u32')});"
        if kind not in (["sync"], ["arrive"]):
            return None
        threads = self.value(operands[1], "u32") if len(operands) > 1 else "0"
        return f"peerlane_barrier({self.value(operands[0], 'u32')}, {threads}, {'true' if kind == ['sync'] else 'false'});"

    def _barrier(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return None if "cluster" in modifiers else self._bar(modifiers, operands)

    def _shfl(self, modifiers: Modifiers, operands: Operands) -> str | None:
        sync, how, kind = modifiers
        if sync != "sync" or kind != "b32" or how not in ("up", "down", "bfly", "idx"):
            return None
        target, _, inside = operands[0].partition("|")
        arguments = ", ".join(self.value(item, "u32") for item in operands[1:])
        taken = f"set({name_of(inside)}, inside); " if inside else ""
        call = f"shuffled<Shuffle::{how}>({arguments}, inside)"
        return f"{{ bool inside = false; const u32 got = {call}; set({name_of(target)}, got); {taken}}}"

    def _vote(self, modifiers: Modifiers, operands: Operands) -> str | None:
        sync, how, kind = modifiers
        said = {"any": "votes != 0", "all": "votes == voters", "uni": "votes == 0 || votes == voters", "ballot": "votes"}.get(how)
        if sync != "sync" or said is None or kind != ("b32" if how == "ballot" else "pred"):
            return None
        call = f"ballot({self.value(operands[2], 'u32')}, {self.value(operands[1], 'pred')}, voters)"
        return f"{{ u32 voters = 0; const u32 votes = {call}; set({name_of(operands[0])}, {said}); }}"

    def _redux(self, modifiers: Modifiers, operands: Operands) -> str | None:
        sync, how, kind = modifiers
        joined = {"add": "a + b", "min": "least(a, b)", "max": "greatest(a, b)", "and": "a & b", "or": "a | b", "xor": "a ^ b"}.get(how)
        if sync != "sync" or joined is None or TYPES[kind][1] != 4:
            return None
        cpp = TYPES[kind][0]
        call = (
            f"fold({self.value(operands[2], 'u32')}, {self.value(operands[1], kind)}, []({cpp} a, {cpp} b) {{ return {cpp}({joined}); }})"
        )
        return f"set({name_of(operands[0])}, {call});"

    def _activemask(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"set({name_of(operands[0])}, peerlane_active_mask());"

    def _elect(self, modifiers: Modifiers, operands: Operands) -> str | None:
        target, _, elected = operands[0].partition("|")
        first = f"u32(__builtin_ctz({self.value(operands[1], 'u32')}))"
        return f"{{ set({name_of(target)}, {first}); set({name_of(elected)}, lane() == {first}); }}"

    # ---- control

    def _bra(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"goto {name_of(operands[0])};" if modifiers in ([], ["uni"]) else None

    def _ret(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "return;"

    def _exit(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "return;"

    def _trap(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "peerlane_trap();"

    def _nanosleep(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "peerlane_pause();"

    # ---- asynchronous copies of plain bytes

    def _mbarrier(self, modifiers: Modifiers, operands: Operands) -> str | None:
        operation, *more = modifiers
        if not more or more[-1] != "b64":
            return None
        flags = more[:-1]
        if operation == "init":
            return f"peerlane_mbarrier_init({self._mbarrier_at(operands[0])}, {self.value(operands[1], 'u32')});"
        if operation == "arrive" and flags in (["shared::cta"], ["expect_tx", "shared::cta"]):
            nbytes = self.value(operands[2], "u32") if "expect_tx" in flags else "0"
            return f"peerlane_mbarrier_arrive({self._mbarrier_at(operands[1])}, {nbytes});" if operands[0] == "_" else None
        if operation == "try_wait" and flags == ["parity", "shared::cta"]:
            call = f"peerlane_mbarrier_try_wait({self._mbarrier_at(operands[1])}, {self.value(operands[2], 'u32')})"
            return f"set({name_of(operands[0])}, {call});"
        return None

    def _mbarrier_at(self, operand: str) -> str:
        return f"reinterpret_cast<unsigned long long*>({self.pointer(operand, 'shared')})"

    def _cp(self, modifiers: Modifiers, operands: Operands) -> str | None:
        said = ".".join(modifiers)
        if said == "async.bulk.commit_group":
            return "peerlane_async_commit(bulk_queue);"
        if said in ("async.bulk.wait_group", "async.bulk.wait_group.read"):
            return f"peerlane_async_wait(bulk_queue, {operands[0]}, {'true' if said.endswith('read') else 'false'});"
        if said in (
            "async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
            "async.bulk.shared::cta.global.mbarrier::complete_tx::bytes",
        ):
            target, source, nbytes, barrier = operands
            at = self._mbarrier_at(barrier)
            segment = f"{{{self.pointer(target, 'shared')}, {self.pointer(source, 'global')}, {self.value(nbytes, 'u32')}}}"
            return f"{{ const Segment whole{segment}; peerlane_async(&whole, 1, Combine::replace, {at}, bulk_queue); }}"
        if said == "async.bulk.global.shared::cta.bulk_group":
            target, source, nbytes = operands
            segment = f"{{{self.pointer(target, 'global')}, {self.pointer(source, 'shared')}, {self.value(nbytes, 'u32')}}}"
            return f"{{ const Segment whole{segment}; peerlane_async(&whole, 1, Combine::replace, nullptr, bulk_queue); }}"
        return None
