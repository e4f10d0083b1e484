import json
import os
from pathlib import Path

import pytest

from peerlane.hardware.ceilings import FIGURES, SCHEMA, Ceilings, Measurement, ceilings_path, load_ceilings, save_ceilings

NODE = "4x NVIDIA H200, NVLink, driver 580"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERLANE_CACHE_DIR", str(tmp_path))
    return tmp_path


def ceilings(hbm_tbps: float = 4.25) -> Ceilings:
    figures = {"hbm_copy_tbps": Measurement(hbm_tbps, 4.0, 4.5, 80), "flag_exchange_us": Measurement(1.25, 1.2, 1.5, 30)}
    return Ceilings(
        NODE, "2026-01-02T03:04:05+00:00", {"gpus": [{"name": "NVIDIA H200"}]}, figures, ("fp8_matmul_tflops was not measured: why",)
    )


def test_measurement_summarises_samples() -> None:
    assert Measurement.of([float(value) for value in range(11)]) == Measurement(5.0, 1.0, 9.0, 11)
    assert Measurement.of([3.0]) == Measurement(3.0, 3.0, 3.0, 1)
    with pytest.raises(ValueError, match="no samples"):
        Measurement.of([])


def test_round_trip(cache: Path) -> None:
    assert load_ceilings(NODE) is None
    path = save_ceilings(ceilings())
    assert path == cache / "ceilings" / "4x-nvidia-h200-nvlink-driver-580.json"
    assert load_ceilings(NODE) == ceilings()
    assert load_ceilings("2x NVIDIA H200, NVLink, driver 580") is None


def test_median() -> None:
    assert ceilings().median("hbm_copy_tbps") == 4.25
    assert ceilings().median("bf16_matmul_tflops") is None
    assert set(ceilings().figures) <= set(FIGURES)


def test_saving_replaces_whole_and_leaves_nothing_behind() -> None:
    save_ceilings(ceilings(4.0))
    path = save_ceilings(ceilings(4.5))
    loaded = load_ceilings(NODE)
    assert loaded is not None and loaded.median("hbm_copy_tbps") == 4.5
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_ceilings(ceilings(4.0))

    def full_disk(temporary: str, path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_ceilings(ceilings(4.5))
    loaded = load_ceilings(NODE)
    assert loaded is not None and loaded.median("hbm_copy_tbps") == 4.0
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "null", json.dumps({**ceilings().to_json(), "schema": SCHEMA + 1})])
def test_damaged_or_foreign_files_mean_measure_again(damage: str) -> None:
    path = save_ceilings(ceilings())
    path.write_text(damage)
    assert load_ceilings(NODE) is None


def test_another_node_of_the_same_file_name_is_not_returned() -> None:
    save_ceilings(ceilings())
    alias = NODE.replace(", ", " / ")
    assert ceilings_path(alias) == ceilings_path(NODE)
    assert load_ceilings(alias) is None
