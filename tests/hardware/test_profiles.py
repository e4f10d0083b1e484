from __future__ import annotations

import pytest

from peerlane.hardware.profiles import B200_SXM, H100_SXM, H200_SXM, PROFILES, HardwareProfile, profile_for


@pytest.mark.parametrize(
    ("device_name", "profile"),
    [("NVIDIA H200", H200_SXM), (" nvidia h200\n", H200_SXM), ("NVIDIA H100 80GB HBM3", H100_SXM), ("NVIDIA B200", B200_SXM)],
)
def test_profile_is_found_by_the_drivers_name(device_name: str, profile: HardwareProfile) -> None:
    assert profile_for(device_name) is profile


@pytest.mark.parametrize(
    "device_name",
    ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB", ""],
)
def test_other_parts_of_the_same_chip_are_not_mistaken_for_sxm(device_name: str) -> None:
    assert profile_for(device_name) is None


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_profile_is_consistent(profile: HardwareProfile) -> None:
    assert set(profile.tensor_tflops) == {"bf16", "fp16", "fp8", "tf32", "fp64"}
    assert set(profile.vector_tflops) == {"fp32", "fp64"}
    assert profile.tensor_tflops["bf16"] == profile.tensor_tflops["fp16"]
    assert profile.tensor_tflops["fp8"] == pytest.approx(2 * profile.tensor_tflops["bf16"], rel=1e-3)
    assert profile.tensor_clock_headroom >= 1
    assert {source.split(":")[0] for source in profile.sources} >= {"compute", "memory", "links", "network"}


def test_hopper_tensor_peak_follows_from_its_units() -> None:
    # 4096 dense bf16 operations per SM and clock, at the 1.83 GHz that the whitepaper's tensor rates assume.
    for profile in (H100_SXM, H200_SXM):
        assert profile.tensor_tflops["bf16"] == pytest.approx(profile.sm_count * 4096 * 1.83e9 / 1e12, rel=1e-3)
        assert profile.vector_tflops["fp32"] == pytest.approx(profile.sm_count * 256 * 1.98e9 / 1e12, rel=1e-3)
