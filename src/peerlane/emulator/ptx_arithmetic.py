"""Rules for PTX instructions that compute: moves, conversions, comparisons, arithmetic. See ``ptx_rules.py``."""

from collections.abc import Sequence
from functools import partialmethod

from peerlane.emulator.ptx_halves import HALVES, HalfRules
from peerlane.emulator.ptx_operands import NUMBERS, SPACES, TYPES, Modifiers, Operands, name_of, split_operands

ROUNDING = {"rn": 0, "rz": 2, "rm": -1, "rp": 1, "rni": 0, "rzi": 2, "rmi": -1, "rpi": 1}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_WHOLE = ("rni", "rzi", "rmi", "rpi")
_WHOLE_BY = {0: "std::nearbyint", 2: "std::trunc", -1: "std::floor", 1: "std::ceil"}
FUNCTIONS = {
    "sqrt": "std::sqrt({a})",
    "rsqrt": "(1 / std::sqrt({a}))",
    "rcp": "(1 / {a})",
    "ex2": "std::exp2({a})",
    "lg2": "std::log2({a})",
    "sin": "std::sin({a})",
    "cos": "std::cos({a})",
    "tanh": "std::tanh({a})",
}


def _compared(comparison: str, a: str, b: str, floats: bool) -> str | None:
    """Returns a comparison of two values in C++; None if it is not known."""
    if comparison in ("num", "nan"):
        said = f"({a} != {a} || {b} != {b})"
        return said if comparison == "nan" else f"!{said}"
    if floats and comparison.endswith("u") and comparison[:-1] in _COMPARISONS:
        return f"(!({a} == {a} && {b} == {b}) || {a} {_COMPARISONS[comparison[:-1]]} {b})"
    if floats and comparison == "ne":
        return f"({a} < {b} || {a} > {b})"
    return f"({a} {_COMPARISONS[comparison]} {b})" if comparison in _COMPARISONS else None


class ArithmeticRules(HalfRules):
    """Rules for instructions that touch registers alone. Each returns None for what it does not know."""

    # ---- data

    def _mov(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if len(modifiers) == 2 and modifiers[0] in ("v2", "v4") and modifiers[1] in TYPES:
            targets, sources = self.elements(operands[0]), self.elements(operands[1])
            if len(sources) == 1 and sources[0].isdecimal():  # a number is that of every element
                sources *= len(targets)
            pairs = list(zip(targets, sources, strict=True))
            taken = " ".join(f"const auto part{i} = {self.value(source, modifiers[1])};" for i, (_, source) in enumerate(pairs))
            return f"{{ {taken} {' '.join(f'set({name_of(target)}, part{i});' for i, (target, _) in enumerate(pairs))} }}"
        if len(modifiers) != 1 or (modifiers[0] not in TYPES and modifiers[0] != "pred"):
            return None
        (kind,), (target, source) = modifiers, operands
        if source.startswith("{"):
            parts = split_operands(source.strip("{}"))
            whole, size = TYPES[kind][0], 8 * TYPES[kind][1] // len(parts)
            joined = " | ".join(f"{whole}(as<u{size}>({self._part(part, size)})) << {i * size}" for i, part in enumerate(parts))
            return f"set({name_of(target)}, {whole}({joined}));"
        if target.startswith("{"):
            parts = split_operands(target.strip("{}"))
            size = 8 * TYPES[kind][1] // len(parts)
            takes = " ".join(f"set({name_of(part)}, as<u{size}>(whole >> {i * size}));" for i, part in enumerate(parts))
            return f"{{ const auto whole = {self.value(source, kind)}; {takes} }}"
        return f"set({name_of(target)}, {self.value(source, kind)});"

    def _part(self, operand: str, bits: int) -> str:
        return self.value(operand, f"b{bits}")

    def _cvta(self, modifiers: Modifiers, operands: Operands) -> str | None:
        to = "to" in modifiers
        space = next((item for item in modifiers if item in SPACES), "")
        if modifiers[-1] not in ("u64", "u32"):
            return None
        value = self.value(operands[1], "u64")
        if space.startswith("shared"):
            value = f"u64(peerlane_shared_address(generic({value})))" if to else f"reinterpret_cast<u64>(shared(u32({value})))"
        return f"set({name_of(operands[0])}, {value});"

    def _cvt(self, modifiers: Modifiers, operands: Operands) -> str | None:
        flags, (to, source) = modifiers[:-2], modifiers[-2:]
        how = next((ROUNDING[item] for item in flags if item in ROUNDING), 0)
        if any(item not in ROUNDING and item not in ("ftz", "sat", "satfinite", "relu") for item in flags) or "relu" in flags:
            return None
        if to in ("bf16x2", "f16x2") and source == "f32" and how == 0 and len(operands) == 3:
            narrow = "narrow_bf16" if to == "bf16x2" else "narrow_f16"
            high, low = (f"{narrow}({self.value(item, 'f32')})" for item in operands[1:])
            return f"set({name_of(operands[0])}, u32({low}) | u32({high}) << 16);"
        if to in ("e4m3x2", "e5m2x2") and source == "f32" and "satfinite" in flags and len(operands) == 3:
            high, low = (f"narrow_{to}({self.value(item, 'f32')})" for item in operands[1:])
            return f"set({name_of(operands[0])}, u16({low} | {high} << 8));"
        if len(operands) != 2:
            return None
        target = name_of(operands[0])
        if source in ("e4m3x2", "e5m2x2") and to == "f16x2" and how == 0:
            return f"set({target}, widened_{source}({self.value(operands[1], 'b16')}));"
        if source in ("f16", "bf16") and to in ("f32", "f64"):
            widen = "widen_f16" if source == "f16" else "widen_bf16"
            return f"set({target}, {TYPES[to][0]}({widen}({self.value(operands[1], 'b16')})));"
        if to in ("e4m3x2", "e5m2x2") and source == "f16x2" and flags == ["rn", "satfinite"]:
            both = self.value(operands[1], "b32")
            low, high = (f"narrow_{to}(widen_f16(u16({both} >> {shift})))" for shift in (0, 16))
            return f"set({target}, u16({low} | {high} << 8));"
        if to in ("f16", "bf16") and source == "f32" and how == 0:
            narrow = "narrow_f16" if to == "f16" else "narrow_bf16"
            return f"set({target}, u16({narrow}({self.value(operands[1], 'f32')})));"
        if to in ("f16", "bf16") and (source in NUMBERS or source in HALVES) and not {"sat", "satfinite"} & set(flags):
            value = self.widened(operands[1], source) if source in HALVES else f"to_odd({self.value(operands[1], source)})"
            if any(item in _WHOLE for item in flags):
                value, how = f"{_WHOLE_BY[how]}({value})", 0
            return f"set({target}, narrowed<{HALVES[to]}>(double({value}), {how}));"
        if source in ("f16", "bf16") and to in NUMBERS and to[0] != "f" and any(item in ROUNDING for item in flags):
            return f"set({target}, to_integer<{TYPES[to][0]}>({self.widened(operands[1], source)}, {how}));"
        if to not in NUMBERS or source not in NUMBERS or "satfinite" in flags:
            return None
        value, cpp = self.value(operands[1], source), TYPES[to][0]
        floats = (to[0] == "f", source[0] == "f")
        if floats == (True, True):
            if any(item in _WHOLE for item in flags):
                value = f"{cpp}({_WHOLE_BY[how]}({value}))"
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
        half = kind in ("f16", "bf16")
        if (kind not in NUMBERS and not half) or (more and more != ["and"] and more != ["or"] and more != ["xor"]):
            return None
        target, first, second, *other = operands
        a, b = (self.widened(item, kind) if half else self.value(item, kind) for item in (first, second))
        said = _compared(comparison, a, b, half or kind[0] == "f")
        if said is None:
            return None
        targets = target.split("|")
        results = [said, f"!{said}"]
        if more:
            sign = {"and": "&&", "or": "||", "xor": "!="}[more[0]]
            results = [f"({result} {sign} {self.value(other[0], 'pred')})" for result in results]
        taken = [f"const bool result{i} = {results[i]};" for i in range(len(targets))]
        return "{ " + " ".join(taken + [f"set({name_of(item)}, result{i});" for i, item in enumerate(targets)]) + " }"

    def _set(self, modifiers: Modifiers, operands: Operands) -> str | None:
        comparison, *more = [item for item in modifiers if item != "ftz"]
        if len(more) != 2 or len(operands) != 3:
            return None
        to, kind = more
        yes = {
            "u32": "~0u",
            "s32": "~0u",
            "f32": "0x3f800000u",
            **dict.fromkeys(("f16", "f16x2"), "0x3c00u"),
            "bf16": "0x3f80u",
            "bf16x2": "0x3f80u",
        }
        said = _compared(comparison, "a", "b", kind in HALVES or kind[0] == "f")
        if said is None or to not in yes or (to in HALVES and to != kind) or (kind not in NUMBERS and kind not in HALVES):
            return None
        if to in HALVES or kind.endswith("x2"):
            cpp = TYPES[kind][0]
            a, b = (self.value(item, f"b{8 * TYPES[kind][1]}") for item in operands[1:])
            call = f"compared<{HALVES[kind]}, {cpp}>([](float a, float b) {{ return {said}; }}, {a}, {b}, {yes[to]})"
            return f"set({name_of(operands[0])}, {call});"
        a, b = (self.widened(item, kind) if kind in HALVES else self.value(item, kind) for item in operands[1:])
        return f"{{ const auto a = {a}; const auto b = {b}; set({name_of(operands[0])}, u32({said} ? {yes[to]} : 0)); }}"

    # ---- arithmetic

    def _two(self, function: str, modifiers: Modifiers, operands: Operands, allowed: Sequence[str]) -> str | None:
        *flags, kind = modifiers
        how = next((ROUNDING[flag] for flag in flags if flag in ROUNDING), 0)
        if kind in ("u16x2", "s16x2") and not flags and function in ("add", "least", "greatest"):
            a, b = (self.value(item, "b32") for item in operands[1:])
            one = TYPES[kind[:3]][0]
            return f"set({name_of(operands[0])}, of_shorts<{one}>([]({one} a, {one} b) {{ return {function}(a, b); }}, {a}, {b}));"
        directed = how and kind == "f32" and function in ("add", "sub", "mul")
        if kind not in NUMBERS or any(flag not in allowed and not (directed and flag in ROUNDING) for flag in flags):
            return None
        a, b = (self.value(item, kind) for item in operands[1:])
        value = f"{function}_rounded({a}, {b}, {how})" if directed else f"{function}({a}, {b})"
        if "ftz" in flags and kind == "f32":
            value = f"flushed({value})"
        if "sat" in flags:
            value = f"saturated({value})" if kind == "f32" else ""
        return f"set({name_of(operands[0])}, {value});" if value else None

    def _with_carry(self, operation: str, modifiers: Modifiers, operands: Operands) -> str | None:
        """``operation``: add, sub or mad, with a c behind it if it takes the carry of the one before."""
        *flags, kind = [item for item in modifiers if item != "cc"]
        parts = flags if operation.startswith("mad") else []
        if kind not in ("u32", "s32", "u64", "s64") or flags != parts or parts not in ([], ["lo"], ["hi"]):
            return None
        a, *b = (self.value(item, kind) for item in operands[1:])
        a = f"{'high' if parts == ['hi'] else 'mul'}({a}, {b.pop(0)})" if operation.startswith("mad") else a
        taken = "carry" if operation in ("addc", "subc", "madc") else "false"
        call = f"with_carry<{'true' if operation.startswith('sub') else 'false'}>({a}, {b[0]}, {taken}, out)"
        return f"{{ bool out = false; set({name_of(operands[0])}, {call}); {'carry = out; ' if 'cc' in modifiers else ''}}}"

    def _sum(self, operation: str, modifiers: Modifiers, operands: Operands) -> str | None:
        if "cc" in modifiers:
            return self._with_carry(operation, modifiers, operands)
        return self._two(operation, modifiers, operands, ("rn", "ftz", "sat"))

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
        if "cc" in modifiers:
            return self._with_carry("mad", modifiers, operands)
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
        if kind not in ("f32", "f64") or any(flag not in (*ROUNDING, "ftz", "sat") for flag in flags):
            return None
        how = next((ROUNDING[flag] for flag in flags if flag in ROUNDING), 0)
        a, b, c = (self.value(item, kind) for item in operands[1:])
        if how and kind == "f64":
            return None
        value = f"rounded(double({a}) * double({b}) + double({c}), {how})" if how else f"std::fma({a}, {b}, {c})"
        if "ftz" in flags:
            value = f"flushed({value})"
        if "sat" in flags:
            value = f"saturated({value})"
        return f"set({name_of(operands[0])}, {value});"

    def _extreme(self, function: str, modifiers: Modifiers, operands: Operands) -> str | None:
        if len(operands) != 3:
            return None
        if "NaN" in modifiers:
            modifiers = [item for item in modifiers if item != "NaN"]
            function = f"or_nan<{function}_of>" if modifiers[-1] == "f32" else "unknown"
        return None if function == "unknown" else self._two(function, modifiers, operands, ("ftz",))

    def _logic(self, sign: str, modifiers: Modifiers, operands: Operands) -> str | None:
        (kind,) = modifiers
        if kind == "pred":
            return f"set({name_of(operands[0])}, bool({self.value(operands[1], kind)} {sign} {self.value(operands[2], kind)}));"
        cpp = TYPES[kind][0]
        return f"set({name_of(operands[0])}, {cpp}({self.value(operands[1], kind)} {sign} {self.value(operands[2], kind)}));"

    def _one(self, expression: str, modifiers: Modifiers, operands: Operands, result: str = "") -> str | None:
        *flags, kind = modifiers
        if (kind not in NUMBERS and kind != "pred") or any(flag != "ftz" for flag in flags):
            return None
        cpp = result or ("bool" if kind == "pred" else TYPES[kind][0])
        return f"{{ const auto a = {self.value(operands[1], kind)}; set({name_of(operands[0])}, {cpp}({expression})); }}"

    def _not(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("!a" if modifiers == ["pred"] else "~a", modifiers, operands)

    def _neg(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("-a" if modifiers[-1][0] == "f" else "sub<decltype(+a)>(0, a)", modifiers, operands)

    def _abs(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return self._one("std::fabs(a)" if modifiers[-1][0] == "f" else "a < 0 ? sub<decltype(+a)>(0, a) : a", modifiers, operands)

    def _clz(self, modifiers: Modifiers, operands: Operands) -> str | None:
        width = 8 * TYPES[modifiers[0]][1]
        return self._one(f"a ? __builtin_clzll(a) - {64 - width} : {width}", modifiers, operands, "u32")

    def _shf(self, modifiers: Modifiers, operands: Operands) -> str | None:
        direction, mode, kind = modifiers
        low, high, by = (self.value(item, "u32") for item in operands[1:])
        count = f"({by} & 31)" if mode == "wrap" else f"({by} < 32 ? {by} : 32)"
        if kind != "b32":
            return None
        both = f"(u64({high}) << 32 | {low})"
        value = f"u32({both} >> {count})" if direction == "r" else f"u32({both} << {count} >> 32)"
        return f"set({name_of(operands[0])}, {value});"

    def _bmsk(self, modifiers: Modifiers, operands: Operands) -> str | None:
        at, bits = (self.value(item, "u32") for item in operands[1:])
        if modifiers not in (["clamp", "b32"], ["wrap", "b32"]):
            return None
        at, bits = (f"({item} & 31)" if modifiers[0] == "wrap" else f"({item} < 32 ? {item} : 32)" for item in (at, bits))
        return f"set({name_of(operands[0])}, u32(((u64(1) << {bits}) - 1) << {at}));"

    def _bfind(self, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if kind not in ("u32", "s32", "u64", "s64") or flags not in ([], ["shiftamt"]):
            return None
        return f"set({name_of(operands[0])}, highest_bit({self.value(operands[1], kind)}, {'true' if flags else 'false'}));"

    def _sad(self, modifiers: Modifiers, operands: Operands) -> str | None:
        (kind,) = modifiers
        a, b, c = (self.value(item, kind) for item in operands[1:])
        return f"set({name_of(operands[0])}, add({c}, {a} < {b} ? sub({b}, {a}) : sub({a}, {b})));"

    def _dp2a(self, modifiers: Modifiers, operands: Operands) -> str | None:
        half, *kinds = modifiers
        return self._dot(("16", "8"), half, kinds, operands) if half in ("lo", "hi") else None

    def _dot(self, bits: tuple[str, str], half: str, kinds: Modifiers, operands: Operands) -> str | None:
        if len(kinds) != 2 or any(kind not in ("u32", "s32") for kind in kinds):
            return None
        a, b, c = (self.value(item, "u32") for item in operands[1:])
        b = f"({b} >> 16)" if half == "hi" else b
        return f"set({name_of(operands[0])}, dot<{kinds[0][0]}{bits[0]}, {kinds[1][0]}{bits[1]}>({a}, {b}, {c}));"

    def _vabsdiff4(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers != ["u32", "u32", "u32"] or len(operands) != 4:
            return None
        return f"set({name_of(operands[0])}, byte_differences({self.value(operands[1], 'u32')}, {self.value(operands[2], 'u32')}));"

    def _copysign(self, modifiers: Modifiers, operands: Operands) -> str | None:
        sign, size = (self.value(item, modifiers[0]) for item in operands[1:])
        return f"set({name_of(operands[0])}, std::copysign({size}, {sign}));"

    def _function(self, operation: str, modifiers: Modifiers, operands: Operands) -> str | None:
        *flags, kind = modifiers
        if kind not in ("f32", "f64") or any(flag not in ("approx", "rn", "ftz") for flag in flags):
            return None
        value = FUNCTIONS[operation].format(a=self.value(operands[1], kind))
        return f"set({name_of(operands[0])}, {f'flushed({value})' if 'ftz' in flags and kind == 'f32' else value});"

    def _made_by(
        self, function: str, kinds: Sequence[str], modifiers: Modifiers, operands: Operands, only: Modifiers | None = None
    ) -> str | None:
        """``kinds``: the types of the function's arguments, "" for the instruction's. ``only``: the modifiers that are known."""
        if only is not None and modifiers != only:
            return None
        values = (self.value(item, kind or modifiers[0]) for item, kind in zip(operands[1:], kinds, strict=True))
        return f"set({name_of(operands[0])}, {function}({', '.join(values)}));"

    # ---- instructions that differ in a function or an expression alone

    _add, _sub = partialmethod(_sum, "add"), partialmethod(_sum, "sub")
    _addc, _subc = partialmethod(_with_carry, "addc"), partialmethod(_with_carry, "subc")
    _madc = partialmethod(_with_carry, "madc")
    _div = partialmethod(_two, "div", allowed=("rn", "approx", "full", "ftz"))
    _rem = partialmethod(_two, "rem", allowed=())
    _min, _max = partialmethod(_extreme, "least"), partialmethod(_extreme, "greatest")
    _and, _or, _xor = partialmethod(_logic, "&"), partialmethod(_logic, "|"), partialmethod(_logic, "^")
    _cnot, _brev = partialmethod(_one, "a == 0"), partialmethod(_one, "reversed(a)")
    _popc = partialmethod(_one, "__builtin_popcountll(a)", result="u32")
    _shl, _shr = partialmethod(_made_by, "shift_left", ("", "u32")), partialmethod(_made_by, "shift_right", ("", "u32"))
    _bfe = partialmethod(_made_by, "field", ("", "u32", "u32"))
    _bfi = partialmethod(_made_by, "inserted", ("", "", "u32", "u32"))
    _fns = partialmethod(_made_by, "nth_set", ("u32", "u32", "s32"), only=["b32"])
    _prmt = partialmethod(_made_by, "permuted", ("b32",) * 3, only=["b32"])
    _lop3 = partialmethod(_made_by, "looked_up", ("b32",) * 4, only=["b32"])
    _dp4a = partialmethod(_dot, ("8", "8"), "")
