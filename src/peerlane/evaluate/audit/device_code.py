"""Finds the transfer mechanisms that a kernel's code has instructions for, in PTX or in SASS as cuobjdump prints it.

Pure: text in, sets of words out. The words are:

* ``nvls``: multicast loads and stores;
* ``tma``: bulk and tensor copies from or to global memory;
* ``nvshmem``: calls of NVSHMEM's device library, or uses of its state;
* ``nccl_device``: types of NCCL's device API among a kernel's parameters, calls of its functions, or lines of its headers;
* ``sm_load_store``: loads, stores, atomics or fences of system scope, a hint: talking to another GPU takes them, and talking to the host.

An instruction in the text need not be executed.
"""

import re
from collections.abc import Mapping

Kernels = Mapping[str, frozenset[str]]
"""Mangled name of every kernel -> the mechanisms that its code has instructions for."""

_NVSHMEM = re.compile(r"nvshmemi_\w")
_NCCL_DEVICE = re.compile(r"\dnccl(?:DevComm|Lsa|Gin)\w*")  # within a mangled name, after the length of the type's own
_NCCL_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"[^"\n]*/nccl_device/', re.MULTILINE)
_PTX = {
    "nvls": re.compile(r"\bmultimem\.(ld_reduce|st|red|cp)"),
    # Both directions name .global; what stays between the shared memories of a cluster, and what only fills the L2 cache, does not count.
    "tma": re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.(?!prefetch|commit_group|wait_group)[\w.:]*\bglobal\b"),
    "sm_load_store": re.compile(
        r"(?<![\w.])(?:(?:ld|st|red|atom)\.[\w.:]*\b(?:sys|mmio)\b|fence\.[\w.:]*\bsys\b|membar\.sys\b|(?:ld|st)\.volatile\.(?!shared|local))"
    ),
}
# In SASS multimem.st and multimem.red look like ordinary stores: only PTX shows them.
_SASS = {
    "nvls": re.compile(r"\bLDGMC\b"),
    "tma": re.compile(r"\b(?:UBLKCP|UBLKRED|UTMALDG|UTMASTG|UTMAREDG)\b"),
    "sm_load_store": re.compile(r"\b(?:LDG?|STG?|REDG?|ATOMG?)\.[\w.]*\bSYS\b|\bMEMBAR\.[\w.]*\bSYS\b"),
}
_MULTICAST_POINTER = re.compile(r"\b(?:get_)?multicast_ptr\b|\bcuMulticastCreate\b")
_ENTRY = re.compile(r"^[ \t]*(?:\.(?:visible|weak|extern)[ \t]+)*\.(entry|func)\b", re.MULTILINE)
_ENTRY_NAME = re.compile(r"\.entry\s+([\w$]+)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)  # one without an end is searched for its end once, not from every start
_FUNCTION = re.compile(r"^\s*Function : (\S+)[ \t]*$", re.MULTILINE)


def _mechanisms(text: str, patterns: Mapping[str, re.Pattern[str]]) -> frozenset[str]:
    return frozenset(name for name, pattern in patterns.items() if pattern.search(text))


def holds_multicast(text: str) -> bool:
    """Tells whether device code, in CUDA C++ or PTX, has multicast instructions or asks for a multicast pointer outside of its comments."""
    text = _COMMENT.sub("", text)
    return bool(_PTX["nvls"].search(text) or _MULTICAST_POINTER.search(text))


def in_ptx(text: str) -> Kernels:
    """The kernels of a PTX module. What functions that are not inlined hold counts for every kernel of the module."""
    text = _COMMENT.sub("", text)
    starts = [(match.start(), match[1]) for match in _ENTRY.finditer(text)]
    ends = [*(start for start, _ in starts[1:]), len(text)][: len(starts)]
    numbers = "|".join(_NCCL_FILE.findall(text))
    of_nccl = re.compile(rf"\.loc\s+(?:{numbers})\s|inlined_at\s+(?:{numbers})\s") if numbers else None
    kernels: dict[str, frozenset[str]] = {}
    shared: frozenset[str] = frozenset()
    for (start, kind), end in zip(starts, ends, strict=True):
        found = _mechanisms(text[start:end], _PTX) | _libraries(text, start, end)
        found |= {"nccl_device"} if of_nccl and of_nccl.search(text, start, end) else set()
        if kind == "func":
            # Every module that includes NVSHMEM's headers has functions of theirs, called or not.
            head = min(place for place in (text.find("{", start, end), text.find(";", start, end), end) if place >= 0)
            shared |= frozenset() if _NVSHMEM.search(text, start, head) else found
        elif name := _ENTRY_NAME.search(text, start, end):
            kernels[name[1]] = found
    return {name: found | shared for name, found in kernels.items()}


def _libraries(text: str, start: int, end: int) -> frozenset[str]:
    """Returns the libraries for devices whose names are in a kernel or function: NVSHMEM's in its body, NCCL's anywhere."""
    body = text.find("{", start, end)
    closed = text.find("\n}", body, end)  # behind the last kernel are tables of the headers' names
    named = {
        "nvshmem": min(body, closed) >= 0 and _NVSHMEM.search(text, body, closed),
        "nccl_device": _NCCL_DEVICE.search(text, start, end),
    }
    return frozenset(name for name, found in named.items() if found)


def in_sass(text: str) -> Kernels:
    """The kernels in what ``cuobjdump -sass`` prints; a kernel that is there for several architectures counts once."""
    parts = _FUNCTION.split(text)[1:]
    kernels: dict[str, frozenset[str]] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        of_name = {word for word, pattern in (("nvshmem", _NVSHMEM), ("nccl_device", _NCCL_DEVICE)) if pattern.search(name)}
        kernels[name] = kernels.get(name, frozenset()) | _mechanisms(body, _SASS) | of_name
    return kernels
