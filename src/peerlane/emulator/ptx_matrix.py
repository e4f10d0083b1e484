"""Rules for PTX instructions of tensor cores, and for matrices and copies that feed them. See ``ptx_rules.py``."""

import re

from peerlane.emulator.ptx_operands import Modifiers, OperandRules, Operands, name_of, split_operands

_SHAPES = {"m16n16k16": (16, 16), "m32n8k16": (32, 8), "m8n32k16": (8, 32), "m16n16k8": (16, 16)}
"""Of wmma: rows and columns of the sums."""
_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
"""Types that tensor cores multiply here, and their bytes."""


def _registers(operand: str) -> list[str]:
    return [name_of(item) for item in split_operands(operand.strip("{} "))]


def _words(name: str, operand: str) -> str:
    values = [f"u32({item})" for item in _registers(operand)]
    return f"u32 {name}[{len(values)}]{{{', '.join(values)}}};"


class MatrixRules(OperandRules):
    """Rules for ``mma``, ``wmma``, ``wgmma``, ``ldmatrix``, ``stmatrix`` and ``cp.async``. Each returns None for what it does not know."""

    def _mma(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers[:2] != ["sync", "aligned"] or len(operands) != 4:
            return None
        shape, *layouts, d, a, b, c = modifiers[2:]
        found = re.fullmatch(r"m16n8k(\d+)", shape)
        if found is None or layouts != ["row", "col"] or a != b or a not in _ELEMENTS or d != c or d not in ("f32", "f16"):
            return None
        depth = int(found[1]) * _ELEMENTS[a]  # bytes of k
        if depth not in (16, 32) or [len(_registers(item)) for item in operands[1:3]] != [depth // 8, depth // 16]:
            return None
        before = [f"as<f32>({item})" for item in _registers(operands[3])]
        targets = _registers(operands[0])
        if d == "f16":
            before = [f"widen_f16(u16({item} >> {shift}))" for item in _registers(operands[3]) for shift in (0, 16)]
            pairs = [f"u32(narrow_f16(sums[{i}])) | u32(narrow_f16(sums[{i + 1}])) << 16" for i in (0, 2)]
        else:
            pairs = [f"sums[{i}]" for i in range(4)]
        if len(before) != 4 or len(targets) != len(pairs):
            return None
        taken = " ".join(f"set({item}, {value});" for item, value in zip(targets, pairs, strict=True))
        sums = f"f32 sums[4]{{{', '.join(before)}}};"
        return f"{{ const {_words('a', operands[1])} const {_words('b', operands[2])} {sums} mma<Element::{a}>(sums, a, b); {taken} }}"

    def _wmma(self, modifiers: Modifiers, operands: Operands) -> str | None:
        what, *more = [item for item in modifiers if item not in ("sync", "aligned", "shared", "shared::cta", "global")]
        if what == "mma":
            more = more if len(more) == 7 else [*more[:-1], "f16", "f16", *more[-1:]]
            if len(more) != 7 or more[2] not in _SHAPES or more[4] != more[5] or more[4] not in ("f16", "bf16", "tf32"):
                return None
            return self._product_of_fragments(_SHAPES[more[2]], more[4], more[3], more[6], operands)
        if what not in ("load", "store") or len(more) != 4 or more[2] not in _SHAPES or more[3] not in ("f16", "bf16", "tf32", "f32"):
            return None
        role, layout, shape, kind = more
        registers, place, *stride = operands if what == "load" else (operands[1], operands[0], *operands[2:])
        rows, columns = _SHAPES[shape]
        lines = columns if role == "b" else rows
        space = next((item for item in modifiers if item.startswith("shared")), "generic")
        sums, in_word = role in ("c", "d"), 1 if kind == "tf32" else 2
        words = _registers(registers)
        cpp = "u32" if kind in ("tf32", "f32") else "u16"
        count = 8 if sums else lines * (8 if kind == "tf32" else 16) // 32
        contiguous = (layout == "row") != (role == "b")
        step = self.value(stride[0], "u32") if stride else str(count * 32 // lines if contiguous else lines)
        where = f"{self.pointer(place, space)}, {step}, {str(contiguous).lower()});"
        halves = cpp == "u16"
        if what == "load":
            filled = [f"own[{2 * i}] | u32(own[{2 * i + 1}]) << 16" if halves else f"own[{i}]" for i in range(count // (1 + halves))]
            if len(filled) > len(words):
                return None
            filled += ["0"] * (len(words) - len(filled))
            taken = " ".join(f"set({item}, {value});" for item, value in zip(words, filled, strict=True))
            return f"{{ {cpp} own[{count}]; load_fragment<{cpp}, {lines}, {in_word}>(own, {where} {taken} }}"
        own = [f"u16({item} >> {shift})" for item in words for shift in (0, 16)] if halves else [f"as<u32>({item})" for item in words]
        return f"{{ const {cpp} own[{count}]{{{', '.join(own)}}}; store_fragment<{cpp}, {lines}>(own, {where} }}"

    def _product_of_fragments(self, shape: tuple[int, int], element: str, d: str, c: str, operands: Operands) -> str:
        used = [size * (8 if element == "tf32" else 16) // 32 // (1 if element == "tf32" else 2) for size in shape]
        a, b = (", ".join(split_operands(item.strip("{} "))[:words]) for item, words in zip(operands[1:3], used, strict=True))
        halves = [f"widen_f16(u16({item} >> {shift}))" for item in _registers(operands[3]) for shift in (0, 16)]
        before = halves if c == "f16" else [f"as<f32>({item})" for item in _registers(operands[3])]
        targets = _registers(operands[0])
        after = [f"u32(narrow_f16(sums[{2 * i}])) | u32(narrow_f16(sums[{2 * i + 1}])) << 16" for i in range(4)]
        after = after if d == "f16" else [f"sums[{i}]" for i in range(8)]
        taken = " ".join(f"set({item}, {value});" for item, value in zip(targets, after, strict=True))
        call = f"multiply_fragments<Element::{element}, {shape[0]}, {shape[1]}>(sums, a, b);"
        return f"{{ const {_words('a', a)} const {_words('b', b)} f32 sums[8]{{{', '.join(before)}}}; {call} {taken} }}"

    def _matrices(self, modifiers: Modifiers) -> tuple[int, bool] | None:
        """Returns how many matrices, and whether they are transposed."""
        more = [item for item in modifiers if item not in ("sync", "aligned", "m8n8", "shared", "shared::cta", "b16", "trans")]
        known = modifiers[:2] == ["sync", "aligned"] and "m8n8" in modifiers and "b16" in modifiers
        return (int(more[0][1]), "trans" in modifiers) if known and len(more) == 1 and more[0] in ("x1", "x2", "x4") else None

    def _ldmatrix(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if (found := self._matrices(modifiers)) is None:
            return None
        count, transposed = found
        taken = " ".join(f"set({item}, words[{i}]);" for i, item in enumerate(_registers(operands[0])))
        call = f"load_matrices<{count}, {str(transposed).lower()}>(words, {self.address(operands[1])});"
        return f"{{ u32 words[{count}]; {call} {taken} }}"

    def _stmatrix(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if (found := self._matrices(modifiers)) is None:
            return None
        count, transposed = found
        call = f"store_matrices<{count}, {str(transposed).lower()}>({self.address(operands[0])}, words);"
        return f"{{ const {_words('words', operands[1])} {call} }}"

    def _wgmma(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers == ["fence", "sync", "aligned"]:
            return ";"
        if modifiers == ["commit_group", "sync", "aligned"]:
            return "peerlane_async_commit(matrix_queue);"
        if modifiers == ["wait_group", "sync", "aligned"]:
            return f"peerlane_async_wait(matrix_queue, {operands[0]}, false);"
        if modifiers[:3] != ["mma_async", "sync", "aligned"] or len(modifiers) != 7:
            return None
        shape, d, a, b = modifiers[3:]
        found = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        targets, from_registers = _registers(operands[0]), operands[1].startswith("{")
        if found is None or d != "f32" or a != b or a not in _ELEMENTS or int(found[2]) * _ELEMENTS[a] != 32:
            return None
        add, *scales = operands[3:]
        transposed = [item == "1" for item in scales[2:]] or [False] * (1 if from_registers else 2)
        if len(targets) != int(found[1]) // 2 or scales[:2] not in (["1", "1"], ["-1", "1"]) or len(transposed) != 2 - from_registers:
            return None
        added = str(add == "1").lower() if add in ("0", "1") else name_of(add)
        minus = str(scales[0] == "-1").lower()
        k_major = ", ".join(str(not item).lower() for item in transposed)
        second = self.value(operands[2], "b64")
        if from_registers:
            call = f"const {_words('a', operands[1])} wgmma_of_registers<Element::{a}, {k_major}>(sums, a, {second}, {added}, {minus});"
        else:
            call = f"wgmma<Element::{a}, {k_major}>(sums, {self.value(operands[1], 'b64')}, {second}, {added}, {minus});"
        before = ", ".join(f"as<f32>({item})" for item in targets)
        taken = " ".join(f"set({item}, sums[{i}]);" for i, item in enumerate(targets))
        return f"{{ f32 sums[{len(targets)}]{{{before}}}; {call} {taken} }}"

    def _cp_async(self, modifiers: Modifiers, operands: Operands) -> str | None:
        """Copies of 4 to 16 bytes by each thread, which wait in groups of their own."""
        said = [item for item in modifiers if not item.startswith(("L1::", "L2::"))]
        if said == ["commit_group"]:
            return "peerlane_async_commit(thread_queue);"
        if said == ["wait_group"]:
            return f"peerlane_async_wait(thread_queue, {operands[0]}, false);"
        if said == ["wait_all"]:
            return "peerlane_async_commit(thread_queue); peerlane_async_wait(thread_queue, 0, false);"
        if said not in (
            ["ca", "shared", "global"],
            ["cg", "shared", "global"],
            ["ca", "shared::cta", "global"],
            ["cg", "shared::cta", "global"],
        ):
            return None
        if len(operands) not in (3, 4) or operands[2] not in ("4", "8", "16", "0x4", "0x8", "0x10"):
            return None
        nbytes = int(operands[2], 0)
        read = self.value(operands[3], "u32") if len(operands) == 4 else str(nbytes)
        return f"copy_by_thread({self.pointer(operands[0], 'shared')}, {self.pointer(operands[1], 'global')}, {nbytes}, {read});"
