"""Finds what matters in the messages of ranks and compilers: the place of an error in the candidate, and a compiler's first error."""

import re

from peerlane.results.sanitize import one_line

# As nvcc, NVRTC, g++ ("cuda.cu(12): error: ..."), ptxas ("ptxas error   : ...") and linkers say it. Theirs are the lines without indent.
_COMPILER_ERROR = re.compile(r"^\S.*(?:\berror(?:\s+#?[\w-]+)?\s*:|\bfatal\s*:|\bundefined reference to\b).*", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)', re.MULTILINE)
_NOT_THE_CANDIDATE = re.compile(r"^<frozen |/(?:site-packages|dist-packages)/|/lib/python\d|/peerlane/(?!solutions/)")


def error_place(message: str) -> str | None:
    """``file.py:12``, the last line of the candidate in a traceback; None if there is none."""
    for path, line in reversed(_FRAME.findall(message)):
        if not _NOT_THE_CANDIDATE.search(path):
            return one_line(f"{path.rsplit('/', 1)[-1]}:{line}")
    return None


def own_traceback(message: str) -> str:
    """A traceback from the candidate's first line on: what called it says nothing; the whole message where there is none."""
    for frame in _FRAME.finditer(message):
        if not _NOT_THE_CANDIDATE.search(frame[1]):
            return message[frame.start() :].strip("\n")
    return message.strip()


def error_line(message: str) -> str:
    """The last line of a traceback, after its place in the candidate."""
    line = one_line(message.strip().splitlines()[-1])
    place = error_place(message)
    return line if place is None or place in line else f"{place}: {line}"


def first_compiler_error(message: str) -> str | None:
    """The line with a compiler's first error, which starts with its file and line; None if no compiler says so."""
    found = _COMPILER_ERROR.search(message)
    return one_line(found[0].rstrip()) if found else None
