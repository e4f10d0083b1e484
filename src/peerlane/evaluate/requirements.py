"""Finds what a candidate needs that this machine lacks, as its source and its verdict show."""

import ast
import importlib.util
import inspect
import re

from peerlane.common.syntax import UNREADABLE, parse
from peerlane.device.nccl.installation import what_is_missing as nccl_is_missing
from peerlane.device.nccl.world import NO_LSA
from peerlane.device.nvshmem.installation import what_is_missing
from peerlane.device.nvshmem.world import NEEDS_MPS, NO_TRANSPORT
from peerlane.evaluate.audit.device_code import holds_multicast
from peerlane.evaluate.candidates import CandidateFile, uses_nccl, uses_nvshmem
from peerlane.problems.contract.spec import Problem
from peerlane.results.verdict import CudaError, Hang, ImportFailure, NotRun, RuntimeFailure, Unstable, Verdict, WrongResult
from peerlane.settings import MULTICAST_REASON, multicast_allowed, thunderkittens_root, windows_refused

_TENSORS = ("get_or_create_parallel_tensor", "create_parallel_tensor")
_CRASHES = (CudaError, Hang, ImportFailure, RuntimeFailure)
_FP8 = re.compile(r"float8|fp8|e4m3|e5m2", re.IGNORECASE)
_TRITON = re.compile(r"^\s*(import|from) triton\b", re.MULTILINE)
_PACKAGES = {
    "nvshmem": "nvshmem4py, NVIDIA's Python package, which the candidate imports: run pip install nvshmem4py-cu13",
    "fla": "flash-linear-attention, which the candidate imports: run pip install 'fla-core[cuda]'",
}
"""Modules of packages that candidates may import, and what to say without them."""
_WITHOUT_CUDA = re.compile(
    r"(requires|not compiled with|without) CUDA|NCCL built in|module 'torch\._C' has no attribute '_cuda|dummy base class|a CUDA build|"
    r"No CUDA GPUs are available|Found no NVIDIA driver|backend for device type cuda|accelerator device when none|"
    r"lib(cuda|cudart|nvrtc)\.so"
)
"""What torch says of its functions for GPUs where there is none."""
_REGISTER = "ncclCommWindowRegister"
_REDUCE = re.compile(r"\b(dist|distributed)\.reduce\(|^\s*from torch\.distributed import [^\n]*\breduce\b", re.MULTILINE)


def missing_before(source: str, *, nvls: bool = False) -> str | None:
    """Returns what a candidate of this source needs before it is compiled, and is not here; None if nothing is missing.

    ``nvls``: whether its ranks' NCCL may use NVLink multicast. The first window of NCCL then makes a multicast object without a word of it.
    """
    if uses_nvshmem(source) and (missing := what_is_missing()) is not None:
        return missing
    if uses_nccl(source) and (missing := nccl_is_missing()) is not None:
        return missing
    if (uses_nccl(source) or any(map(_makes_window, _nodes(source)))) and (refused := windows_refused(nvls=nvls)) is not None:
        return refused
    for module, missing in _PACKAGES.items():
        if re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE) and importlib.util.find_spec(module) is None:
            return missing
    if "parallelkittens_runtime" not in source:
        return None
    if thunderkittens_root() is None:
        return "ThunderKittens, whose headers the candidate compiles against: set THUNDERKITTENS_ROOT to a checkout, which holds include/"
    if not multicast_allowed() and _asks_for_multicast(source):
        return MULTICAST_REASON
    return None


def _makes_window(node: ast.AST) -> bool:
    """Tells whether this is device or host code that registers a window, or makes torch's symmetric memory or memory pools do so."""
    match node:
        case ast.Constant(value=str(text)) | ast.Attribute(attr=text):
            return _REGISTER in text
        case ast.Call(func=ast.Attribute(attr="set_backend"), args=[ast.Constant(value=str(name)), *_]):
            return name.upper() == "NCCL"
        case ast.Call(func=ast.Attribute(attr="register_mem_pool"), keywords=keywords):
            return any(item.arg == "symm" for item in keywords)
    return False


def _asks_for_multicast(source: str) -> bool:
    for call in (node for node in _nodes(source) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        declined = any(item.arg == "multicast" and getattr(item.value, "value", True) is False for item in call.keywords)
        if name == "get_or_create_barrier" or (name in _TENSORS and not declined):
            return True
    return False


def _nodes(source: str) -> list[ast.AST]:
    """Returns the nodes of the syntax tree; none of what is no Python."""
    try:
        return list(ast.walk(parse(source)))
    except UNREADABLE:
        return []


def needs_multicast(verdict: Verdict, source: str, *, lacking: bool) -> bool:
    """Tells whether a failure is that of a candidate which asks for NVLink multicast; ``lacking``: its ranks had none.

    The candidate's source is the evidence, because ranks that hang or crash cannot be asked what they have loaded. Its code reads
    ``multicast_ptr``, which is 0 there, or calls a ``multimem`` operator of torch's; or a string of it holds device code with ``multimem``
    instructions. Comments and docstrings are no evidence. The failure must be a crash or a hang, at import or in the first call: a
    pointer of 0 shows there, and no wrong answer is excused.

    Anybody can write such a line into a candidate that fails. So the flag must buy nothing: verdict and reward stay as they are, and
    ranks count all candidates. Only a second share, shown beside the first, leaves these out.
    """
    if isinstance(verdict, NotRun):
        return verdict.missing == MULTICAST_REASON
    if not (lacking and isinstance(verdict, _CRASHES) and verdict.phase in ("import", "first_call")):
        return False
    if "multimem" not in source and "ulticast" not in source:
        return False
    nodes = _nodes(source)
    documentation = {node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    return any(_shows_multicast(node) for node in nodes if node not in documentation)


def _shows_multicast(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name):
            return name == "multicast_ptr" or name.startswith("multimem_")
        case ast.Constant(value=str(text)):
            return holds_multicast(text)
    return False


def needs_gpu(raised: str, by_nvcc: bool, *, emulated: bool) -> str:
    """Says of a CUDA candidate on CPU ranks what was tried: ``raised`` is what its import raised, ``by_nvcc`` whether nvcc compiled its
    extensions' device code, ``emulated`` whether emulated ranks could run it."""
    tried = f"its import here ended in {raised}" if raised else "its import works here"
    if by_nvcc and not raised:
        tried += ", nvcc compiles the device code of its extensions"
    where = "run it on a GPU node" + (", or add --device emulated" if emulated else "")
    return f"needs a GPU: {tried}; what it compiles when it is called was not compiled; {where}"


def lacks_cuda(line: str) -> bool:
    """Tells whether the last line of a traceback says in torch's words that there is no GPU."""
    return _WITHOUT_CUDA.search(line) is not None


def missing_on_virtual_node(message: str) -> str | None:
    """Returns what the ranks of a virtual node lack, if this failure shows that the candidate needs it; None if it does not."""
    if "invalid device ordinal" in message or "Duplicate GPU" in message:
        return "a GPU for every rank: the candidate addresses GPUs by the numbers of ranks, which share one here"
    if NEEDS_MPS in message:
        return "MPS whose control program the ranks can call"
    if NO_LSA in message:
        return "a GPU for every rank, which NCCL's device API needs"
    if NO_TRANSPORT in message:
        return "nodes with a network that NVSHMEM can use"
    if "NCCL" in message and re.search(r"invalid ?argument", message, re.IGNORECASE):
        return "a GPU for every rank: NCCL refused a call of the candidate, as it does for ranks that share one"
    if "ncclSocket" in message or ("NCCL" in message and "ncclSystemError" in message):
        return "a GPU for every rank: NCCL, which served this call, has no way between ranks that share one"
    return None


def missing_behind(verdict: Verdict, candidate: CandidateFile, source: str, problem: Problem, world_size: int) -> str | None:
    """Returns what on CPU ranks explains a wrong result better than the candidate does; None if nothing does."""
    if not isinstance(verdict, (WrongResult, Unstable)):
        return None
    found = f"rank {verdict.rank} was wrong here: {verdict.detail}"
    if (candidate.backend == "triton" or _TRITON.search(source)) and _FP8.search(source):
        return f"a GPU: Triton's interpreter rounds float32 to fp8 otherwise than a GPU does, and has other codes for NaN; {found}"
    some_rank_is_right = isinstance(verdict, WrongResult) and len(verdict.wrong_ranks) < world_size
    if some_rank_is_right and all(map(_REDUCE.search, (source, inspect.getsource(problem.reference)))):
        return f"NCCL: the reduce of gloo, which CPU ranks use, leaves partial sums in the tensors of other ranks than the root; {found}"
    return None
