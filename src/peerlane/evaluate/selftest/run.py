"""Judges the corpus in one run: shuffled, with legitimate candidates in between, which must not be affected by what came before them."""

import math
import os
import random
import shutil
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peerlane.common.place import Device, Place
from peerlane.common.version import __version__
from peerlane.evaluate.candidates import CandidateFile, candidate_file, reference_candidate
from peerlane.evaluate.evaluator import Progress, Silent, evaluate
from peerlane.evaluate.node import choose_isolation
from peerlane.evaluate.plan import EvaluationPlan
from peerlane.evaluate.selftest.busy_cores import busy_cores
from peerlane.evaluate.selftest.outcome import FILE, Outcome, identity, read_outcomes
from peerlane.evaluate.selftest.side_by_side import RunResources, divide, evaluate_side_by_side
from peerlane.evaluate.selftest.table import Corpus, Entry
from peerlane.hardware.topology import discover
from peerlane.hardware.virtual_node import share_gpus
from peerlane.results.json_lines import append_lines, make_appendable
from peerlane.results.result import Result
from peerlane.sandbox.isolation import Tier
from peerlane.settings import SELFTEST_DEADLINES, SELFTEST_POOL_SETTINGS, SELFTEST_RULES, Deadlines, PoolSettings

MOST_LANES = 8
FEWEST_PER_LANE = 8
"""candidates; ranks take seconds to start, so that fewer are done sooner by one after the other"""
BAD_PER_GOOD = 3
"""The most cheats and bugs follow each other before a legitimate candidate must show that nothing is left of them."""


@dataclass(frozen=True)
class SelftestPlan:
    """The plan of a selftest.

    Attributes:
        corpus: where the candidates are; they are copied, for some of them write beside themselves.
        entries: of the corpus.
        device: those that are not judged on it are left out.
        repeat: how many times each is judged.
        out: folder of ``selftest.jsonl``, whose outcomes count towards ``repeat``; None keeps nothing.
        isolation: as in :class:`EvaluationPlan`; entries that are promised from a higher tier on are left out.
        ranks_per_gpu, timeout, deadlines: as in :class:`EvaluationPlan`.
        load: how many processes keep cores busy meanwhile. Outcomes in ``out`` count only with the same load and timeout.
    """

    corpus: Corpus
    entries: tuple[Entry, ...]
    device: Device
    repeat: int = 1
    out: Path | None = None
    isolation: Tier | None = None
    ranks_per_gpu: int = 0
    timeout: float | None = None
    deadlines: Deadlines = SELFTEST_DEADLINES
    load: int = 0


def selftest(plan: SelftestPlan, progress: Progress | None = None) -> list[tuple[Entry, Outcome]]:
    """Runs the plan; returns all outcomes of its candidates, those found in ``plan.out`` included, oldest first. Each is stored as it
    comes.

    Legitimate candidates that stand between others are among them, whether the plan names them or not.
    """
    with tempfile.TemporaryDirectory(prefix="peerlane-selftest-") as name, busy_cores(plan.load):
        folder = Path(name) / plan.corpus.folder.name
        shutil.copytree(plan.corpus.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
        folder.parent.chmod(0o755)  # ranks may run as another user
        corpus = replace(plan.corpus, folder=folder)
        return list(_Run(replace(plan, corpus=corpus), progress or Silent()).outcomes())


class _Run:
    """One run: the candidates' files, the outcomes that are stored already, and the progress to report to."""

    def __init__(self, plan: SelftestPlan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.files = {entry.file: _candidate(plan.corpus, entry) for entry in plan.corpus.entries}
        self.tier = choose_isolation(
            EvaluationPlan(
                list(self.files.values()),
                world_sizes=tuple({entry.world_size for entry in plan.entries}),
                device=plan.device,
                isolation=plan.isolation,
                ranks_per_gpu=plan.ranks_per_gpu,
            )
        ).tier
        self.judged = [entry for entry in plan.entries if entry.accepted(plan.device) and entry.isolation <= self.tier]
        self.path = None if plan.out is None else plan.out / FILE

    def outcomes(self) -> Iterator[tuple[Entry, Outcome]]:
        """Returns the outcomes that are stored, then those that are missing. Raises :class:`UsageError` if no more can be stored."""
        if self.path is not None:
            make_appendable(self.path)
        asked = (self.plan.device, self.plan.load, self.plan.timeout)
        stored = [item for item in read_outcomes(self.path) if (item.device, item.load, item.timeout) == asked] if self.path else []
        kept = attributed(self.plan.corpus, [item for item in stored if item.evaluator_version == __version__])
        yield from kept
        done = Counter(item.identity for _, item in kept)
        missing: dict[int, list[Entry]] = defaultdict(list)  # by world size: what can be judged in one session
        for entry in self.judged:
            times = self.plan.repeat - done[self._identity(entry)] // entry.runs
            missing[entry.world_size] += [entry] * max(times, 0)
        for world_size, due in missing.items():
            if due:
                yield from self._judge(world_size, due)

    def _identity(self, entry: Entry) -> tuple[str, ...]:
        sha256 = self.files[entry.file].sha256
        return identity(__version__, sha256, entry.world_size, self.plan.device, entry.track, self.tier)

    def _controls(self) -> list[Entry]:
        """Returns legitimate candidates that may stand between others: those of the plan where it has some."""

        def suitable(entries: Sequence[Entry]) -> list[Entry]:
            return [entry for entry in entries if entry.kind == "legitimate" and "correct" in entry.accepted(self.plan.device)]

        return suitable(self.judged) or suitable([entry for entry in self.plan.corpus.entries if entry.quick])

    def _resources(self, world_size: int, due: int) -> list[RunResources]:
        """Returns the resources of runs side by side. On GPUs there are as many as there is work for: few of them need speeds."""
        gpus = [gpu.uuid for gpu in discover().gpus] if Place.of(self.plan.device).has_gpus else []
        node = share_gpus(world_size, len(gpus), self.plan.ranks_per_gpu or None)
        most = min(MOST_LANES, due // FEWEST_PER_LANE)
        return divide(gpus, os.sched_getaffinity(0), world_size, most, 0 if node is None else node.gpus)

    def _judge(self, world_size: int, due: list[Entry]) -> list[tuple[Entry, Outcome]]:
        dice, resources = random.SystemRandom(), self._resources(world_size, len(due))
        controls = self._controls()
        sequences = [order(share, controls, dice) for share in deal(due, len(resources), self.plan.device, dice)]
        recorders = [_Recorder(sequence, self.plan, self.path, self.progress) for sequence in sequences]
        plans = [self._plan(world_size, sequence) for sequence in sequences]
        if len(resources) == 1:
            evaluate(plans[0], recorders[0])
        else:
            self.progress.started(sum(map(len, sequences)), 0)
            self.progress.note(f"{len(resources)} runs side by side, on {len(resources[0].gpus)} GPUs each")
            evaluate_side_by_side(list(zip(resources, plans, recorders, strict=True)))
        return [outcome for recorder in recorders for outcome in recorder.outcomes]

    def _plan(self, world_size: int, sequence: list[Entry]) -> EvaluationPlan:
        return EvaluationPlan(
            candidates=[self.files[entry.file] for entry in sequence],
            presets=("small",),
            world_sizes=(world_size,),
            device=self.plan.device,
            isolation=self.tier,
            ranks_per_gpu=self.plan.ranks_per_gpu,
            pool_settings=SELFTEST_POOL_SETTINGS.get(self.plan.device, PoolSettings()),
            deadlines=self.plan.deadlines,
            timeout=self.plan.timeout,
            rules=SELFTEST_RULES,
        )


def attributed(corpus: Corpus, outcomes: Sequence[Outcome]) -> list[tuple[Entry, Outcome]]:
    """Returns the outcomes of files that are in the corpus as they were judged, with their entries."""
    versions = {item.evaluator_version for item in outcomes}
    by_sha256 = {_candidate(corpus, entry, version).sha256: entry for version in versions for entry in corpus.entries}
    return [(by_sha256[item.sha256], item) for item in outcomes if item.sha256 in by_sha256]


def _candidate(corpus: Corpus, entry: Entry, version: str = __version__) -> CandidateFile:
    path = corpus.path(entry)
    candidate = replace(reference_candidate(version), problem=entry.problem) if path is None else candidate_file(path)
    return replace(candidate, track=entry.track)


def deal(due: Sequence[Entry], runs: int, device: Device, dice: random.Random) -> list[list[Entry]]:
    """Shuffles the work, so that every run gets as many as the others of the entries that hang, and of those that are timed."""
    mixed = sorted(dice.sample(due, len(due)), key=lambda entry: entry.accepted(device))
    return [mixed[number::runs] for number in range(runs)]


def order(due: Sequence[Entry], controls: Sequence[Entry], dice: random.Random) -> list[Entry]:
    """Returns the work in random order, legitimate candidates spread evenly over the others, and more of them (``controls``) where those
    are too few. Entries with several runs have them in a row."""
    bad = [entry for entry in due if entry.kind != "legitimate"]
    good = [entry for entry in due if entry.kind == "legitimate"]
    dice.shuffle(bad)
    missing = math.ceil(len(bad) / BAD_PER_GOOD) - len(good)
    if controls:
        good += [dice.choice(controls) for _ in range(missing)]
    dice.shuffle(good)
    sequence: list[Entry] = []
    for number, entry in enumerate(bad):
        sequence += [entry] * entry.runs
        # The last one stands behind all others.
        sequence += good[number * len(good) // len(bad) : (number + 1) * len(good) // len(bad)]
    return sequence if bad else good


class _Recorder:
    """Progress that turns every result into an outcome and stores it, then passes it on."""

    def __init__(self, sequence: Sequence[Entry], plan: SelftestPlan, path: Path | None, shown: Progress) -> None:
        self._waiting: dict[str, deque[Entry]] = defaultdict(deque)
        for entry in sequence:
            self._waiting[entry.file].append(entry)
        self._plan, self._path, self._shown = plan, path, shown
        self.outcomes: list[tuple[Entry, Outcome]] = []
        self.started, self.phase, self.note = shown.started, shown.phase, shown.note

    def finished(self, result: Result) -> None:
        """Stores the outcome."""
        entry = self._waiting[result.candidate.name].popleft()
        before = self.outcomes[-1][1].file if self.outcomes else None
        outcome = Outcome.of(entry, result, before, load=self._plan.load, timeout=self._plan.timeout)
        if self._path is not None:
            append_lines(self._path, outcome.model_dump_json().encode())
        self.outcomes.append((entry, outcome))
        self._shown.finished(result)
