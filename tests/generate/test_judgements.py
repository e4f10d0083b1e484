"""Results are joined with samples by the candidate's hash, and results of other settings are told apart."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from peerlane.generate.reply import Status
from peerlane.generate.run_folder import RunFolder, RunSettings, SampleKey, SampleRecord
from peerlane.generate.samples import NO_CODE, NOT_JUDGED, Setting, Speedup, Usage
from peerlane.results.result import CandidateInfo, ProblemInfo
from sample_results import VIRTUAL, on_cpu, result, wrong

SOURCE = "def solution(*args): ..."
CANDIDATE = CandidateInfo(name="001/0", sha256=hashlib.sha256(SOURCE.encode()).hexdigest(), backend="pytorch")


@pytest.mark.parametrize(
    "change",
    [
        {"track": "custom"},
        {"preset": "small"},
        {"world_size": 2},
        {"cases": "timed"},
        {"environment": VIRTUAL},
        {"problem": ProblemInfo(id=1, slug="allreduce", variant="pkb")},
    ],
)
def test_other_settings_are_told_apart(change: dict[str, Any]) -> None:
    assert Setting.of(wrong(**change)) != Setting.of(wrong()) != Setting.of(on_cpu())


def test_samples_get_the_result_of_their_candidate(tmp_path: Path) -> None:
    run = RunFolder.open_or_create(tmp_path, RunSettings(kind="generate", model="m"))
    for sample, source in enumerate((SOURCE, None, "other")):
        status: Status = "code" if source is not None else "no_code"
        run.write_sample(SampleRecord.of(SampleKey(1, sample), status, Usage(calls=1), seconds=1.0, stop_reason="stop"), "reply", source)
    timed = result(candidate=CANDIDATE)
    results = [
        timed,
        result(candidate=CANDIDATE, modes=("eager",), speed=timed.speed[:1]),
        wrong(candidate=CANDIDATE, preset="small"),
        result(),
    ]
    assert run.settings_judged(results) == [Setting.of(timed), Setting.of(results[2])]
    samples = run.samples(results, Setting.of(timed))
    assert [sample.verdict for sample in samples] == ["correct", NO_CODE, NOT_JUDGED]
    measured = timed.speed_in("eager")
    assert measured is not None and list(samples[0].speedups) == ["eager", "graph"]
    assert samples[0].speedups["eager"] == Speedup(measured.speedup.low, measured.speedup.median, measured.speedup.high)
    assert {sample.verdict for sample in run.samples(results, None)} == {NOT_JUDGED, NO_CODE}
