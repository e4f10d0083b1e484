"""Rules for PTX arithmetic in fp16 and bf16, of one number or two in a register: each result is rounded once. See ``ptx_rules.py``."""

from peerlane.emulator.ptx_operands import TYPES, Modifiers, OperandRules, Operands, name_of

HALVES = {"f16": "F16", "bf16": "Bf16", "f16x2": "F16", "bf16x2": "Bf16"}
"""PTX type: what widens and narrows it in C++"""
_EXPRESSIONS = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "std::fma(a, b, c)", "min": "std::fmin(a, b)", "max": "std::fmax(a, b)",
    "neg": "-a", "abs": "std::fabs(a)", "ex2": "std::exp2(a)", "tanh": "std::tanh(a)",
}  # fmt: skip
HALF_OPERATIONS = frozenset(_EXPRESSIONS)
_WITH_NAN = {
    "min": '(a != a || b != b ? __builtin_nan("") : std::fmin(a, b))',
    "max": '(a != a || b != b ? __builtin_nan("") : std::fmax(a, b))',
}


class HalfRules(OperandRules):
    """Rules for instructions whose type is one of ``HALVES``."""

    def half(self, operation: str, modifiers: Modifiers, operands: Operands) -> str | None:
        """Returns the instruction in C++; None if it is not known."""
        *flags, kind = modifiers
        if operation not in _EXPRESSIONS or any(flag not in ("rn", "ftz", "approx", "NaN", "relu", "sat") for flag in flags):
            return None
        names = "abc"[: len(operands) - 1]
        expression = _WITH_NAN[operation] if "NaN" in flags and operation in _WITH_NAN else _EXPRESSIONS[operation]
        if "relu" in flags:
            expression = f"std::fmax({expression}, 0.0)"
        if "sat" in flags:
            expression = f"saturated(float({expression}))"
        function = f"[]({', '.join(f'double {name}' for name in names)}) {{ return {expression}; }}"
        values = ", ".join(self.value(item, f"b{8 * TYPES[kind][1]}") for item in operands[1:])
        return f"set({name_of(operands[0])}, of_halves<{HALVES[kind]}, {TYPES[kind][0]}>({function}, {values}));"

    def widened(self, operand: str, kind: str) -> str:
        """Returns an operand of type f16 or bf16 as a float."""
        return f"{HALVES[kind]}::widen({self.value(operand, 'b16')})"
