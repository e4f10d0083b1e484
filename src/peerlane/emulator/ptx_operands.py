"""Operands of PTX instructions as C++: types, names, values, addresses."""

import re

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
NUMBERS = {name for name in TYPES if name not in ("f16x2", "bf16x2", "f16", "bf16", "b128")}
_AXES = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
_CLUSTERS = {"clusterid": "blockIdx", "nclusterid": "gridDim"}
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
    "%cluster_nctarank": "peerlane_cluster_size()",
    "%is_explicit_cluster": "(peerlane_cluster_size() > 1)",
    # A cluster is of neighbours along x.
    "%cluster_ctaid.x": "peerlane_cluster_rank()",
    "%cluster_nctaid.x": "peerlane_cluster_size()",
    **{f"%cluster_{name}.{axis}": number for name, number in (("ctaid", "0u"), ("nctaid", "1u")) for axis in "yz"},
    **{f"%{name}.x": f"({cpp}.x / peerlane_cluster_size())" for name, cpp in _CLUSTERS.items()},
    **{f"%{name}.{axis}": f"{cpp}.{axis}" for name, cpp in _CLUSTERS.items() for axis in "yz"},
    "%envreg1": "u32(reinterpret_cast<u64>(grid_workspace) >> 32)",
    "%envreg2": "u32(reinterpret_cast<u64>(grid_workspace))",
    "WARP_SZ": "32u",
}
SPACES = {"global", "shared", "local", "const", "param", "shared::cta", "shared::cluster"}

Modifiers = list[str]
Operands = list[str]


def name_of(name: str) -> str:
    """Returns a name of PTX as one of C++."""
    if name == "_":
        return "Sink{}"
    spelt = re.sub(r"\W", "_", name)
    return f"R{spelt}" if name.startswith("%") else f"V_{spelt}"


def split_operands(text: str) -> Operands:
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


class OperandRules:
    """The operands of one kernel, whose variables in shared memory and parameters are named."""

    def __init__(self, shared: set[str], dynamic: set[str], parameters: set[str]) -> None:
        """``parameters`` are of the function and of its calls; variables in other memory are found by their names in the same way."""
        self._shared, self._dynamic, self.parameters = shared, dynamic, parameters
        self.vectors: dict[str, int] = {}
        """elements of vector registers, by name"""

    def elements(self, operand: str) -> Operands:
        """Returns the elements of a vector in braces or in a vector register; a scalar is its own."""
        if operand in self.vectors:
            return [f"{operand}.{axis}" for axis in "xyzw"[: self.vectors[operand]]]
        return split_operands(operand.strip("{}"))

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
        return operand.partition("+")[0] in self._shared | self._dynamic | self.parameters or operand.startswith(("_Z", "__"))

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
        address = self.address(operand)
        return f"shared({address})" if space.startswith("shared") else f"generic({address})"

    def address(self, operand: str) -> str:
        """Returns the address that ``[...]`` names, in the window of its space."""
        inside = operand.strip("[] ")
        base, sign, offset = inside.partition("+")
        if not sign:
            base, sign, offset = (inside[:1] + inside[1:].partition("-")[0], *inside[1:].partition("-")[1:])
        base = base.strip()
        plus = f" {sign} {offset.strip()}" if sign else ""
        if base.startswith("%") or not self._is_symbol(base):
            return f"({name_of(base) if not base.isdecimal() else base}{plus})"
        return f"({self.address_of(base)}{plus})"
