"""PTX text to statements: kernels with their parameters, and in each its declarations, labels, scopes and instructions, with lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"[^\n]*')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:[^\n]*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?[^\n]*")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.(entry|func)\b([^{;]*)")
_INLINED = re.compile(r"(\.loc\s+\d+\s+\d+\s+\d+)[ \t]*//[^\n@]*((?:@\[ [^\s:]+:\d+:\d+ *)+)[ \]]*$", re.MULTILINE)
"""How LLVM says in a comment where a line was inlined: the last place is the kernel's own."""
_CALLER = re.compile(r"@\[ ([^\s:]+):(\d+)")
CALLED_FROM = " <- "
"""Between a file and the places from which its line was inlined, each a file and a line."""
_CLUSTER = re.compile(r"\.reqnctapercluster\s+(\d+(?:\s*,\s*\d+)*)")
_LABEL = re.compile(r"([$\w]+):(?!:)")
_VARIABLE = re.compile(
    r"(?:\.visible\s+|\.extern\s+|\.weak\s+|\.common\s+)*\.(global|shared|const|local)\s+(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([$\w]+)\s*(?:\[(\d*)\])?\s*(?:=\s*(.*?))?\s*;",
    re.DOTALL,
)

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,)]*?)?([$\w]+)\s*(?:\[(\d+)\])?\s*(?=[,);])")

Place = tuple[str, int]
"""file, with the places from which it was inlined, and line"""


@dataclass(frozen=True)
class Variable:
    """A variable of a module or function: ``length`` elements of ``type``; 0 for a size that the launch says."""

    space: str
    align: int
    type: str
    name: str
    length: int
    initial: str


@dataclass(frozen=True)
class Statement:
    """``kind`` is one of instruction, label, open, close, registers, parameter, variable and line."""

    kind: str
    text: str = ""
    place: Place = ("", 0)
    """The place of a line."""
    variable: Variable | None = None


Parameter = tuple[str, int, str, int]
"""type, alignment, name, and elements of an array (0: a scalar)"""


@dataclass
class Function:
    """An entry, or a function that others call, with the parameter that it returns."""

    name: str
    parameters: list[Parameter]
    statements: list[Statement] = field(default_factory=list)
    result: Parameter | None = None
    cluster: tuple[int, ...] = ()
    """the blocks of a cluster along each axis, if the kernel says so"""


@dataclass
class Module:
    """A file of PTX."""

    variables: list[Variable]
    entries: list[Function]
    functions: list[Function] = field(default_factory=list)
    """which others call"""


def parse(ptx: str) -> Module:
    """Returns the module's variables, kernels and functions with a body."""
    files = {int(number): name for number, name in _FILE.findall(ptx)}
    text = _COMMENT.sub("", _INLINED.sub(r"\1 \2", ptx))
    parents = _parents(text)
    variables: list[Variable] = []
    entries: list[Function] = []
    functions: list[Function] = []
    at = 0
    while at < len(text):
        if found := _ENTRY.match(text, at):
            end = found.end()
            if end < len(text) and text[end] == "{":
                stop = _closing(text, end)
                (entries if found[1] == "entry" else functions).append(_function(found[2], text[end + 1 : stop], files, parents))
                at = stop + 1
            else:
                at = end + 1
        elif variable := _VARIABLE.match(text, at):
            variables.append(_variable(variable))
            at = variable.end()
        elif text.startswith(".section", at):
            at = _closing(text, text.index("{", at)) + 1
        else:
            at += 1
    return Module(variables, entries, functions)


def _closing(text: str, at: int) -> int:
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return index
    return len(text)


Location = tuple[int, int, int]


def _parents(text: str) -> dict[Location, Location]:
    """Returns where each place was inlined."""
    parents: dict[Location, Location] = {}
    for found in _LOC.finditer(text):
        numbers = [int(number) if number else 0 for number in found.groups()]
        if numbers[4]:
            parents[numbers[0], numbers[1], numbers[2]] = (numbers[3], numbers[4], numbers[5])
    return parents


def _variable(found: re.Match[str]) -> Variable:
    length = 1 if found[5] is None else int(found[5] or 0)
    return Variable(found[1], int(found[2] or 0), found[3], found[4], length, found[6] or "")


def _function(head: str, body: str, files: dict[int, str], parents: dict[Location, Location]) -> Function:
    result, head = (head[: head.index(")") + 1], head[head.index(")") + 1 :]) if head.lstrip().startswith("(") else ("", head)
    name = re.search(r"[$\w]+", head)
    assert name, "an entry has a name"
    returned = _parameters(result)
    said = _CLUSTER.search(head)
    cluster = tuple(map(int, said[1].split(","))) if said else ()
    return Function(name[0], _parameters(head), list(_statements(body, files, parents)), returned[0] if returned else None, cluster)


def _parameters(text: str) -> list[Parameter]:
    return [(kind, int(align or 0), name, int(length or 0)) for align, kind, name, length in _PARAMETER.findall(text)]


def _statements(body: str, files: dict[int, str], parents: dict[Location, Location]) -> Iterator[Statement]:
    at = 0
    while True:
        while at < len(body) and body[at].isspace():
            at += 1
        if at >= len(body):
            return
        if body[at] in "{}":
            yield Statement("open" if body[at] == "{" else "close")
            at += 1
        elif found := _LOC.match(body, at):
            place = (int(found[1]), int(found[2]), int(found[3]))
            yield Statement("line", place=(_callers(place, found, files, parents), place[1]))
            at = found.end()
        elif variable := _VARIABLE.match(body, at):
            yield Statement("variable", variable=_variable(variable))
            at = variable.end()
        elif label := _LABEL.match(body, at):
            yield Statement("label", label[1])
            at = label.end()
        else:
            end = body.find(";", at)
            end = len(body) if end < 0 else end
            text = " ".join(body[at:end].split())
            if text.startswith(".reg"):
                yield Statement("registers", text)
            elif given := _parameters(f"{text};"):
                kind, align, name, length = given[0]
                yield Statement("parameter", variable=Variable("param", align, kind, name, length, ""))
            elif text and not text.startswith(".pragma"):
                yield Statement("instruction", text)
            at = end + 1


def _callers(place: Location, found: re.Match[str], files: dict[int, str], parents: dict[Location, Location]) -> str:
    """Returns the file of a place, and from where its line was inlined, up to the kernel itself."""
    chain = [files.get(place[0], "?"), *(f"{file}:{line}" for file, line in _CALLER.findall(found[0]))]
    if found[4]:
        place = (int(found[4]), int(found[5]), int(found[6]))
        for _ in range(64):
            chain.append(f"{files.get(place[0], '?')}:{place[1]}")
            if place not in parents:
                break
            place = parents[place]
    return CALLED_FROM.join(chain)
