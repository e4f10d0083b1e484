"""The one place that reads environment variables and holds defaults."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from peerlane.errors import UsageError

ARCHITECTURE = "9.0a"
"""What torch extensions are compiled for, as torch names it, where neither the environment nor a GPU says."""


def cache_dir() -> Path:
    """Returns the folder of compiled kernels and measured ceilings: PEERLANE_CACHE_DIR, else peerlane/ in the user's cache folder."""
    if folder := os.environ.get("PEERLANE_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerlane"


def candidate_caches() -> Path:
    """Returns the folder of what confined candidates compile, a folder for each; see :mod:`peerlane.sandbox.caches`."""
    return cache_dir() / "candidates"


def candidate_memory_bytes() -> int | None:
    """Host memory that the ranks of one candidate may hold together: PEERLANE_CANDIDATE_MEMORY_MIB; None: a share of what is free."""
    given = os.environ.get("PEERLANE_CANDIDATE_MEMORY_MIB")
    if given is None:
        return None
    if not given.isdecimal() or not int(given):
        raise UsageError(f"PEERLANE_CANDIDATE_MEMORY_MIB={given}: expected a number of MiB of at least 1")
    return int(given) << 20


def tunes() -> bool:
    """Tells whether kernels time their choices at first use, which PEERLANE_TUNE=1 asks for; else their models choose."""
    return os.environ.get("PEERLANE_TUNE") == "1"


_batch_invariant = os.environ.get("PEERLANE_BATCH_INVARIANT") == "1"


def batch_invariant() -> bool:
    """Tells whether operators give a row the same bits in every batch: as ``set_batch_invariant`` said, else PEERLANE_BATCH_INVARIANT=1."""
    return _batch_invariant


def set_batch_invariant(enabled: bool) -> None:
    """Switches the batch-invariant mode of ``peerlane.ops`` on or off in this process, the same on all ranks.

    In the mode a row of a result has the same bits whatever other rows stand beside it, how many, and in which order. What has no kernel
    that keeps this raises UsageError. Captured graphs stay as they are."""
    global _batch_invariant
    _batch_invariant = enabled


def checks_calls() -> bool:
    """Tells whether ranks compare what they call before each call (PEERLANE_CHECK=1), which costs an exchange through the CPU."""
    return os.environ.get("PEERLANE_CHECK") == "1"


WAIT_LIMIT = "PEERLANE_WAIT_LIMIT_S"
CANDIDATE_WAIT_S = 10
"""after which waits of candidates' kernels trap; the supervisor has timeouts for the rest"""


def wait_limit_s() -> float | None:
    """Returns the seconds after which waits of kernels trap: PEERLANE_WAIT_LIMIT_S, which the evaluator sets; None: they follow the job."""
    given = os.environ.get(WAIT_LIMIT)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 43200:
        raise UsageError(f"{WAIT_LIMIT}={given}: expected a number of seconds of more than 0 and less than 43200")
    return seconds


ARENA_MEMORY = "PEERLANE_ARENA_MEMORY"


def arena_memory() -> str | None:
    """Returns how ranks share arenas' memory: PEERLANE_ARENA_MEMORY, ``vmm`` (it grows in place) or ``ipc``; None leaves it to the kit."""
    given = os.environ.get(ARENA_MEMORY)
    if given not in (None, "vmm", "ipc"):
        raise UsageError(f"{ARENA_MEMORY}={given}: expected vmm or ipc")
    return given


def runs_under_mps() -> bool:
    """Tells whether MPS is set up for this process by name, so that ranks that share a GPU run at once and do not take turns."""
    return bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY"))


_ROLES = "PEERLANE_ROLES"


def records_roles() -> bool:
    """Tells whether the kit's kernels record when each role works and waits (PEERLANE_ROLES=1), which slows them down a little."""
    return os.environ.get(_ROLES) == "1"


@contextlib.contextmanager
def recorded_roles() -> Iterator[None]:
    """Processes started in here record roles."""
    before = os.environ.get(_ROLES)
    os.environ[_ROLES] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ROLES]
        else:
            os.environ[_ROLES] = before


RANKS_PER_GPU = "PEERLANE_RANKS_PER_GPU"


def ranks_per_gpu() -> int:
    """Returns how many ranks may share this process's GPU, those of other groups included: PEERLANE_RANKS_PER_GPU, else 1."""
    given = os.environ.get(RANKS_PER_GPU, "1")
    if not given.isdecimal() or not int(given):
        raise UsageError(f"{RANKS_PER_GPU}={given}: expected a number of at least 1")
    return int(given)


def thunderkittens_root() -> Path | None:
    """Returns the ThunderKittens checkout that THUNDERKITTENS_ROOT names, for candidates that compile against it; None without one."""
    named = os.environ.get("THUNDERKITTENS_ROOT")
    return Path(named) if named and (Path(named) / "include").is_dir() else None


def library_home(library: str) -> Path | None:
    """Returns the installation of NCCL or NVSHMEM that NCCL_HOME or NVSHMEM_HOME names; None: the wheel's."""
    named = os.environ.get(f"{library}_HOME")
    return Path(named) if named else None


def nvshmem_environment(*, one_host: bool, shares_gpu: bool, sockets: bool) -> dict[str, str]:
    """Returns the variables that NVSHMEM needs before it starts. Those that are set already stay as they are, multicast apart.

    ``one_host``: all PEs are on this host, so no network is looked for. ``shares_gpu``: several PEs on one GPU, of which MPS gives none a
    percentage. ``sockets``: PEs can make the named sockets in /tmp by which NVSHMEM hands memory on; without them it uses CUDA IPC.
    """
    wanted = {"NVSHMEM_DISABLE_NCCL": "1"}
    if one_host:
        wanted |= {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo", "NVSHMEM_DISABLE_MNNVL": "1"}
    if shares_gpu:
        wanted["NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "1"
    if not sockets:
        wanted["NVSHMEM_DISABLE_CUDA_VMM"] = "1"
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | {"NVSHMEM_DISABLE_NVLS": "1"}


MULTICAST_OFF: Mapping[str, str] = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Variables that keep NCCL, torch and NVSHMEM from using NVLink multicast. NCCL else makes a multicast object by itself."""
MULTICAST_REASON = (
    "NVLink multicast, which is off here: a program that uses it can take shared GPUs out of service. PEERLANE_MULTICAST=allow "
    "allows it on a machine of your own"
)
_GPUS_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def multicast_environment() -> dict[str, str]:
    """Returns the variables that turn NVLink multicast off in all ranks; none where libraries use it as they do without peerlane.

    It is off if PEERLANE_MULTICAST is ``forbid``, and if that is not set and a visible GPU is part of one (MIG). Raises UsageError for
    another value than ``forbid`` and ``allow``.
    """
    wanted = os.environ.get("PEERLANE_MULTICAST")
    if wanted not in (None, "forbid", "allow"):
        raise UsageError(f"PEERLANE_MULTICAST={wanted!r}: expected forbid or allow")
    in_parts = any(re.search("MIG-|[0-9]:[0-9]", os.environ.get(name, "")) for name in _GPUS_VISIBLE)
    return dict(MULTICAST_OFF) if wanted == "forbid" or (wanted is None and in_parts) else {}


def multicast_allowed() -> bool:
    """Tells whether files that demand NVLink multicast are run: only where somebody allows it."""
    allowed = os.environ.get("PEERLANE_MULTICAST") == "allow" or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "0"
    return allowed and not multicast_environment()


def windows_refused(*, nvls: bool) -> str | None:
    """Returns why no window of NCCL may be made in processes whose NCCL may use NVLS (``nvls_allowed``); None if it may.

    The first symmetric window of a communicator makes a multicast object over the whole GPU, unless NCCL_NVLS_ENABLE=0 was set before.
    """
    if multicast_allowed() or not nvls:
        return None
    return f"symmetric windows of NCCL use {MULTICAST_REASON}. With PEERLANE_MULTICAST=forbid they run: all ranks get NCCL_NVLS_ENABLE=0"


def nvls_allowed(variables: Mapping[str, str]) -> bool:
    """Tells whether NCCL may use NVLink multicast (NVLS) in processes with these environment variables; by default it may."""
    return variables.get("NCCL_NVLS_ENABLE") != "0"


def torch_multicast_allowed(variables: Mapping[str, str]) -> bool:
    """Tells whether torch's symmetric memory has multicast pointers in processes with these variables; by default it has."""
    return variables.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1"


PROBLEM_FOLDERS = "PEERLANE_PROBLEMS"


def problem_folders() -> tuple[Path, ...]:
    """Folders of a user's own problems: PEERLANE_PROBLEMS, which lists them as PATH lists its own, and ``--problems`` adds to."""
    named = os.environ.get(PROBLEM_FOLDERS, "")
    return tuple(dict.fromkeys(Path(os.path.abspath(folder)) for folder in named.split(os.pathsep) if folder))


def service_token_file() -> Path | None:
    """Returns the file that PEERLANE_TOKEN_FILE names, whose first word is the token of a service; None without one."""
    file = os.environ.get("PEERLANE_TOKEN_FILE")
    return Path(file) if file else None


def service_token() -> str | None:
    """Returns the token of a service that judges: PEERLANE_TOKEN, else the first word of the file that PEERLANE_TOKEN_FILE names."""
    if token := os.environ.get("PEERLANE_TOKEN"):
        return token
    if (file := service_token_file()) is None:
        return None
    try:
        words = file.read_text(encoding="utf-8").split()
    except OSError as error:
        raise UsageError(f"PEERLANE_TOKEN_FILE={file}: cannot be read: {error.strerror}") from None
    if not words:
        raise UsageError(f"PEERLANE_TOKEN_FILE={file}: expected a file that holds a token, got an empty one")
    return words[0]


def forget_service_token() -> None:
    """Takes the token out of this process's environment, so that no process that it starts inherits it."""
    os.environ.pop("PEERLANE_TOKEN", None)


_NEEDED_BY_RANKS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|CC|CXX|CFLAGS|CXXFLAGS|CPATH|LIBRARY_PATH|MAX_JOBS|THUNDERKITTENS_ROOT|VIRTUAL_ENV|XDG_CACHE_HOME|"
    r"(LD|PYTHON|CUDA|CUBLAS|CUDNN|NVCC|NVRTC|NVIDIA|NVSHMEM|NCCL|GLOO|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|PEERLANE)_?\w*"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH", re.IGNORECASE)


def passes_to_ranks(name: str) -> bool:
    """Tells whether confined ranks get an environment variable: one that Python, torch, CUDA or a compiler reads, and that is no secret."""
    return _NEEDED_BY_RANKS.fullmatch(name) is not None and _SECRET.search(name) is None


def shared_gpu_environment(label: str, *, one_host: bool = True) -> dict[str, str]:
    """Returns the variables that a rank which shares its GPU needs before CUDA, NCCL and symmetric memory start.

    NCCL refuses two ranks of one host on one GPU, so every rank gets a host name of its own: ``label``. NCCL then uses sockets.
    """
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if one_host else {}
    return {"NCCL_HOSTID": label, **local, **MULTICAST_OFF, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


VIRTUAL_HOST = "PEERLANE_VIRTUAL_HOST"
"""names the node of a virtual cluster that a process is in"""


def virtual_host() -> str:
    """Returns the node of a virtual cluster that this process is in; empty where hosts are real."""
    return os.environ.get(VIRTUAL_HOST, "")


def cluster_environment(node: int) -> dict[str, str]:
    """Returns the variables that a rank in this node of a virtual cluster needs before CUDA, NCCL and gloo start.

    NCCL takes ranks with different names of their hosts for ranks of different hosts, and talks to them through sockets.
    """
    name = f"node{node}"
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    return {VIRTUAL_HOST: name, "NCCL_HOSTID": name, **local}


@dataclass(frozen=True)
class Deadlines:
    """Timeouts of the phases of an evaluation, in seconds, after which the whole rank group is killed."""

    spawn: float = 120.0
    build: float = 300.0
    """for all that a process compiles; apart from what it is asked meanwhile"""
    load: float = 60.0
    """for the import of a candidate; where it computes, in CPU seconds, which on a busy machine may take four times as long"""
    first_call: float = 90.0
    calls: float = 30.0
    """for one request that calls the candidate at rest, under stress or to be timed; more where the reference is slow or the node busy"""
    quiet: float = 5.0
    """for one call at rest, if its ranks make no progress: no page fault, no read or write, no wait that ends. Only evaluations with a time
    limit have it, and at least a twelfth of that limit: such a call could not be repeated often enough"""
    exit: float = 20.0
    """until the ranks have ended by themselves, after all calls"""
    trusted: float = 120.0
    """for one request to the trusted ranks, which run our code only: input generation, the reference, the oracle"""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
                raise UsageError(f"deadline {name}={seconds!r}: expected a positive number of seconds")

    def times(self, factor: float) -> Self:
        """Returns these timeouts, each so many times as long."""
        return replace(self, **{name: seconds * factor for name, seconds in vars(self).items()})

    def with_calls(self, seconds: float) -> Self:
        """Returns these timeouts, with another one for everything that calls the candidate."""
        return replace(self, first_call=seconds, calls=seconds)


@dataclass(frozen=True)
class StressRules:
    """Rules by which calls that were right at rest are made to race; see docs/judging.md for the reasons."""

    calls: int = 100
    """back to back, per case; fewer where ``budget_s`` does not do for them"""
    budget_s: float = 0.5
    """The seconds of stress in one evaluation, all its cases together. After them, no pass begins in a case that has had ``min_calls``."""
    min_calls: int = 20
    overtime_s: float = 1.5
    """for these; after it, two passes must do, the second of them a late one"""
    min_slots: int = 10
    """per pass, however long a call takes, where memory holds them"""
    max_slots: int = 25
    """so that there are a few passes"""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of what is prepared ahead of its use: warm rank groups and builds."""

    warm_groups: int = 2
    """rank groups that wait, warm, for the next candidates; a timed candidate takes two, and timing waits for starts"""
    timed_alone: bool = True
    """nothing is timed while ranks start, which takes GPUs and cores; else they are waited for where a round turns out to be disturbed"""
    builds: int | None = None
    """candidates that are compiled at a time before it is their turn, each in a process of its own; None: as many as cores allow"""
    judged_at_a_time: int | None = None
    """candidates that are judged side by side where nothing is timed; None: one on GPUs, elsewhere as many as cores allow, hangs apart"""
    start_attempts: int = 3
    """to get a rank group up, before an evaluation ends as harness_error"""
    back_off_s: float = 1.0
    """before the second attempt; twice as long before every further one"""


TIMING_PROTOCOL = 2
"""The version of the timing protocol. Figures of different versions are never in one mean; docs/judging.md has their differences."""
Protocol = Literal["peerlane", "kittens"]
"""the evaluator's own timing protocol, and the public one of ParallelKittens"""


def timing_protocol(protocol: Protocol) -> int | Literal["kittens"]:
    """Returns what results name a protocol by: the version of the evaluator's own, or the name of the other one."""
    return TIMING_PROTOCOL if protocol == "peerlane" else protocol


@dataclass(frozen=True)
class TimingRules:
    """The timing protocol. docs/judging.md has the table of these settings, which a test compares with this one."""

    min_block_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 5_000.0, "graph": 2_000.0})
    """The shortest reference block, by launch mode: the hand-off and the host's hiccups must be small beside it."""
    swaps: int = 2
    """slot swaps per block: each catches a candidate that works ahead"""
    min_rounds: int = 9
    """The fewest rounds of timing that ends within its budget: fewer have no meaningful interval."""
    baseline_s: float = 1.0
    """The seconds of timing the reference against itself, per mode: longer hardly narrows the group offset."""
    target_half_width: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.04, "graph": 0.015})
    """The half width of the ratio's interval at which timing ends, by launch mode."""
    budget_s: float = 5.0
    """The seconds of timing of a launch mode."""
    slowdown_limit: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.15, "graph": 0.05})
    """by which the reference may be slower beside the candidate, by launch mode: noise seldom exceeds it"""
    offset_half_width: float = 0.01
    """The half width of the group offset below which the speedup is corrected for it on virtual nodes: a rough estimate would add noise."""


SELFTEST_DEADLINES = Deadlines(load=12.0, exit=4.0).with_calls(6.0)
"""Deadlines for the corpus, of which some candidates never return."""
SELFTEST_RULES = TimingRules(budget_s=0.3, min_rounds=5, baseline_s=0.2)
"""Enough to tell a forged time from a true one."""
SELFTEST_POOL_SETTINGS: Mapping[str, PoolSettings] = {
    "cuda": PoolSettings(warm_groups=8, timed_alone=False),
    "cpu": PoolSettings(warm_groups=4, judged_at_a_time=1),
}
"""Settings by device. Most of the corpus fails at once, and its ranks with it. Ranks on GPUs take seconds to start, and verdicts need no
exact speeds."""
