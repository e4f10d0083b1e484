"""Rules for PTX instructions: each operation as C++, with the modifiers that it knows. Used by ``ptx_front_end.py``.

A rule returns None for what it does not know. Rounding of approximate functions is the CPU's; everything else is as PTX defines it.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping

from peerlane.emulator.ptx_arithmetic import FUNCTIONS, ArithmeticRules
from peerlane.emulator.ptx_halves import HALF_OPERATIONS, HALVES
from peerlane.emulator.ptx_matrix import MatrixRules
from peerlane.emulator.ptx_multimem import MultimemRules
from peerlane.emulator.ptx_operands import NUMBERS, SPACES, TYPES, Modifiers, Operands, name_of, split_operands
from peerlane.emulator.ptx_text import Function

_SCOPES = {"cta": "block_scope", "gpu": "gpu_scope", "sys": "system_scope"}
_ORDERS = {"relaxed": "relaxed", "acquire": "acquire", "release": "release", "acq_rel": "acquire_release"}
_HINTS = re.compile(r"nc|ca|cg|cs|lu|cv|wb|wt|L1::\w+|L2::\w+|level::\w+|unified")
_COMPLETES = "mbarrier::complete_tx::bytes"
_NO_EFFECT = ("prefetch", "prefetchu", "discard", "applypriority", "setmaxnreg", "createpolicy")


_UPDATES = {
    "add": "add(old, by)", "min": "least(old, by)", "max": "greatest(old, by)", "and": "old & by", "or": "old | by", "xor": "old ^ by",
    "exch": "by", "inc": "old >= by ? 0 : old + 1", "dec": "old == 0 || old > by ? by : old - 1",
}  # fmt: skip
"""The operations of atom and red that change a value: what they make of it."""


class Rules(ArithmeticRules, MatrixRules, MultimemRules):
    """The rules for one kernel: memory, threads, control and copies."""

    functions: Mapping[str, Function] = {}
    """that the kernel may call, by name"""
    result = ""
    """the parameter that the function returns"""
    is_kernel = True
    counts: Counter[str]
    """The numbers of the function's instructions: the approximate ones by name, all others under no name."""

    def translated(self, text: str) -> str | None:
        """Returns the instruction in C++; None if it is not known."""
        found = re.match(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        if found is None:
            return None
        operation, *modifiers = [part for part in re.split(r"\.", found[3]) if part]
        operands = split_operands(found[4])
        rule: Callable[[Modifiers, Operands], str | None] | None = getattr(self, f"_{operation}", None)
        if operation in _NO_EFFECT:
            made: str | None = ";"
        elif modifiers and modifiers[-1] in HALVES and operation in HALF_OPERATIONS:
            made = self.half(operation, modifiers, operands)
        elif operation in FUNCTIONS:
            made = self._function(operation, modifiers, operands)
        else:
            made = rule(modifiers, operands) if rule is not None else None
        if made is None or found[2] is None:
            return made
        return f"if ({found[1]}{name_of(found[2])}) {{ {made} }}"

    # ---- memory

    def _access(self, modifiers: Modifiers) -> tuple[str, str, str, str, int, str] | None:
        """Returns space, order ("" for an ordinary access), scope, type, elements of a vector, and "volatile" if it is."""
        *flags, kind = modifiers
        if kind not in TYPES:
            return None
        space, order, scope, count, volatile = "", "", "", 1, ""
        for flag in flags:
            if flag in SPACES:
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
        targets = [name_of(item) for item in self.elements(operands[0])]
        whole = cpp if count == 1 else f"Vector<{cpp}, {count}>"
        typed = f"reinterpret_cast<const {whole}*>({place})"
        if space == "param":
            value = f"[&] {{ {whole} read; __builtin_memcpy(&read, {place}, sizeof read); return read; }}()"
        else:
            value = f"load({typed}, {scope}, {order})" if order else f"*{typed}"
        if "nc" in modifiers:
            value = f"(peerlane_read_only({typed}, sizeof({whole})), {value})"
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
        values = [self.value(item, kind) for item in self.elements(operands[1])]
        whole = cpp if count == 1 else f"Vector<{cpp}, {count}>"
        value = values[0] if count == 1 else f"{whole}{{{{{', '.join(values)}}}}}"
        typed = f"reinterpret_cast<{whole}*>({place})"
        if space == "param":
            return f"{{ const {whole} given = {value}; __builtin_memcpy({place}, &given, sizeof given); }}"
        if space == "local":
            return f"*{typed} = {value};"
        return f"store({typed}, {whole}({value}), {scope}, {order});" if order else f"put({typed}, {whole}({value}));"

    def _atom(self, modifiers: Modifiers, operands: Operands) -> str | None:
        operation = next((item for item in modifiers if item in _UPDATES or item == "cas"), None)
        kept = [item for item in modifiers if item not in ("noftz", operation)]  # libcu++ has order and scope behind it
        if operation is None or not kept or (access := self._access(kept)) is None:
            return None
        space, order, scope, kind, count, _ = access
        cpp = TYPES[kind][0]
        floats = kind in HALVES or kind[0] == "f"
        if (kind not in NUMBERS and kind not in HALVES) or (floats and operation not in (("add",) if kind in HALVES else ("add", "exch"))):
            return None
        if count > 1 and (operation != "add" or not floats):
            return None
        place = f"reinterpret_cast<{cpp}*>({self.pointer(operands[1], space)})"
        if operation == "cas":
            values = [self.value(item, kind) for item in operands[2:]]
            return f"set({name_of(operands[0])}, compare_exchange({place}, {values[0]}, {values[1]}, {scope}, {order or 'relaxed'}));"
        after = _UPDATES[operation]
        if kind in HALVES:
            after = f"of_halves<{HALVES[kind]}, {cpp}>([](double a, double b) {{ return a + b; }}, old, by)"
        change = f"[by](const {cpp} old) {{ return static_cast<{cpp}>({after}); }}"
        targets = self.elements(operands[0]) if count > 1 and operands[0] != "_" else [operands[0]] * count
        made = ""
        for i, (target, given) in enumerate(zip(targets, self.elements(operands[2]), strict=True)):  # of a vector each element by itself
            updated = f"update({place} + {i}, {scope}, {change}, {order or 'relaxed'})"
            made += f"{{ const {cpp} by = {self.value(given, kind)}; set({name_of(target)}, {updated}); }} "
        return made

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
        return f"peerlane_fence({_SCOPES[scope]}, {_ORDERS[order] if order != 'sc' else 'sequential'});"

    def _griddepcontrol(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return {"wait": "peerlane_wait_for_launch();", "launch_dependents": ";"}.get(".".join(modifiers))

    def _membar(self, modifiers: Modifiers, operands: Operands) -> str | None:
        scope = {"cta": "block_scope", "gl": "gpu_scope", "sys": "system_scope"}.get(modifiers[0])
        return f"peerlane_fence({scope}, sequential);" if scope and len(modifiers) == 1 else None

    # ---- threads

    def _bar(self, modifiers: Modifiers, operands: Operands) -> str | None:
        kind = [item for item in modifiers if item not in ("cta", "aligned")]
        if kind == ["warp", "sync"]:
            return f"peerlane_warp_barrier({self.value(operands[0], 'u32')});"
        said = {"popc": "votes & 0xffff", "and": "(votes & 0xffff) == votes >> 16", "or": "(votes & 0xffff) != 0"}
        if kind[0] == "red" and len(kind) == 3 and kind[1] in said:
            target, number, *few, predicate = operands
            arguments = f"{self.value(number, 'u32')}, {self.value(few[0], 'u32') if few else 0}, {self.value(predicate, 'pred')}"
            call = f"peerlane_barrier_votes({arguments}, __COUNTER__ + 1)"
            return f"{{ const u32 votes = {call}; set({name_of(target)}, {said[kind[1]]}); }}"
        if kind not in (["sync"], ["arrive"]):
            return None
        threads = self.value(operands[1], "u32") if len(operands) > 1 else "0"
        return f"peerlane_barrier({self.value(operands[0], 'u32')}, {threads}, {'true' if kind == ['sync'] else 'false'}, __COUNTER__ + 1);"

    def _barrier(self, modifiers: Modifiers, operands: Operands) -> str | None:
        if modifiers[0] != "cluster":
            return self._bar(modifiers, operands)
        flags = [item for item in modifiers[1:] if item != "aligned"]
        if flags in (["arrive"], ["arrive", "release"], ["arrive", "relaxed"]):
            return f"peerlane_cluster_arrive({'false' if flags[-1] == 'relaxed' else 'true'});"
        return "peerlane_cluster_wait();" if flags in (["wait"], ["wait", "acquire"]) else None

    def _mapa(self, modifiers: Modifiers, operands: Operands) -> str | None:
        """The address of what another block of the cluster has where this one has what lies at an address."""
        target, address, rank = operands
        found = f"{{}}(peerlane_cluster_pointer({self.pointer(address, modifiers[0])}, {self.value(rank, 'u32')}))"
        if modifiers[0] == "shared::cluster":
            return f"set({name_of(target)}, {found.format('peerlane_shared_address')});"
        return f"set({name_of(target)}, {found.format('reinterpret_cast<u64>')});" if modifiers == ["u64"] else None

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

    def _match(self, modifiers: Modifiers, operands: Operands) -> str | None:
        how, sync, kind = modifiers
        if how not in ("any", "all") or sync != "sync" or kind not in ("b32", "b64"):
            return None
        target, _, same = operands[0].partition("|")
        call = f"matched<{'true' if how == 'all' else 'false'}>({self.value(operands[2], 'u32')}, {self.value(operands[1], kind)})"
        taken = f"set({name_of(same)}, found != 0); " if same else ""
        return f"{{ const u32 found = {call}; set({name_of(target)}, found); {taken}}}"

    def _elect(self, modifiers: Modifiers, operands: Operands) -> str | None:
        target, _, elected = operands[0].partition("|")
        first = f"u32(__builtin_ctz({self.value(operands[1], 'u32')}))"
        return f"{{ set({name_of(target)}, {first}); set({name_of(elected)}, lane() == {first}); }}"

    # ---- control

    def _bra(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"goto {name_of(operands[0])};" if modifiers in ([], ["uni"]) else None

    def _ret(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return f"return {name_of(self.result)};" if self.result else "return;"

    def _exit(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "return;" if self.is_kernel else None

    def _call(self, modifiers: Modifiers, operands: Operands) -> str | None:
        """A call of a function of the module, or of what CUDA's headers call. Calls by pointers are not known."""
        taken = operands.pop(0).strip("() ") if operands and operands[0].startswith("(") else ""
        name, *given = operands
        arguments = ", ".join(name_of(item) for item in split_operands(given[0].strip("()"))) if given else ""
        if name == "__assertfail":
            return "peerlane_trap();"
        if name == "vprintf":
            called = f"printed({arguments})"
        elif name in self.functions and len(given) < 2:
            called = f"{name_of(name)}({arguments})"
        else:
            return None
        return f"{name_of(taken)} = {called};" if taken else f"{called};"

    def _trap(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "peerlane_trap();"

    def _nanosleep(self, modifiers: Modifiers, operands: Operands) -> str | None:
        return "peerlane_pause();"

    # ---- asynchronous copies of plain bytes

    def _mbarrier(self, modifiers: Modifiers, operands: Operands) -> str | None:
        operation, *more = modifiers
        if not more or more[-1] != "b64" or "shared::cluster" in more:
            return None
        flags = [item for item in more[:-1] if item not in ("shared", "shared::cta", "cta")]
        if operation == "init":
            return f"peerlane_mbarrier_init({self._mbarrier_at(operands[0])}, {self.value(operands[1], 'u32')});"
        if operation == "inval":
            return ";"
        if operation == "expect_tx" and flags in ([], ["relaxed"]):
            return f"peerlane_mbarrier_arrive({self._mbarrier_at(operands[0])}, {self.value(operands[1], 'u32')}, 0);"
        flags = [item for item in flags if item != ("release" if operation.startswith("arrive") else "acquire")]
        if operation in ("arrive", "arrive_drop") and flags in ([], ["expect_tx"]):
            third = self.value(operands[2], "u32") if len(operands) > 2 else "1"
            nbytes, count = (third, "1") if flags else ("0", third)
            drop = "true" if operation == "arrive_drop" else "false"
            call = f"peerlane_mbarrier_arrive({self._mbarrier_at(operands[1])}, {nbytes}, {count}, {drop})"
            return f"set({name_of(operands[0])}, u64({call}));"
        if operation in ("try_wait", "test_wait") and flags in ([], ["parity"]):
            phase = self.value(operands[2], "u32" if flags else "u64")  # the state that an arrival returns is the number of its phase
            return f"set({name_of(operands[0])}, peerlane_mbarrier_try_wait({self._mbarrier_at(operands[1])}, {phase} & 1));"
        return None

    def _mbarrier_at(self, operand: str) -> str:
        return f"reinterpret_cast<unsigned long long*>({self.pointer(operand, 'shared')})"

    def _cp(self, modifiers: Modifiers, operands: Operands) -> str | None:
        said = ".".join(modifiers)
        if said.startswith("async.bulk.prefetch."):
            return ";"
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
            segment = f"{self.pointer(target, 'shared')}, {self.pointer(source, 'global')}, {self.value(nbytes, 'u32')}"
            return f"peerlane_async_bulk({segment}, Combine::replace, {at});"
        if said == "async.bulk.global.shared::cta.bulk_group":
            target, source, nbytes = operands
            segment = f"{self.pointer(target, 'global')}, {self.pointer(source, 'shared')}, {self.value(nbytes, 'u32')}"
            return f"peerlane_async_bulk({segment}, Combine::replace, nullptr);"
        if modifiers[:3] == ["async", "bulk", "tensor"]:
            return self._tensor_copy(modifiers[3:], operands)
        return self._cp_async(modifiers[1:], operands) if modifiers[0] == "async" else None

    def _tensor_copy(self, modifiers: Modifiers, operands: Operands) -> str | None:
        """A box of a tensor, by a map that the kit's host code made: the header's function for kernels in C++ does it."""
        flags = [item for item in modifiers[1:] if item not in ("tile", "L2::cache_hint")]
        dimensions = re.fullmatch("([1-5])d", modifiers[0]) if modifiers else None
        operands = operands[: len(operands) - ("L2::cache_hint" in modifiers)]
        load = flags[:3] in (["shared::cluster", "global", _COMPLETES], ["shared::cta", "global", _COMPLETES])
        to_blocks = load and flags[3:] == ["multicast::cluster"]
        store = flags == ["global", "shared::cta", "bulk_group"]
        if dimensions is None or not (store or to_blocks or (load and not flags[3:])) or len(operands) != 2 + load + to_blocks:
            return None
        source, _, coordinates = operands[load].strip("[] ").partition(",")
        places = [self.value(item, "s32") for item in split_operands(coordinates.strip("{} "))]
        if len(places) != int(dimensions[1]):
            return None
        tensor_map = f"reinterpret_cast<const peerlane::TensorMap*>({self.address(source)})"
        place = f"{{{len(places)}, {{{', '.join(places)}}}}}"
        shared = self.pointer(operands[not load], "shared")
        if store:
            return f"peerlane::ptx::tensor::store({tensor_map}, {shared}, {place});"
        blocks = f"{self.value(operands[3], 'u16')}, " if to_blocks else ""
        call = f"load{'_to' if to_blocks else ''}({blocks}{shared}, {tensor_map}, {self._mbarrier_at(operands[2])}, {place})"
        return f"peerlane::ptx::tensor::{call};"
