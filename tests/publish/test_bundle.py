"""Bundles hold what they say, hostile ones are refused, and verification tells claims that hold from claims that do not."""

from pathlib import Path

import pytest

from command_line import Peerlane
from peerlane.cli.exit_codes import ExitCode
from peerlane.errors import UsageError
from peerlane.generate.run_folder import RunFolder
from peerlane.publish.bundle import read_bundle, write_bundle
from peerlane.publish.gather import gather
from peerlane.publish.page import render_page
from peerlane.publish.verify import Verification, compare, verification, verification_file
from peerlane.results.reader import read_results
from peerlane.results.result import Result
from peerlane.results.verdict import Correct
from sample_results import ENVIRONMENT, hung, measured, on_cpu, result, text_of, wrong
from sample_runs import make_run

ALL_REDUCE = """\
import torch
import torch.distributed as dist


def solution(tensor):
    total = tensor.float().clone()
    dist.all_reduce(total)
    return total.to(tensor.dtype)
"""


def timed(eager: float, **changes: object) -> Result:
    """A result with this speedup in eager mode."""
    return result(modes=("eager",), speed=(measured("eager", 100.0, 100.0 / eager),), **changes)


OTHER_NODE = {"environment": {**ENVIRONMENT, "driver": "570.1"}}


@pytest.mark.parametrize(
    ("claim", "check", "agreement", "said"),
    [
        (timed(2.0), timed(1.95), "confirmed", ""),
        (timed(2.0), timed(3.0), "confirmed", ""),
        (timed(2.0), timed(1.2), "differs", "eager: claimed 2.00 [1.96, 2.04], found 1.20 [1.18, 1.22]"),
        (timed(2.0), timed(1.2, **OTHER_NODE), "verdict_only", "judged on 4x NVIDIA H200, NVLink, driver 570"),
        (timed(2.0), on_cpu(), "verdict_only", "judged on CPU ranks"),
        (timed(2.0, timing_protocol="kittens"), timed(1.2), "verdict_only", "timed by protocol kittens, judged by 1"),
        (timed(2.0), hung(), "differs", "claimed correct, found hang: first_call"),
        (timed(2.0), hung(flags=("overloaded",)), "not_judged", "hang: first_call"),
        (wrong(), wrong(**OTHER_NODE), "confirmed", ""),
        (wrong(), result(), "differs", "claimed wrong_result, found correct"),
        (on_cpu(), on_cpu(), "confirmed", ""),
    ],
)
def test_a_check_confirms_or_contradicts(claim: Result, check: Result, agreement: str, said: str) -> None:
    found = compare(claim, check)
    assert (found.agreement, said in found.said) == (agreement, True), found


def test_a_bundle_is_a_run_that_anybody_can_read(tmp_path: Path) -> None:
    results = make_run(tmp_path / "run", "model-a", (1, 2, 3), 2, kind="agent")
    (tmp_path / "run" / "001" / "prompt.md").write_text("secret")
    manifest = write_bundle(tmp_path / "run", tmp_path / "a.zip")
    assert write_bundle(tmp_path / "run", tmp_path / "b.zip") == manifest
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert manifest.author == "model-a" and manifest.results == len(results) and not any("prompt" in name for name in manifest.files)
    run = read_bundle(tmp_path / "a.zip").unpack(tmp_path / "there")
    mine = RunFolder.open(tmp_path / "run")
    assert [run.sample(key) for key in run.sample_keys()] == [mine.sample(key) for key in mine.sample_keys()]
    assert [item.candidate.sha256 for item in read_results(run.path)] == [item.candidate.sha256 for item in results]


def test_a_run_without_results_of_its_candidates_is_no_bundle(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", (1, 2))
    (tmp_path / "run" / "results.jsonl").write_text(text_of(result()))
    with pytest.raises(UsageError, match="holds no results of its candidates"):
        write_bundle(tmp_path / "run", tmp_path / "none.zip")


def test_the_page_ranks_verified_and_unverified_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "own", "judged-here", (1, 2))
    for name in ("checked", "claimed", "refuted"):
        claims = make_run(tmp_path / name, name, (1, 2, 3), good=1.0)
        write_bundle(tmp_path / name, tmp_path / f"{name}.zip")
        bundle = read_bundle(tmp_path / f"{name}.zip")
        if name != "claimed":
            checks = claims if name == "checked" else [wrong(candidate=item.candidate, problem=item.problem) for item in claims]
            found = verification(bundle, claims, checks)
            assert found.standing == ("verified" if name == "checked" else "differs")
            verification_file(bundle.path).write_text(found.model_dump_json())
    part = verification(bundle, claims, claims[:1])
    assert part.standing == "unverified" and "not looked at" in str(part)
    html = render_page(gather([tmp_path / "own", *(tmp_path / f"{name}.zip" for name in ("checked", "claimed", "refuted"))]), "t").html
    verified, _, rest = html.partition("Leaderboard: not verified")
    unverified = rest.partition("</table>")[0]
    assert "<strong>checked</strong>" in verified and "<strong>judged-here</strong>" in verified
    assert (
        "<strong>claimed, not verified</strong>" in unverified
        and "<strong>refuted, differs</strong>" in unverified
        and "checked" not in unverified
    )


@pytest.mark.slow
def test_verify_judges_anew(tmp_path: Path, peerlane: Peerlane) -> None:
    """A run with a wrong candidate is verified; the same run with a forged result is not."""
    file = tmp_path / "run" / "004" / "0" / "candidate.py"
    file.parent.mkdir(parents=True)
    file.write_text("def solution(tensor, dst=0):\n    return tensor\n")
    judge = ["--preset", "small", "--world-size", "2", "--device", "cpu", "--mode", "eager"]
    peerlane("eval", tmp_path / "run", "--model", "me", "--track", "open", *judge, code=ExitCode.NOT_CORRECT)
    good, bad = tmp_path / "good.zip", tmp_path / "bad.zip"
    assert "1 candidate and 1 result of me" in peerlane("bundle", tmp_path / "run", "--out", good).out
    assert "me: verified: of 1 results 1 confirmed" in peerlane("verify", good, "--device", "cpu").out
    (honest,) = read_results(tmp_path / "run")
    claimed = {"verdict": Correct(), "correctness": on_cpu().correctness, "speed": on_cpu().speed[:1]}
    (tmp_path / "run" / "results.jsonl").write_text(text_of(honest.model_copy(update=claimed)))
    peerlane("bundle", tmp_path / "run", "--out", bad)
    said = peerlane("verify", bad, "--device", "cpu", code=ExitCode.CHECK_FAILED).out
    assert "me: differs: of 1 results 1 different" in said and "claimed correct, found wrong_" in said
    assert Verification.model_validate_json(verification_file(bad).read_text()).standing == "differs"
    peerlane("page", good, bad, "--out", tmp_path / "page.html")
    assert "Leaderboard: not verified" in (tmp_path / "page.html").read_text()


def test_claims_may_be_verified_on_emulated_ranks(tmp_path: Path, peerlane: Peerlane, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def judge(key: object, candidates: object, device: str, *_: object) -> None:
        devices.append(device)
        raise UsageError("judged elsewhere")

    monkeypatch.setattr("peerlane.cli.bundle._judge", judge)
    make_run(tmp_path / "run", "m", [1])
    write_bundle(tmp_path / "run", tmp_path / "m.zip")
    peerlane("verify", tmp_path / "m.zip", "--device", "emulated", code=ExitCode.USAGE)
    assert devices == ["emulated"]
