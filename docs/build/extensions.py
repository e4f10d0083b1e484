"""The table of calls that extensions find on emulated ranks, read from the C++ that defines them."""

import re
from collections.abc import Callable
from pathlib import Path

from docs.build.tables import table

_FAMILIES = {
    "CUDA runtime": r"cuda[A-Z]\w+",
    "driver": r"cu[A-Z]\w+",
    "cuBLAS": r"cublas\w+",
}
_DEFINITION = re.compile(
    r"^(?:static |inline |const )*[\w:<>]+[ *&]+(?:\w+::)*(\w+)\((?!.*\);$|.* is not known to the emulator)", re.MULTILINE
)
_MACRO = re.compile(r"^#define (\w+)\((.*?)\)((?:.*\\\n)+.*)", re.MULTILINE)
_PRIVATE = re.compile(r"^namespace \{\n.*?^\}  // namespace$", re.MULTILINE | re.DOTALL)
_NAMESPACE = re.compile(r"^namespace (c10::cuda|at::cuda) \{\n(.*?)^\}  // namespace \1$", re.MULTILINE | re.DOTALL)


def calls_table(folder: Path) -> str:
    """Returns a table of the functions that are served, by library. ``folder`` has the runtime's sources and its headers."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*")) if file.suffix in (".cpp", ".h"))
    text = _PRIVATE.sub("", _expanded(text))
    defined = {name.removesuffix("_v2") for name in _DEFINITION.findall(text)}
    found = {family: {name for name in defined if re.fullmatch(pattern, name)} for family, pattern in _FAMILIES.items()}
    for namespace, body in _NAMESPACE.findall(text):
        found.setdefault(namespace, set()).update(_DEFINITION.findall(body))
    columns: dict[str, Callable[[tuple[str, set[str]]], str]] = {
        "library": lambda row: row[0],
        "served": lambda row: str(len(row[1])),
        "functions": lambda row: ", ".join(f"`{name}`" for name in sorted(row[1])),
    }
    return table(found.items(), columns, ("library", "functions"))


def _expanded(text: str) -> str:
    """Returns C++ with what its macros of several lines define behind it."""
    made = [text]
    for macro, parameters, body in _MACRO.findall(text):
        for call in re.findall(rf"^{macro}\((.*)\)$", text, re.MULTILINE):
            values = dict(zip(parameters.split(", "), map(str.strip, call.split(",")), strict=True))
            expanded = re.sub(r"##(\w+)", lambda found: str(values.get(found[1], found[1])), body)  # noqa: B023
            made.append(re.sub(r"^    ", "", re.sub(r" *\\$", "", expanded, flags=re.MULTILINE), flags=re.MULTILINE))
    return "\n".join(made)
