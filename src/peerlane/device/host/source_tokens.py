"""Knows a kernel's source again, whatever its comments, its line breaks and the file that holds it."""

import hashlib
import re

_SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[ \t]*line\b[^\n]*", re.DOTALL | re.MULTILINE)
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w+|[^\w\s]')
HASH_CHARACTERS = 16


def token_hash(source: str) -> str:
    """Returns the first digits of the SHA-256 of the source's tokens: C++ words, numbers, strings and signs.

    Comments, white space and ``#line`` do not count. A renamed variable does."""
    tokens = _TOKEN.findall(_SKIPPED.sub(" ", source))
    return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:HASH_CHARACTERS]
