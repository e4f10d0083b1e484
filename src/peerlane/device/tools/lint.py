"""Rules of memory order that a kernel's PTX can be checked against, with no GPU: what reviews miss and tests rarely hit.

    for finding in lint(cubin.ptx()): print(finding)

A rule sees one function's instructions in the order of the text, so it judges straight-line idioms, not paths: it finds the mistakes that
are made when such code is written by hand, and is no proof. The emulator is the judge of protocols.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction or label, and its line in the text (from 1)."""

    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A rule that a function breaks, and where."""

    rule: str
    function: str
    instruction: Instruction

    def __str__(self) -> str:
        return f"{self.function}, line {self.instruction.line}: {self.instruction.text}\n    {self.rule}: {RULES[self.rule].reason}"


@dataclass(frozen=True)
class Rule:
    """A rule. ``find`` yields the offending instructions of one function; ``reason`` says what is wrong with them and what to do."""

    reason: str
    find: Callable[[Sequence[Instruction]], Iterator[Instruction]]


_RELEASING_STORE = re.compile(r"\b(st|red|atom)\.(relaxed|release|acq_rel)\.sys\b|\bst\.volatile\.global\b")
_READ_WAIT = re.compile(r"cp\.async\.bulk\.wait_group\.read\b")
_FULL_WAIT = re.compile(r"cp\.async\.bulk\.wait_group\s+\d+")  # the emulator checks which groups it waits for
_ACQUIRING_LOAD = re.compile(r"\bld\.acquire\.(sys|gpu)\b")
_GUARD = re.compile(r"^@!?(%\w+)\s+")
_REGISTER = re.compile(r"%\w+")
_RESTRICTED_LOAD = re.compile(r"\bld\.global(\.\w+)*\.nc\b")
_MULTICAST = re.compile(r"\bmultimem\.")
_PACKET = re.compile(r"\.b128\b")
_SPLIT_PACKET = re.compile(r"\bld\.(relaxed|acquire)\S*\.b128\b")
_BRANCH = re.compile(r"\bbra(\.uni)?\s+(\$\w+)")
_LABEL = re.compile(r"^(\$\w+):")


def _read_wait_before_signal(body: Sequence[Instruction]) -> Iterator[Instruction]:
    waited_for_reads_only = False
    for instruction in body:
        if _READ_WAIT.search(instruction.text):
            waited_for_reads_only = True
        elif _FULL_WAIT.search(instruction.text):
            waited_for_reads_only = False
        elif waited_for_reads_only and _RELEASING_STORE.search(instruction.text) and not _PACKET.search(instruction.text):
            yield instruction


def _decides_a_branch(body: Sequence[Instruction]) -> bool:
    """Tells whether a branch among these instructions depends on what the first one loads."""
    known = set(_REGISTER.findall(body[0].text)[:1])
    for item in body[1:]:
        guard = _GUARD.match(item.text)
        if guard and guard[1] in known and _BRANCH.search(item.text):
            return True
        target, *sources = _REGISTER.findall(_GUARD.sub("", item.text)) or [""]
        if known & set(sources):
            known.add(target)
    return False


def _acquire_in_poll_loop(body: Sequence[Instruction]) -> Iterator[Instruction]:
    labels = {match[1]: position for position, item in enumerate(body) if (match := _LABEL.match(item.text))}
    reported: set[int] = set()
    for end, item in enumerate(body):
        branch = _BRANCH.search(item.text)
        start = labels.get(branch[2], end) if branch else end
        for position in range(start, end):
            load = _ACQUIRING_LOAD.search(body[position].text)
            if load and position not in reported and _decides_a_branch(body[position : end + 1]):
                reported.add(position)
                yield body[position]


def _all_that_match(pattern: re.Pattern[str]) -> Callable[[Sequence[Instruction]], Iterator[Instruction]]:
    return lambda body: (instruction for instruction in body if pattern.search(instruction.text))


RULES: dict[str, Rule] = {
    "signal after a .read wait": Rule(
        "the wait says that shared memory has been read, not that the peer has the data; put cp.async.bulk.wait_group 0 before a flag",
        _read_wait_before_signal,
    ),
    "acquire in a poll loop": Rule(
        "every try throws the L1 cache away; poll with ld.relaxed and load with ld.acquire once more behind the loop", _acquire_in_poll_loop
    ),
    "read-only load": Rule(
        "ld.global.nc may return what was there before a peer wrote; take `const __restrict__` and __ldg away from what peers write",
        _all_that_match(_RESTRICTED_LOAD),
    ),
    "packet that may be split": Rule(
        "ptxas may make several loads of it, and the flag is newer than the data; load it with ld.volatile.global.b128",
        _all_that_match(_SPLIT_PACKET),
    ),
    "multicast": Rule(
        "multimem works on multicast addresses only, and no arena has one; store to every rank instead", _all_that_match(_MULTICAST)
    ),
}


def lint(ptx: str) -> list[Finding]:
    """Returns what breaks a rule in the functions of ``ptx``, by function and line."""
    return [
        Finding(name, function, instruction)
        for function, body in _functions(ptx)
        for name, rule in RULES.items()
        for instruction in rule.find(body)
    ]


def _functions(ptx: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Returns name and instructions of every function that has a body."""
    name, body, depth = "", list[Instruction](), 0
    for number, raw in enumerate(ptx.splitlines(), start=1):
        line = raw.split("//")[0].strip()
        if depth == 0 and (match := re.search(r"\.(?:entry|func)\b(?:\s*\([^)]*\))?\s*([\w$]+)", line)):
            name, body = match[1], []
        if depth > 0 and name and line and not line.startswith((".", "{", "}")):
            body.append(Instruction(number, line))
        was_inside = depth > 0
        depth += line.count("{") - line.count("}")
        if was_inside and depth == 0 and name:
            yield name, body
            name = ""  # what else has braces, such as debug information, is no function
