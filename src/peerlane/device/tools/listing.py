"""Machine code for people: PTX and SASS of a cubin, with the source lines that each part comes from."""

import re
import subprocess
from functools import cache
from pathlib import Path

from peerlane.device.host.jit import Cubin
from peerlane.errors import DeviceError

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_ENTRY = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+(\w+)\b")
_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.]*\b.*;|^\s*\$?\w+:\s*$|^\s*[{}]\s*$|^\s*//\s*(?:begin|end) inline asm")


def ptx_listing(cubin: Cubin, kernel: str | None = None) -> str:
    """Returns the instructions of every kernel (or of one) in their order, under the source lines that they come from.

    Code that was inlined is under the line that calls it."""
    text = cubin.ptx()
    files = {int(number): name for number, name in _FILE.findall(text)}
    lines: list[str] = []
    place, here = "", False
    for line in text.splitlines():
        if entry := _ENTRY.match(line):
            here = kernel in (None, entry[1])
            if here:
                lines.append(f"{entry[1]}:")
            place = ""
        elif here and (loc := _LOC.match(line)):
            number, at = (loc[3], loc[4]) if loc[3] else (loc[1], loc[2])
            now = _described(files.get(int(number), "?"), int(at))
            if now != place:
                lines.append(f"  // {now}")
                place = now
        elif here and _INSTRUCTION.match(line) and not line.lstrip().startswith("."):
            lines.append(f"    {line.strip()}")
            here = here and not line.startswith("}")
    return "\n".join(lines)


def sass_listing(cubin: Cubin, disassembler: str, kernel: str | None = None) -> str:
    """Returns what nvdisasm says of the cubin's code, with source lines. Raises DeviceError where it fails."""
    chosen = ["--function-name", kernel] if kernel else []
    done = subprocess.run([disassembler, "--print-code", "--print-line-info", str(cubin.path)], capture_output=True, text=True)
    if done.returncode:
        raise DeviceError(f"{disassembler} cannot read {cubin.path}: {done.stderr.strip()}")
    parts = re.split(r"(?m)^(?=\.section\s+\.text\.|\s*//-+ \.text\.)", done.stdout)
    wanted = [part for part in parts if not chosen or re.search(rf"\.text\.{re.escape(kernel or '')}\b", part)]
    return "\n".join(part.rstrip() for part in wanted)


def _described(file: str, line: int) -> str:
    source = _source_lines(file)
    said = source[line - 1].strip() if 0 < line <= len(source) else ""
    return f"{Path(file).name}:{line}: {said}".rstrip(": ")


@cache
def _source_lines(file: str) -> tuple[str, ...]:
    try:
        return tuple(Path(file).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()
