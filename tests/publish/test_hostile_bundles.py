"""Bundles of strangers: forged figures are found, malformed files are usage errors that name the file and what is wrong."""

import json
import lzma
import math
import os
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from peerlane.errors import UsageError
from peerlane.publish.bundle import MANIFEST, Bundle, read_bundle, write_bundle
from peerlane.publish.gather import gather
from peerlane.publish.page import render_page
from peerlane.publish.signature import signature_file
from peerlane.publish.verify import compare, verification, verification_file
from peerlane.results.result import Result
from peerlane.results.speed_record import Estimate, ModeSpeed
from publish.test_page import data_of
from sample_results import measured, result, text_of
from sample_runs import make_run

Members = dict[str, bytes]


def timed(speed: ModeSpeed, **changes: object) -> Result:
    """A result with this speed in eager mode."""
    return result(modes=("eager",), speed=(speed,), **changes)


def bundle_of(folder: Path, problems: Sequence[int] = (1, 2), samples: int = 1, **options: Any) -> tuple[Bundle, list[Result]]:
    """A bundle of right samples of the model "model", and the results that it claims."""
    claims = make_run(folder / "run", "model", problems, samples, good=1.0, **options)
    write_bundle(folder / "run", folder / "a.zip")
    return read_bundle(folder / "a.zip"), claims


def with_estimate(low: float, median: float, high: float) -> ModeSpeed:
    """A speed with this interval."""
    return measured("eager", 100.0, 50.0).model_copy(update={"speedup": Estimate(low=low, median=median, high=high, n=9)})


def times(factor: float, claim: Result) -> Result:
    """The result with so many times its speedups."""
    speeds = (speed.model_copy(update={"speedup": speed.speedup.scaled(factor)}) for speed in claim.speed if isinstance(speed, ModeSpeed))
    return claim.model_copy(update={"speed": tuple(speeds)})


def with_share(share: float, ceilings: str = "datasheet") -> ModeSpeed:
    """A speedup of 2 that claims this share of the roofline."""
    speed = measured("eager", 100.0, 50.0)
    forged = tuple(item.model_copy(update={"candidate": share}) if item.ceilings == ceilings else item for item in speed.utilisation)
    return speed.model_copy(update={"utilisation": forged})


FOUND = measured("eager", 187.0, 100.0)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (measured("eager", 4500.0, 100.0, noise_floor=100.0), "claimed 45.00"),
        (with_estimate(1.83, 46.0, 46.1), "claimed 46.00"),
        (with_estimate(1.83, 1.87, 46.0), "46.00]"),
        (with_estimate(40.0, 46.0, 46.1), "claimed 46.00"),
        (with_share(0.99), "99 % of the roofline"),
        (with_share(0.99, "measured"), "99 % of the roofline"),
    ],
)
def test_a_forged_speed_differs(claim: ModeSpeed, said: str) -> None:
    found = compare(timed(claim), timed(FOUND))
    assert found.agreement == "differs" and said in found.said, found


def test_an_honest_speed_is_confirmed_on_a_noisy_machine() -> None:
    noisy = with_estimate(1.2, 1.5, 1.8).model_copy(update={"noise_floor": 0.1})
    assert compare(timed(with_estimate(1.6, 1.65, 1.7)), timed(noisy)).agreement == "confirmed"


def test_a_measurement_without_precision_confirms_no_speed() -> None:
    """A candidate that keeps the keeper's machine busy must not widen what it may claim."""
    for useless in (with_estimate(0.1, 1.0, 60.0), measured("eager", 100.0, 100.0, noise_floor=60.0)):
        found = compare(timed(measured("eager", 4500.0, 100.0)), timed(useless))
        assert found.agreement == "verdict_only" and "too coarse" in found.said, found


def test_the_page_shows_what_the_keeper_measured(tmp_path: Path) -> None:
    """Within the margin too: a claim of 4 % more is confirmed, and the page has the keeper's figures."""
    bundle, claims = bundle_of(tmp_path)
    checks = [times(0.96, claim) for claim in claims]
    found = verification(bundle, claims, checks)
    assert found.standing == "verified"
    verification_file(bundle.path).write_text(found.model_dump_json())
    samples = gather([bundle.path]).samples
    shown = {sample.result.candidate.sha256: sample.speedups["graph"].median for sample in samples if sample.result}
    assert shown == {check.candidate.sha256: check.speed_in("graph").speedup.median for check in checks}  # type: ignore[union-attr]
    html = render_page(gather([bundle.path]), "t").html
    assert html.count("figures measured by the keeper of this page") == len(samples) > 0
    assert html.count("Verdicts and speeds of verified entries were measured by the keeper") == 1
    verification_file(bundle.path).unlink()
    html = render_page(gather([bundle.path]), "t").html
    assert "measured by the keeper" not in html and "figures claimed by the author, not verified" in html


def test_claims_say_nothing_about_the_reference(tmp_path: Path) -> None:
    """The share of the roofline that the reference reaches is the keeper's figure, or none."""
    bundle, claims = bundle_of(tmp_path)

    def authors() -> set[object]:
        (board,) = data_of(render_page(gather([bundle.path]), "t").html)
        return {row.get("author", "the reference") for row in board["reached"]}  # type: ignore[attr-defined]

    assert authors() == {"model, not verified"}
    verification_file(bundle.path).write_text(verification(bundle, claims, claims).model_dump_json())
    assert authors() == {"model", "the reference"}


def sign(bundle: Path, key: Path) -> None:
    """Signs a bundle as its author does, with a new key."""
    for command in (["-q", "-t", "ed25519", "-N", "", "-f", key], ["-Y", "sign", "-n", "peerlane", "-f", key, bundle]):
        subprocess.run(["ssh-keygen", *map(str, command)], check=True, capture_output=True, timeout=60)


def test_the_page_names_the_key_that_signed_a_bundle(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name, name, (1, 2), good=1.0)
        write_bundle(tmp_path / name, tmp_path / f"{name}.zip")
    sign(tmp_path / "a.zip", tmp_path / "key")
    told = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, timeout=60, check=True)
    fingerprint = told.stdout.split()[1]
    html = render_page(gather([tmp_path / "a.zip", tmp_path / "b.zip"]), "t").html
    assert f"a, not verified: ED25519 {fingerprint}" in html and "b, not verified: ED25519" not in html
    shutil.copy(signature_file(tmp_path / "a.zip"), signature_file(tmp_path / "b.zip"))
    with pytest.raises(UsageError, match=r"b\.zip\.sig is no signature of .*b\.zip"):
        gather([tmp_path / "b.zip"])
    signature_file(tmp_path / "b.zip").unlink()
    signature_file(tmp_path / "b.zip").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"b\.zip\.sig is a link"):
        gather([tmp_path / "b.zip"])


# --- malformed bundles ---


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The members of an honest bundle of an agent."""
    bundle, _ = bundle_of(tmp_path_factory.mktemp("good"), samples=2, kind="agent")
    with zipfile.ZipFile(bundle.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(to: Path, members: Members, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A bundle of these members as they are."""
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data, method)
    return to


def forged(to: Path, members: Members, **changes: bytes) -> Path:
    """A bundle whose manifest has the right hashes of changed members; ``results`` stands for results.jsonl, and so on."""
    names = {"results": "results.jsonl", "run": "run.json", "sample": "001/0/sample.json", "step": "001/0/steps/1/step.json"}
    made = {**members, **{names[short]: data for short, data in changes.items()}}
    manifest = json.loads(made[MANIFEST])
    manifest["files"] = {name: sha256(data).hexdigest() for name, data in made.items() if name != MANIFEST}
    return packed(to, {**made, MANIFEST: json.dumps(manifest).encode()})


def manifest_with(members: Members, **changes: object) -> bytes:
    """The manifest with other values; None removes a field."""
    manifest = {**json.loads(members[MANIFEST]), **changes}
    return json.dumps({name: value for name, value in manifest.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"[]", "manifest.json is a list: expected an object"),
        (b"null", "manifest.json is null: expected an object"),
        (b'"text"', "manifest.json is a string: expected an object"),
        (b"3", "manifest.json is a number: expected an object"),
        (b"{", "manifest.json is not JSON"),
        (b"\xff\xfe\x00", "manifest.json is not JSON"),
        (b"[" * 200_000, "manifest.json is not JSON"),
        (b'{"format": 1' + b"0" * 5000 + b"}", "manifest.json is not JSON"),
        (b'{"format": NaN}', "manifest.json is not JSON"),
        (b"{}", "format None"),
        (b'{"format": 9}', "format 9"),
        (b'{"format": 1}', "manifest.json: peerlane: "),
        (b'{"format": true}', "format True"),
        *(({"files": value}, "manifest.json: files") for value in ([], None, {"run.json": 3})),
        *(({"results": value}, "manifest.json: results") for value in ("many", -1)),
        *(({"author": value}, "manifest.json: author") for value in ("", [1])),
    ],
)
def test_a_malformed_manifest_is_named(manifest: bytes | dict[str, object], said: str, good: Members, tmp_path: Path) -> None:
    """As it is, or the good one with another value of a field."""
    made = manifest if isinstance(manifest, bytes) else manifest_with(good, **manifest)
    path = packed(tmp_path / "a.zip", {**good, MANIFEST: made})
    with pytest.raises(UsageError) as caught:
        read_bundle(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"results.jsonl": b"{}"}, r"results\.jsonl in .*a\.zip has another hash"),
        ({"more": b""}, r"a\.zip does not hold the files"),
        ({MANIFEST: None}, r"a\.zip is no bundle"),
    ],
)
def test_members_that_the_manifest_does_not_name_so_are_refused(
    change: dict[str, bytes | None], said: str, good: Members, tmp_path: Path
) -> None:
    members = {name: data for name, data in {**good, **change}.items() if data is not None}
    with pytest.raises(UsageError, match=said):
        read_bundle(packed(tmp_path / "a.zip", members))


def damaged(path: Path, name: str) -> Path:
    """The bundle with bytes of one member's compressed data overwritten."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(name)
    data = bytearray(path.read_bytes())
    begin = info.header_offset + 30 + len(name)
    middle = begin + info.compress_size // 2
    data[begin + 4 : middle] = b"\xff" * (middle - begin - 4)
    path.write_bytes(bytes(data))
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("name", [MANIFEST, "results.jsonl"])
def test_broken_compression_is_named(method: int, name: str, good: Members, tmp_path: Path) -> None:
    path = damaged(packed(tmp_path / "a.zip", good, method), name)
    with pytest.raises(UsageError) as caught:
        read_bundle(path)
    assert str(path) in str(caught.value) and ("compress" in str(caught.value) or "hash" in str(caught.value))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_truncated_bundle_is_named(method: int, good: Members, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", good, method)
    whole = path.read_bytes()
    for size in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=r"a\.zip"):
            read_bundle(path)


def lzma_bomb(to: Path) -> Path:
    """A member whose header announces 900 MiB, and whose few kilobytes of LZMA make 200 MiB."""
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 20}]
    compressor = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=filters)
    body = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(200)) + compressor.flush()
    properties = lzma._encode_filter_properties(filters[0])  # type: ignore[attr-defined]
    body = struct.pack("<BBH", 9, 4, len(properties)) + properties + body
    size, name = 900 << 20, MANIFEST.encode()
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 14, 0, 33, 0, len(body), size, len(name), 0) + name
    central = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 14, 0, 33, 0, len(body), size, len(name), 0, 0, 0, 0, 0, 0) + name
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local) + len(body), 0)
    to.write_bytes(local + body + central + end)
    return to


def test_a_bomb_is_refused_before_it_expands(tmp_path: Path) -> None:
    import tracemalloc

    path = lzma_bomb(tmp_path / "bomb.zip")
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"bomb\.zip"):
            read_bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def shown_or_refused(path: Path) -> str:
    """What a page or a verification of a bundle says against it."""
    with pytest.raises(UsageError) as caught:
        render_page(gather([path]), "t")
    return str(caught.value)


def edited(members: Members, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The results with the first of them changed."""
    lines = members["results.jsonl"].decode().splitlines()
    at = next(number for number, line in enumerate(lines) if json.loads(line)["type"] == "result")
    record = json.loads(lines[at])
    change(record)
    lines[at] = json.dumps(record)
    return "\n".join([*lines, ""]).encode()


def with_speedup(**values: float) -> Callable[[dict[str, Any]], None]:
    """Changes the interval of the first speed."""
    return lambda record: record["speed"][0]["speedup"].update(values)


@pytest.mark.parametrize("data", [b"[]\n", b"null\n", b"[null]\n", b"3\n", b"{}\n", b"\xff\n", b"", b'{"schema_version": 2, "type": 3}\n'])
def test_other_things_in_place_of_results_are_named(data: bytes, good: Members, tmp_path: Path) -> None:
    said = shown_or_refused(forged(tmp_path / "a.zip", good, results=data))
    assert "a.zip" in said and "results.jsonl" in said and "/tmp/peerlane-bundle" not in said
    said = shown_or_refused(forged(tmp_path / "b.zip", good, results=good["results.jsonl"] + data + b"null\n"))
    assert "b.zip" in said and "results.jsonl" in said


@pytest.mark.parametrize("short", ["run", "sample", "step"])
@pytest.mark.parametrize("data", [b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_a_malformed_fact_of_a_run_is_named(short: str, data: bytes, good: Members, tmp_path: Path) -> None:
    said = shown_or_refused(forged(tmp_path / "a.zip", good, **{short: data}))
    assert "a.zip" in said and f"{short}.json" in said and "peerlane-bundle" not in said


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-5", "1e308"])
def test_an_impossible_cost_is_named(value: str, good: Members, tmp_path: Path) -> None:
    sample = json.loads(good["001/0/sample.json"])
    data = json.dumps({**sample, "cost_usd": "COST"}).replace('"COST"', value).encode()
    said = shown_or_refused(forged(tmp_path / "a.zip", good, sample=data))
    assert "a.zip" in said and "sample.json" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record["problem"].update(id=5), "is of code that the bundle lacks"),
        (lambda record: record["candidate"].update(sha256="0" * 64), "is of code that the bundle lacks"),
        (lambda record: record.update(world_size=10**6), "claims 1000000 ranks"),
        (lambda record: record["candidate"].update(backend="reference", name="reference"), "is called the reference"),
        (with_speedup(low=-1.0), "results.jsonl"),
        (with_speedup(low=0.0), "results.jsonl"),
        (with_speedup(median=9e9), "results.jsonl"),
        (with_speedup(low=math.nan), "results.jsonl"),
        (with_speedup(median=math.inf, high=math.inf), "results.jsonl"),
        (with_speedup(low=1e308, median=1e308, high=1e308), "results.jsonl"),
    ],
)
def test_a_result_that_cannot_be_or_be_checked_is_named(
    change: Callable[[dict[str, Any]], None], said: str, good: Members, tmp_path: Path
) -> None:
    found = shown_or_refused(forged(tmp_path / "a.zip", good, results=edited(good, change)))
    assert "a.zip" in found and said in found


def test_another_author_than_the_runs_is_named(good: Members, tmp_path: Path) -> None:
    run = {**json.loads(good["run.json"]), "model": "somebody famous"}
    assert "author" in shown_or_refused(forged(tmp_path / "a.zip", good, run=json.dumps(run).encode()))


def test_a_bundle_that_is_swapped_is_not_unpacked(good: Members, tmp_path: Path) -> None:
    """What was checked is what is unpacked: another file in its place, of the same names and other contents, is refused."""
    path = packed(tmp_path / "a.zip", good)
    bundle = read_bundle(path)
    packed(path, {**good, "results.jsonl": good["results.jsonl"].replace(b'"correct"', b'"hang"   ')})
    with pytest.raises(UsageError, match=r"results\.jsonl in .*a\.zip has another hash"):
        bundle.unpack(tmp_path / "there")


def test_a_bundle_is_a_zip_file_and_a_regular_one(tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(UsageError, match=r"text\.zip is no bundle"):
        read_bundle(tmp_path / "text.zip")
    (tmp_path / "a.zip").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"a\.zip"):
        read_bundle(tmp_path / "a.zip")


# --- more attacks ---


def test_millions_of_members_are_not_listed(good: Members, tmp_path: Path) -> None:
    """A table of members of 17 MiB, with its size told truly, by zip64, and behind a false end."""
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    table = entry * (17 * (1 << 20) // len(entry))

    def end(size: int) -> bytes:
        return struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 9, 9, size, 0, 0)

    longer = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 20, 20, 0, 0, 9, 9, len(table), 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(table), 1)
    hidden = int.from_bytes(b"PK\5\6", "little")
    for number, tail in enumerate((end(len(table)), longer + locator + end(0), end(hidden))):
        path = tmp_path / f"{number}.zip"
        path.write_bytes(table + tail)
        with pytest.raises(UsageError, match="too large for a bundle"):
            read_bundle(path)


@pytest.mark.parametrize(
    "data", [b"\n" * 200_000, b'{"schema_version": 2, "type": "result", "diagnostics": [' + b"[]," * 500_000 + b"[]]}\n"]
)
def test_results_that_would_fill_the_memory_are_named(data: bytes, good: Members, tmp_path: Path) -> None:
    assert "results.jsonl" in shown_or_refused(forged(tmp_path / "a.zip", good, results=data))


def test_a_member_that_is_there_twice_is_refused(good: Members, tmp_path: Path) -> None:
    for name in (MANIFEST, "results.jsonl"):
        path = packed(tmp_path / f"{name}.zip", good)
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(name, good[name])
        with pytest.raises(UsageError, match=r"several|does not hold the files"):
            read_bundle(path)


@pytest.mark.parametrize(
    "name",
    [
        *("../../evil.py", "001/0/steps/1/../candidate.py", "/etc/passwd", "001\\0\\candidate.py", "001/0/candidate.py\n"),
        *("١/0/candidate.py", "run.json/"),
    ],
)
def test_other_names_are_refused(name: str, good: Members, tmp_path: Path) -> None:
    manifest = manifest_with(good, files={**json.loads(good[MANIFEST])["files"], name: sha256(b"x").hexdigest()})
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**good, MANIFEST: manifest, name: b"x"}.items():
            archive.writestr(zipfile.ZipInfo(member), data)
    with pytest.raises(UsageError, match=r"expected run\.json, results\.jsonl and files of samples alone") as caught:
        read_bundle(path)
    printable = name.replace("\n", r"\n")
    assert f"a.zip holds {printable!r}: " in str(caught.value)


def test_another_name_of_a_sample_makes_no_second_one(good: Members, tmp_path: Path) -> None:
    """A good sample must not count twice, as 001/0 and as 1/0."""
    again = {name.replace("001/0/", f"{other}/"): data for other in ("1/0", "001/00") for name, data in good.items() if "001/0/" in name}
    plain, doubled = (gather([forged(tmp_path / f"{len(more)}.zip", {**good, **more})]) for more in ({}, again))
    assert len(again) >= 4 and len(doubled.samples) == len(plain.samples)


def test_equal_hashes_with_other_figures_are_both_compared(tmp_path: Path) -> None:
    """A forged result beside the honest one of the same candidate, as of an earlier evaluator."""
    claims = make_run(tmp_path / "run", "m", (1,), good=1.0)
    twin = times(40.0, claims[0]).model_copy(update={"evaluator_version": "0.0.9"})
    (tmp_path / "run" / "results.jsonl").write_text(text_of(claims[0], twin))
    write_bundle(tmp_path / "run", tmp_path / "a.zip")
    bundle = read_bundle(tmp_path / "a.zip")
    found = verification(bundle, bundle.claims(bundle.unpack(tmp_path / "there")), claims)
    assert [finding.agreement for finding in found.findings] == ["confirmed", "differs"] and found.standing == "differs"


def test_steps_that_nobody_judged_are_not_shown_as_verified(tmp_path: Path) -> None:
    bundle, claims = bundle_of(tmp_path, samples=2, kind="agent")
    assert any(sample.steps for sample in gather([bundle.path]).samples)
    verification_file(bundle.path).write_text(verification(bundle, claims, claims).model_dump_json())
    assert not any(sample.steps for sample in gather([bundle.path]).samples)


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"format": 1}', "\udcff"])
def test_a_malformed_verification_is_named(text: str, good: Members, tmp_path: Path) -> None:
    path = packed(tmp_path / "a.zip", good)
    verification_file(path).write_bytes(text.encode(errors="surrogateescape"))
    assert "a.zip.verified.json cannot be used" in shown_or_refused(path)


def test_an_author_cannot_write_to_the_terminal(good: Members, tmp_path: Path) -> None:
    run = {**json.loads(good["run.json"]), "model": "\x1b[2Jm\u202e\n"}
    members = {**good, MANIFEST: manifest_with(good, author=run["model"])}
    (sample, *_) = gather([forged(tmp_path / "a.zip", members, run=json.dumps(run).encode())]).samples
    assert sample.author.isprintable()


def test_a_result_whose_code_is_a_device_is_shown_without(tmp_path: Path) -> None:
    """The path of a candidate in a file of results is a stranger's word."""
    candidate = result().candidate
    for number, name in enumerate(("/dev/zero", str(tmp_path / "pipe"), "/etc/shadow")):
        if name.endswith("pipe"):
            os.mkfifo(name)
        (tmp_path / f"{number}.jsonl").write_text(text_of(result(candidate=candidate.model_copy(update={"path": name}))))
        (sample,) = gather([tmp_path / f"{number}.jsonl"]).samples
        assert sample.code is None


def test_a_run_with_a_hostile_file_is_left_out_by_name(tmp_path: Path) -> None:
    make_run(tmp_path / "in" / "good", "good", (1, 2))
    for number, name in enumerate(("candidate.py", "sample.json", "steps/1/step.json", "trace/x.svg")):
        make_run(tmp_path / "in" / str(number), f"bad{number}", (1, 2), good=1.0)
        file = tmp_path / "in" / str(number) / "001" / "0" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    found = gather([tmp_path / "in"])
    assert {sample.author for sample in found.samples} == {"good"}
    assert len(found.skipped) == 4 and all("is a pipe" in text for text in found.skipped), found.skipped


def test_results_in_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "m", (1, 2))
    (tmp_path / "more").mkdir()
    os.mkfifo(tmp_path / "more" / "results.jsonl")
    found = gather([tmp_path])
    assert found.samples and "is a pipe" in " ".join(found.skipped)
