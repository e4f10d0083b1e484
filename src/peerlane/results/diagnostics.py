"""Finds what matters in the messages of ranks and compilers: the place of an error in the candidate, and a compiler's first error."""

import re

from peerlane.results.sanitize import one_line

# As nvcc, NVRTC, g++ ("cuda.cu(12): error: ..."), ptxas ("ptxas error   : ...") and linkers say it. Theirs are the lines without indent.
_COMPILER_ERROR = re.compile(r"^\S.*(?:\berror(?:\s+#?[\w-]+)?\s*:|\bfatal\s*:|\bundefined reference to\b).*", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "([^"\n]+)", line (\d+)', re.MULTILINE)
# The second and third come before an exception of a chain, which may lack frames.
_TRACEBACK_START = re.compile(
    r"^(?:Traceback \(most recent call last\):|The above exception was the direct cause of .*|During handling of the above exception.*)$",
    re.MULTILINE,
)
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
    """The first line of the exception that a traceback ends with, after its place in the candidate; without one, the last line."""
    starts = list(_TRACEBACK_START.finditer(message))
    lines = message[starts[-1].end() :].splitlines() if starts else ()
    exception = next((line for line in lines if line and not line[0].isspace()), None)  # lines of frames are indented
    return last_line(message) if exception is None else _with_place(exception, message)


def last_line(message: str) -> str:
    """The last line of a message, after its place in the candidate."""
    return _with_place(message.strip().splitlines()[-1], message)


def _with_place(text: str, message: str) -> str:
    line, place = one_line(text), error_place(message)
    return line if place is None or place in line else f"{place}: {line}"


def first_compiler_error(message: str) -> str | None:
    """The line with a compiler's first error, which starts with its file and line; None if no compiler says so."""
    found = _COMPILER_ERROR.search(message)
    return one_line(found[0].rstrip()) if found else None
