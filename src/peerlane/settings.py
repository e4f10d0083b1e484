"""The one place that reads environment variables and holds defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from peerlane.errors import UsageError

ARCHITECTURE = "9.0a"
"""What torch extensions are compiled for, as torch names it, where the environment does not say."""


def cache_dir() -> Path:
    """Where compiled kernels and measured ceilings are kept: PEERLANE_CACHE_DIR, else peerlane/ in the user's cache folder."""
    if chosen := os.environ.get("PEERLANE_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerlane"


def candidate_caches() -> Path:
    """Where what confined candidates compile is kept, a folder for each; see :mod:`peerlane.evaluate.sandbox.caches`."""
    return cache_dir() / "candidates"


def has_sm_partition() -> bool:
    """True where MPS gives this process a fixed share of the SMs (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE): the device then reports its share."""
    return os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100") not in ("", "100")


PROBLEM_FOLDERS = "PEERLANE_PROBLEMS"


def problem_folders() -> tuple[Path, ...]:
    """Folders of a user's own problems: PEERLANE_PROBLEMS, which lists them as PATH lists its own, and ``--problems`` adds to."""
    named = os.environ.get(PROBLEM_FOLDERS, "")
    return tuple(Path(os.path.abspath(folder)) for folder in named.split(os.pathsep) if folder)


_NEEDED_BY_RANKS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TERM|TMPDIR|CC|CXX|CFLAGS|CXXFLAGS|CPATH|LIBRARY_PATH|MAX_JOBS|VIRTUAL_ENV|XDG_CACHE_HOME|"
    r"(LD|PYTHON|CUDA|CUBLAS|CUDNN|NVCC|NVRTC|NVIDIA|NVSHMEM|NCCL|GLOO|TORCH|PYTORCH|TRITON|OMP|MKL|OPENBLAS|PEERLANE)_?\w*"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH", re.IGNORECASE)


def passes_to_ranks(name: str) -> bool:
    """True for an environment variable that confined ranks get: one that Python, torch, CUDA or a compiler reads, and that is no secret."""
    return _NEEDED_BY_RANKS.fullmatch(name) is not None and _SECRET.search(name) is None


def shared_gpu_environment(label: str, *, one_host: bool = True) -> dict[str, str]:
    """What a rank that shares its GPU with other ranks needs in its environment, before CUDA, NCCL and symmetric memory start.

    NCCL refuses two ranks of one host on one GPU, so every rank gets a host name of its own: ``label``. NCCL then uses sockets.
    """
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if one_host else {}
    return {
        "NCCL_HOSTID": label,
        **local,
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


@dataclass(frozen=True)
class Deadlines:
    """How long each phase of an evaluation may take, in seconds, before the whole rank group is killed."""

    spawn: float = 120.0
    build: float = 300.0
    load: float = 60.0
    first_call: float = 90.0
    correctness: float = 30.0
    stress: float = 30.0
    timing: float = 30.0
    exit: float = 5.0
    trusted: float = 120.0
    """for one request to the trusted ranks, which run our code only: input generation, the reference, the oracle"""

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
                raise UsageError(f"deadline {name}={seconds!r}: expected a positive number of seconds")

    def with_calls(self, seconds: float) -> Self:
        """The same, with another deadline for everything that calls the candidate."""
        return replace(self, first_call=seconds, correctness=seconds, stress=seconds, timing=seconds)


@dataclass(frozen=True)
class StressRules:
    """How calls that were right at rest are made to race; see docs/evaluating.md for the reasons."""

    calls: int = 100
    """back to back, per case; fewer where ``budget_s`` does not do for them"""
    budget_s: float = 0.5
    """of one evaluation, all its cases together; no pass begins after it in a case that has had ``min_calls``"""
    min_calls: int = 20
    overtime_s: float = 1.5
    """for these; after it, two passes must do, the second of them a late one"""
    min_slots: int = 10
    """per pass, however long a call takes; where memory does not hold them, ``fewest_slots``"""
    fewest_slots: int = 3
    max_slots: int = 25
    """so that there are a few passes"""
    max_bytes: int = 512 << 20
    """of a pass's inputs on one rank, and of its outputs"""
    delayed_share: float = 0.25
    """of the calls; before these, one rank waits"""
    shortest_delay_us: float = 10.0
    longest_delay_us: float = 10_000.0
    late_share: float = 2 / 3
    """of the passes behind the first two, and the second: in them every call's contents come to its slot right before it"""
    sm_contention_probability: float = 0.5
    """of the passes on GPUs: there an eighth of the calls runs beside a kernel that holds SMs"""
    time_slicing_probability: float = 2 / 3
    """of the passes on GPUs behind the first two, which tell how long one takes: in them one GPU is shared with a trusted rank, in time
    slices. Quick calls make four passes, so eight of nine cases with such calls have one that is sliced"""
    shortest_time_slicing_s: float = 0.01
    """for as long as the pass before took, but not below this: slices last milliseconds, and calls must meet the ends of some"""
    longest_time_slicing_s: float = 0.04
    """nor beyond this: slow calls meet enough of them in that time, and there is ``budget_s`` for all passes"""


@dataclass(frozen=True)
class PoolSettings:
    """What is kept ready ahead of its use, and how hard it is tried to get it."""

    warm_groups: int = 2
    """rank groups that wait, warm, for the next candidates; a timed candidate takes two"""
    refill_below: int = 2
    """fewer warm groups than these, and all that are missing are started at once: timing waits for starts, and so waits seldom"""
    timed_alone: bool = True
    """nothing is timed while ranks start, which takes GPUs and cores; else they are waited for where a round turns out to be disturbed"""
    builds: int = 2
    """candidates that are compiled, each in a process of its own, before it is their turn"""
    start_attempts: int = 3
    """to get a rank group up, before an evaluation ends as harness_error"""
    back_off_s: float = 1.0
    """before the second attempt; twice as long before every further one"""


@dataclass(frozen=True)
class TimingRules:
    """The protocol of speed; see docs/evaluating.md for the reasons."""

    min_block_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 2_500.0, "graph": 1_000.0})
    """by launch mode: eager calls vary more. Longer blocks would tell little more: a core is fast or slow for all of one"""
    max_block_us: float = 12_000.0
    usual_slots: int = 12
    """per block, however long a call takes, where ``max_block_us`` and memory allow"""
    max_slots: int = 160
    eager_parts: int = 4
    """of a timed block, each from another core, where there are calls enough. How fast a core calls hardly changes while a block takes its
    time, and differs from block to block by 10 to 25 %: a block on several cores tells more than one on a single core. More parts tell more
    yet, but moving takes time in which there could be more blocks"""
    min_slots: int = 3
    arena_share: float = 0.06
    """of the device's memory, for the inputs of one case; outputs get as much again"""
    warm_calls: int = 20
    warm_s: float = 0.3
    """of warm-up, if that comes before ``warm_calls``"""
    max_warm_calls: int = 40
    warm_agreement: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.1, "graph": 0.02})
    """of the times of two blocks, by launch mode"""
    min_rounds: Mapping[str, int] = field(default_factory=lambda: {"eager": 9, "graph": 6})
    """by launch mode: eager calls vary more"""
    patience_s: float = 1.0
    """of a race; after it ``fewest_rounds`` do"""
    fewest_rounds: int = 6
    usual_s: float = 1.5
    """of a candidate's race; after it an interval that is twice as wide as wanted does"""
    max_rounds: int = 45
    """of a candidate; twice as many where the interval is more than twice as wide as wanted by then"""
    baseline_rounds: int = 6
    """of the reference against itself: more would tell little of two places, next to how far they can lie apart"""
    group_offset_spread: float = 0.01
    """how far the times of two groups on the same GPUs lie apart, as a standard deviation of their ratio; what two races of the reference
    against itself had in common was 0.2 to 1.2 %, on nodes of 2 and 4 H200"""
    rounds_per_capture: int = 5
    """at most"""
    race_spread: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.0075, "graph": 0.005})
    """by launch mode, how far races of the same calls lie apart beyond what their rounds show, as a standard deviation of the ratio: with
    graphs for a race has few captures, with eager calls for it ends when its interval happens to be narrow. Without this, intervals of the
    reference against itself held 1 in 59 of 69 races with graphs (4 H200s), and in 75 of 87 with eager calls (2 H200s)"""
    place_spread_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.0, "graph": 0.11})
    """by launch mode, how far the middle of a side's calls in a race lies from that of many races, as a standard deviation, for where the
    driver put its graphs, if these were captured once; over the root of how often they were: of 24 captures two in a row lay 0.08 us apart,
    five 0.06, nine 0.03 (one H200)"""
    target_half_width: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.025, "graph": 0.012})
    """of the ratio of a race, by launch mode; a speedup joins two races"""
    budget_s: float = 5.0
    usual_shares: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {"eager": (0.1, 0.3), "graph": (0.25, 0.75)})
    """by launch mode: the mean of the calls between these quantiles stands for all. The host holds up many eager calls; on busy hosts such
    a mean varies by a fifth less than the first decile alone"""
    skew_margin: float = 1.15
    """on how unequal the reference's calls within a block are (mean over usual call): a candidate beyond it is scored by the mean"""
    hidden_us: float = 2_000.0
    """by how much more than next to the reference the outer clock may exceed the events in a candidate's usual block: what it has loaded
    may lengthen its hand-off"""
    stretch_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 20_000.0, "graph": 10_000.0})
    """by launch mode, of the reference's calls, in a stretch that only the outer clock times; graphs, with their head start, take longer"""
    max_stretch_calls: int = 600
    """of short calls: graphs of these take several times as long as their calls to launch, and the reference has a stretch before every
    candidate"""
    baseline_stretches: Mapping[str, int] = field(default_factory=lambda: {"eager": 3, "graph": 1})
    """of the reference, before the candidate is loaded, by launch mode: eager ones differ by milliseconds"""
    min_stretches: int = 3
    max_stretches: int = 9
    hidden_share: float = 0.1
    """of the reference's call, with what passes behind it, that a candidate's may take in a stretch beyond what its events say; as much
    again at most where the reference's leave open what these say"""
    locked_slack_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 20.0, "graph": 5.0})
    """by launch mode, by how much more than the reference's a candidate's locked calls may exceed their events by the outer clock: an eager
    one may have more or less of its host's work ahead"""
    locked_slack_share: float = 0.05
    """of the reference's call, or of the candidate's where that is longer, that they may exceed them besides"""
    locked_output_slack_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 8.0, "graph": 0.0})
    """by launch mode, and for every output but one: an eager call's host copies them one by one, beside a device that is busy or is not"""
    prepared_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 8.0, "graph": 4.0})
    """by launch mode; by more than this, and more than ``prepared_share``, slower than its others beside the reference's, locked calls show
    that others are prepared"""
    prepared_share: float = 0.15
    around_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 40.0, "graph": 5.0})
    """by launch mode, by how much what lies around the reference's locked calls may differ between its own race and the candidate's; and
    by how much longer a gap beside a locked call may be than the reference's"""
    around_share: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.2, "graph": 0.05})
    """of the reference's call that it may differ by besides"""
    gap_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 2.0, "graph": 4.0})
    """by launch mode, by how much longer than the reference needs there a gap between two calls may be, and not count as part of a call.
    Graphs that are begun differ: how soon they are is the driver's doing"""
    gap_share: float = 0.1
    """of what it needs there, besides. Of references against themselves, on one H200, the usual gaps were longer by 7 % at most in 57 of
    58 races in eager mode (by 12 % in one, of calls of 2.6 ms), and by 2 % in 50 with graphs"""
    middle_slack: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.1, "graph": 0.05})
    """by launch mode, by how much a candidate may seem faster than in the middle round. References against themselves, on 1, 2 and 4 H200s,
    did by 4.9 % at most in 255 races in eager mode, and by 1.9 % in 207 with graphs"""
    replayed_share: float = 0.8
    """of what the same candidate's call takes as a graph that an eager one takes at least. Sides of
    368 races on 1, 2 and 4 H200s that were timed in both modes took 0.87 of it at least"""
    drift_share: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.25, "graph": 0.03})
    """by launch mode, by how much longer the reference may take beside the candidate than before, and count as that slow. In none of 300
    races with graphs on 2 and 4 H200s it took as much longer; eager calls depend on what else the host does: in 20 of 420, by up to 61 %"""
    drift_us: Mapping[str, float] = field(default_factory=lambda: {"eager": 0.0, "graph": 0.3})
    """by launch mode, by how much besides: where the driver puts graphs"""
    compared_share: float = 0.25
    locked_calls: int = 1
    """per block of a candidate's that counts: many blocks tell what such calls take, and the others are what is timed"""
    late_changes: int = 2
    """per stretch, of calls that are compared: contents change places"""
    judging_s: float = 0.1
    """for comparing the outputs of a race; where that does not do for the share, fewer are compared, chosen over all rounds, but in no
    race none"""
    max_waiting_bytes: int = 4 << 30
    """of snapshots that wait for the end of a race to be compared"""


SELFTEST_DEADLINES = Deadlines(load=12.0, exit=4.0).with_calls(6.0)
"""For the corpus, some of which never returns."""
SELFTEST_RULES = TimingRules(budget_s=0.3, min_rounds={"eager": 5, "graph": 5}, max_rounds=7, baseline_rounds=5, warm_s=0.1, judging_s=0.2)
"""Enough to tell a forged time from a true one."""
SELFTEST_POOL_SETTINGS: Mapping[str, PoolSettings] = {
    "cuda": PoolSettings(warm_groups=8, refill_below=8, timed_alone=False),
    "cpu": PoolSettings(warm_groups=4, refill_below=4),
}
"""By device. Most of the corpus fails at once, and takes its ranks along. Ranks on GPUs take seconds to start, and verdicts need no exact
speeds."""
