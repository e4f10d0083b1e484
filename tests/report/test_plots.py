"""Plots and tables of sweeps and mechanisms, from results made by hand. No figure here was measured."""

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from command_line import Peerlane
from docs.build import sections
from peerlane import problems
from peerlane.device.tools import mechanisms
from peerlane.device.tools.mechanisms import Bandwidth, Latency, Mechanisms
from peerlane.errors import MissingDependency, UsageError
from peerlane.hardware import environment, topology
from peerlane.hardware.ceilings import FIGURES
from peerlane.report.mechanisms import MeasuredMechanisms, as_ceilings, choice_table, mechanisms_report, read_mechanisms, size_text
from peerlane.report.plots import Point, mechanisms_plot, sweep_bytes, sweep_plot, write_plot
from peerlane.results.result import CandidateInfo, Result
from sample_results import ENVIRONMENT, estimate, measured, on_cpu, result, text_of

SVG = "{http://www.w3.org/2000/svg}"


def swept(size: str, reference_us: float, candidate_us: float, name: str = "p001_allreduce", **changes: object) -> Result:
    backend = "reference" if name == "reference" else "cuda"
    candidate = CandidateInfo(name=name, path=None if backend == "reference" else "x.py", sha256="0" * 64, backend=backend)
    speed = (measured("eager", 2 * reference_us, 2 * candidate_us), measured("graph", reference_us, candidate_us))
    return result(**{"preset": f"sweep_{size}", "candidate": candidate, "speed": speed, **changes})


SWEPT = (
    swept("1mib", 40.0, 30.0),
    swept("2kib", 12.0, 6.0),
    swept("2kib", 14.0, 9.0, "1_one_shot_pytorch"),
    swept("2kib", 13.0, 13.0, "reference"),
    swept("2kib", 11.0, 7.0, world_size=2),
    result(),
    on_cpu(preset="sweep_2kib"),
)


def texts(path: Path) -> list[str]:
    return ["".join(item.itertext()) for item in ElementTree.parse(path).iter(f"{SVG}text")]


def test_a_line_per_side_and_mode_by_ascending_size() -> None:
    plot = sweep_plot(SWEPT)
    assert plot.title == "4x NVIDIA H200, NVLink, driver 580, timing protocol 1; 2026-01-02" and plot.log
    assert [panel.title for panel in plot.panels] == ["1 allreduce, 2 ranks", "1 allreduce, 4 ranks"]
    lines = {(line.name, line.mode): line.points for line in plot.panels[1].lines}
    assert set(lines) == {(name, mode) for name in ("reference", "p001_allreduce", "1_one_shot_pytorch") for mode in ("eager", "graph")}
    assert [point.size for point in lines["p001_allreduce", "graph"]] == [2048, 1 << 20]
    # The reference was measured with three candidates: the median of them, and an interval that spans all.
    assert lines["reference", "graph"][0] == Point(2048, 13.0, estimate(12.0).low, estimate(14.0).high)
    assert lines["p001_allreduce", "eager"][0] == Point(2048, 12.0, estimate(12.0).low, estimate(12.0).high)


def test_a_sweep_may_count_other_things_than_bytes() -> None:
    (panel,) = sweep_plot([swept("1024", 40.0, 30.0, problem=result().problem.model_copy(update={"id": 82}))]).panels
    assert panel.axis == "tokens" and [point.size for point in panel.lines[0].points] == [1024]


def test_presets_of_the_sweep_name_their_size() -> None:
    sizes = [sweep_bytes(item.name) for item in problems.get(2).family("sweep")]
    assert sizes == sorted(sizes) and (sizes[0], sizes[-1]) == (2 << 10, 512 << 20)
    assert [size_text(size) for size in sizes] == [item.about for item in problems.get(2).family("sweep")]
    assert sweep_bytes("pkb") is None


def test_every_line_has_a_name_and_colour_and_axes_have_units(tmp_path: Path) -> None:
    path = tmp_path / "new" / "sweep.svg"
    write_plot(sweep_plot(SWEPT), path)
    found = texts(path)
    assert {"us per call", "2 KiB", "1 MiB", "reference, eager", "1_one_shot_pytorch, graph", "1 allreduce, 4 ranks"} <= set(found)
    assert "4x NVIDIA H200, NVLink, driver 580, timing protocol 1; 2026-01-02" in found
    assert len(set(re.findall(r"stroke: (#[0-9a-f]{6})", path.read_text())) & {"#000000", "#0072b2", "#d55e00"}) == 3
    before = path.read_bytes()
    write_plot(sweep_plot(SWEPT), path)
    assert path.read_bytes() == before


def test_a_plot_is_a_pdf_if_its_name_says_so(tmp_path: Path) -> None:
    for path in (tmp_path / "first.pdf", tmp_path / "second.pdf"):
        write_plot(sweep_plot(SWEPT), path)
    first, second = ((tmp_path / name).read_bytes() for name in ("first.pdf", "second.pdf"))
    assert first.startswith(b"%PDF-") and first == second and b"/Subtype /Image" not in first


def test_what_can_not_be_drawn_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"expected results of `peerlane eval ... --preset sweep` on GPUs"):
        sweep_plot([result(), on_cpu(preset="sweep_2kib")])
    with pytest.raises(UsageError, match="timing protocol kittens: expected those of one class of machine and protocol"):
        sweep_plot([*SWEPT, swept("2kib", 10.0, 5.0, timing_protocol="kittens")])
    with pytest.raises(UsageError, match=r"sweep.png: expected a name that ends in .svg or .pdf"):
        write_plot(sweep_plot(SWEPT), tmp_path / "sweep.png")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*sweep.svg: "):
        write_plot(sweep_plot(SWEPT), tmp_path / "file" / "sweep.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"run pip install 'peerlane\[plot\]'"):
        write_plot(sweep_plot(SWEPT), tmp_path / "sweep.svg")


def rate(mechanism: str, nbytes: int, blocks: int, gbps: float, movers: int = 1) -> Bandwidth:
    return Bandwidth(mechanism, nbytes, blocks, 1, movers, gbps, gbps - 2, gbps + 1, 7)


MECHANISMS = MeasuredMechanisms(
    ENVIRONMENT,
    datetime(2026, 1, 2, tzinfo=UTC),
    Mechanisms(
        2,
        (
            rate("copy_engine_push", 64 << 10, 0, 30.0),
            rate("copy_engine_push", 64 << 20, 0, 390.0),
            rate("sm_store", 64 << 10, 8, 60.0),
            rate("sm_store", 64 << 10, 32, 50.0),
            rate("sm_store", 64 << 20, 8, 300.0),
            rate("sm_store", 64 << 20, 16, 345.0),
            rate("sm_store", 64 << 20, 32, 360.0),
            rate("sm_store", 64 << 20, 32, 280.0, movers=2),
        ),
        (Latency("flag", 2.5, 2.4, 2.7, 7),),
    ),
)


def test_the_table_to_choose_by() -> None:
    table = choice_table(MECHANISMS.mechanisms)
    assert table.columns == ("mechanism", "64 KiB", "64 MiB", "lowest to highest", "blocks", "all GPUs at once")
    assert table.rows == [("copy engine push", "30", "390", "388 to 391", "-", "-"), ("sm store", "60", "360", "358 to 361", "16", "280")]
    text = mechanisms_report(MECHANISMS)
    assert "4x NVIDIA H200, NVLink, driver 580; 2026-01-02; 7 samples each" in text and "| flag | 2.50 | 2.40 | 2.70 | 7 |" in text


def test_what_the_doctor_keeps_of_them() -> None:
    kept = as_ceilings(MECHANISMS.mechanisms)
    assert {name: (item.median, item.p10, item.p90, item.n) for name, item in kept.items()} == {
        "nvlink_copy_engine_push_gbps": (390.0, 388.0, 391.0, 7),
        "nvlink_sm_store_gbps": (360.0, 358.0, 361.0, 7),
        "flag_round_us": (2.5, 2.4, 2.7, 7),
    }
    assert kept.keys() < FIGURES.keys()


def test_a_line_per_mechanism_at_its_best_block_count() -> None:
    (panel,) = mechanisms_plot(MECHANISMS).panels
    assert [(line.name, [point.value for point in line.points]) for line in panel.lines] == [
        ("copy engine push", [30.0, 390.0]),
        ("sm store, 32 blocks", [50.0, 360.0]),
    ]


def test_a_measurement_of_mechanisms_is_read_shown_and_drawn(tmp_path: Path, peerlane: Peerlane) -> None:
    file = tmp_path / "mechanisms.json"
    file.write_text(json.dumps(MECHANISMS.to_json()))
    assert read_mechanisms(file) == MECHANISMS
    assert "| sm store | 60 | 360 |" in peerlane("bench", "mechanisms", "--from", str(file)).out
    peerlane("bench", "mechanisms", "--from", str(file), "--plot", str(tmp_path / "m.svg"))
    assert {"10^9 bytes/s", "64 KiB", "sm store, 32 blocks"} <= set(texts(tmp_path / "m.svg"))

    with pytest.raises(UsageError, match="there is no file"):
        read_mechanisms(tmp_path / "absent.json")
    for broken in ("", "[]", json.dumps({**MECHANISMS.to_json(), "finished_at": "yesterday"}), json.dumps({"gpus": 2})):
        file.write_text(broken)
        with pytest.raises(UsageError, match="is not a measurement of mechanisms"):
            read_mechanisms(file)


def test_bench_records_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peerlane: Peerlane) -> None:
    monkeypatch.setattr(topology, "discover", lambda: SimpleNamespace(gpus=(0, 1)))
    monkeypatch.setattr(environment, "record", lambda _: ENVIRONMENT)
    monkeypatch.setattr(mechanisms, "measure_mechanisms", lambda: MECHANISMS.mechanisms)
    begin = datetime.now(UTC).replace(microsecond=0)
    assert "All 2 GPUs at once" in peerlane("bench", "mechanisms", "--out", str(tmp_path / "out"), "--plot", str(tmp_path / "m.svg")).out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mechanisms.json"]
    recorded = read_mechanisms(tmp_path / "out" / "mechanisms.json")
    assert recorded.mechanisms == MECHANISMS.mechanisms and recorded.environment == ENVIRONMENT and recorded.finished_at >= begin
    assert "GPU 0 and 1 peer" in texts(tmp_path / "m.svg")


def test_results_of_a_sweep_are_drawn(tmp_path: Path, peerlane: Peerlane) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text_of(*SWEPT))
    drawn = peerlane("plot", str(file), "--out", str(tmp_path / "s.svg"))
    assert drawn.out.startswith("written: ") and "1 allreduce, 2 ranks" in texts(tmp_path / "s.svg")


def test_principles_show_a_measurement_or_say_there_is_none(tmp_path: Path) -> None:
    empty = "<!-- mechanisms:begin -->\n<!-- mechanisms:end -->\n"
    assert "No measurement is recorded here." in sections.filled(empty, tmp_path)
    path = tmp_path / sections.SECTIONS["mechanisms"][0]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(MECHANISMS.to_json()))
    assert "| sm store | 60 | 360 |" in sections.filled(empty, tmp_path)
