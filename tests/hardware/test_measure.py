import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from peerlane.device import compile_cubin
from peerlane.hardware import measure, probes
from peerlane.hardware.measure import ProbeJob, measure_node, run_probes
from peerlane.hardware.topology import Gpu, Topology

FAKE_PROBE = """
import json, sys
probe, out = sys.argv[1], sys.argv[sys.argv.index("--out") + 1]
samples = {"gpu": {"hbm_copy_tbps": [4.0, 5.0]}, "links": {"nvlink_ring_gbps": [371.0]}, "nccl": {"nccl_allreduce_8b_us": [23.0]}}
samples = samples.get(probe, {})
if probe == "nccl" and sys.argv[sys.argv.index("--rank") + 1] != "0":
    samples = {}
open(out, "w").write(json.dumps({"samples": samples, "notes": ["a note"] if probe == "links" else []}))
"""


def job(tmp_path: Path, code: str, name: str = "a probe") -> ProbeJob:
    out = tmp_path / f"{name.replace(' ', '-')}.json"
    return ProbeJob(name, (sys.executable, "-c", code, str(out)), out)


def machine(count: int) -> Topology:
    gpus = tuple(Gpu(index, "NVIDIA H200", f"GPU-{index}", 141 * 2**30) for index in range(count))
    links = {(a, b): "NV18" for a in range(count) for b in range(a + 1, count)}
    return Topology(gpus, links, "580.1", "a CPU", 64, 2**39, "nvml" if count else "none", "" if count else "no NVIDIA driver")


@pytest.fixture
def fake_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """Four GPUs whose probes answer at once."""
    script = tmp_path / "probe.py"
    script.write_text(FAKE_PROBE)
    monkeypatch.setattr(measure, "PROBES", (sys.executable, str(script)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(measure, "discover", lambda: machine(4))
    return machine(4)


def test_a_hung_probe_is_killed_and_keeps_what_it_had(tmp_path: Path) -> None:
    code = 'import sys, time; open(sys.argv[1], \'w\').write(\'{"samples": {"hbm_copy_tbps": [4.3]}, "notes": []}\'); time.sleep(60)'
    start = time.monotonic()
    [(samples, notes)] = run_probes([job(tmp_path, code)], limit_s=1.0)
    assert time.monotonic() - start < 10
    assert samples == {"hbm_copy_tbps": [4.3]}
    assert len(notes) == 1 and "a probe was stopped after 1 s" in notes[0]


def test_a_crash_becomes_a_note_with_its_last_words(tmp_path: Path) -> None:
    crash = job(tmp_path, "raise SystemExit('libcuda is angry')", "crash")
    silent = job(tmp_path, "import os; os.kill(os.getpid(), 11)", "silent")
    (_, crash_notes), (_, silent_notes) = run_probes([crash, silent], limit_s=30.0)
    assert crash_notes == ["crash ended with code 1: libcuda is angry"]
    assert silent_notes == ["silent ended with code -11: it printed nothing"]


def test_a_node_is_measured_step_by_step(fake_node: Topology) -> None:
    ceilings = measure_node()
    assert ceilings.node == "4x NVIDIA H200, NVLink, driver 580"
    assert ceilings.notes == ("a note",)
    assert ceilings.figures["hbm_copy_tbps"].n == 8 and ceilings.median("hbm_copy_tbps") == 4.5
    assert ceilings.median("nvlink_ring_gbps") == 371 and ceilings.figures["nccl_allreduce_8b_us"].n == 1


def test_one_gpu_has_no_links_to_measure(fake_node: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "discover", lambda: machine(1))
    ceilings = measure_node()
    assert set(ceilings.figures) == {"hbm_copy_tbps"} and "one GPU" in ceilings.notes[0]


def test_bare_machine_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "discover", lambda: machine(0))
    ceilings = measure_node()
    assert not ceilings.figures and ceilings.notes == ("nothing was measured: no GPU (no NVIDIA driver)",)


def test_torch_without_cuda_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "discover", lambda: machine(2))
    monkeypatch.setattr(torch.version, "cuda", None)
    ceilings = measure_node()
    assert not ceilings.figures and "without CUDA" in ceilings.notes[0] and "pytorch.org" in ceilings.notes[0]


def test_one_failing_figure_does_not_cost_the_others(tmp_path: Path) -> None:
    report = probes.Report(tmp_path / "out.json")

    def fails(size: int) -> list[float]:
        raise RuntimeError(f"no room for {size}\nwith a long story after it")

    report.attempt("hbm_copy_tbps", fails, 7)
    report.attempt("kernel_launch_us", lambda: [3.0])
    report.attempt("kernel_launch_us", lambda: [5.0])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["samples"] == {"kernel_launch_us": [3.0, 5.0]}
    assert written["notes"] == ["hbm_copy_tbps was not measured: no room for 7"]


def test_probes_without_cuda_leave_a_note_and_no_traceback(tmp_path: Path) -> None:
    """In a process of their own, from which the GPUs of the machine are hidden, if it has any."""
    outs = {probe: tmp_path / f"{probe}.json" for probe in ("gpu", "links", "places", "nccl")}
    shared = ["--devices", "2", "--rendezvous", str(tmp_path / "rendezvous")]
    commands = [[probe, "--out", str(out), *shared] for probe, out in outs.items()]
    code = f"from peerlane.hardware.probes import main; print([main(command) for command in {commands!r}])"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.stderr) == ("[1, 1, 1, 1]\n", "")
    for probe, out in outs.items():
        written = json.loads(out.read_text())
        assert written["samples"] == {} and written["notes"][0].startswith(f"probe {probe} stopped: ")


def test_kernels_of_random_places_compile() -> None:
    ptx = compile_cubin(probes.PLACES_SOURCE).ptx()
    assert {f".entry {name}(" in ptx for name in ("read_rows", "add_rows", "read_words", "swap_words")} == {True}
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == ptx.count(".cas.b64") == 8


def test_flag_exchange_kernel_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    ptx = compile_cubin(probes.FLAG_EXCHANGE_SOURCE).ptx()
    assert "st.relaxed.sys" in ptx and "ld.relaxed.sys" in ptx and ptx.count("fence.acq_rel.sys") == 2
