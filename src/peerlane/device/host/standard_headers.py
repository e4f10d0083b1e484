"""Headers of the host's C and C++ that NVRTC does not have, as far as device code needs them. CCCL has the device's twin of most.

Host code in a .cu file is not compiled: its types may be named, and nothing more.
"""

import re

_NOTHING = "#pragma once\n"


def _twin(name: str) -> str:
    spaces = "namespace cuda { namespace std {} }\nnamespace std { using namespace cuda::std; }\n"
    return f"#pragma once\n#include <cuda/std/{name}>\n{spaces}"


_WITH_TWINS = (
    "array", "atomic", "bit", "cfloat", "climits", "cmath", "complex", "concepts", "cstddef", "cstdint", "cstdlib", "cstring",
    "functional", "initializer_list", "iterator", "limits", "numeric", "optional", "tuple", "type_traits", "utility", "variant",
)  # fmt: skip
_HOST_ONLY = (
    "chrono", "condition_variable", "cstdio", "ctime", "exception", "fstream", "iomanip", "iostream", "map", "mutex", "random", "set",
    "sstream", "stdexcept", "thread", "unordered_map", "unistd.h", "stdio.h", "time.h",
)  # fmt: skip
HEADERS = {
    **dict.fromkeys(_HOST_ONLY, _NOTHING),
    **{name: _twin(name) for name in _WITH_TWINS},
    "algorithm": _twin("algorithm").replace("cuda/std/algorithm", "cuda/std/__algorithm_"),  # in CCCL without a name of its own
    "stdint.h": _twin("cstdint"),
    "stddef.h": _twin("cstddef"),
    "limits.h": _twin("climits"),
    "float.h": _twin("cfloat"),
    "stdlib.h": _twin("cstdlib"),
    "string.h": _twin("cstring"),
    "math.h": _twin("cmath"),
    "stdbool.h": _NOTHING,
    **dict.fromkeys(("assert.h", "cassert"), _NOTHING),  # NVRTC has the macro
    "string": _NOTHING + "namespace std { class string; }\n",
    "vector": _NOTHING + "namespace std { template <class T> class vector; }\n",
    "memory": _NOTHING + "namespace std { template <class T> class shared_ptr; template <class T> class unique_ptr; }\n",
}
"""the text of each header, by name"""
_HOST = re.compile(
    r'cannot open source file|identifier "(?:cuda[A-Z]\w*|cu[A-Z]\w*|dim3|malloc|free|exit|fprintf|stderr|MPI_\w+)" is undefined'
    r'|namespace "std" has no member|incomplete type "std::|"std::\w+" is undefined|a __host__ function|may not be called|<<<'
)
_HINT = (
    "\nhost code in a .cu file is not compiled: take the kernel out, or write it as a load_inline candidate; "
    "-I FOLDER adds folders of headers"
)


_DEPENDENT = re.compile(r'identifier "cuda(GridDependencySynchronize|TriggerProgrammaticLaunchCompletion)" is undefined')


def hint(log: str) -> str:
    """Returns what to do about an error of the compiler, if it comes from host code, a missing header or a name of nvcc; else nothing."""
    if found := _DEPENDENT.search(log):
        instruction = "wait" if found[1].startswith("Grid") else "launch_dependents"
        return f'\ncuda{found[1]} is a function of nvcc; NVRTC takes asm volatile("griddepcontrol.{instruction};" ::: "memory")'
    return _HINT if _HOST.search(log) else ""
