"""Rooflines, the profiles of GPUs that they take peaks from, and the names of architectures."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerlane import problems
from peerlane.common import toolkit
from peerlane.errors import UsageError
from peerlane.hardware.ceilings import Ceilings, Measurement
from peerlane.hardware.profiles import B200_SXM, H100_SXM, H200_SXM, PROFILES, HardwareProfile, profile_for
from peerlane.hardware.roofline import FLAG_EXCHANGE_US, datasheet_peaks, measured_peaks, physical_floor_us, roofline
from peerlane.problems import Cost
from peerlane.settings import ARCHITECTURE

SHEET = datasheet_peaks(H200_SXM)

amounts = st.floats(0, 1e15, allow_nan=False)
costs = st.builds(
    Cost,
    hbm_bytes=amounts,
    egress_bytes=amounts,
    ingress_bytes=amounts,
    flops=st.dictionaries(st.sampled_from(["bf16", "fp16", "fp8", "tf32", "fp32", "fp64"]), amounts),
)
cost_lists = st.lists(costs, min_size=1, max_size=4)


def ceilings(**medians: float) -> Ceilings:
    return Ceilings(
        "a node", "2026-01-01T00:00:00+00:00", {}, {name: Measurement(value, value, value, 9) for name, value in medians.items()}
    )


def test_all_reduce_of_128_mb_by_hand() -> None:
    # 2 (W - 1) / W x 128 MB = 192 MB through each port at 450 GB/s: 426.7 us. 256 MB of memory traffic at 4.8 TB/s: 53.3 us.
    # 0.75 x 64 M additions at 66.9 TFLOP/s: 0.717 us.
    cost = Cost(hbm_bytes=256e6, egress_bytes=192e6, ingress_bytes=192e6, flops={"fp32": 48e6})
    line = roofline([cost] * 4, SHEET)
    assert line.nvlink_us == pytest.approx(426.667, rel=1e-5)
    assert line.hbm_us == pytest.approx(53.333, rel=1e-4)
    assert line.vector_us == pytest.approx(0.71749, rel=1e-4)
    assert (line.tensor_us, line.latency_us) == (0, FLAG_EXCHANGE_US)
    assert line.bound_by == "nvlink" and line.bound_us == line.nvlink_us
    assert line.utilisation(853.334) == pytest.approx(0.5, rel=1e-5)


def test_no_honest_call_beats_the_floor_of_costs_that_are_means() -> None:
    """A block's calls may all fall short of the mean: half of it is certain."""
    exact, mean = Cost(0, 450e6, 0, {"bf16": 1e9}), Cost(0, 450e6, 0, {"bf16": 1e9}, typical=True)
    assert physical_floor_us([exact] * 2, H200_SXM) == pytest.approx(1000.0)
    for ranks in ([mean] * 2, [mean, exact], [exact, mean]):
        assert physical_floor_us(ranks, H200_SXM, calls=8) == pytest.approx(4000.0)


def test_two_tiers_by_hand() -> None:
    # 90 MB inside a node at 450 GB/s: 200 us. 20 MB between nodes at 50 GB/s: 400 us.
    line = roofline([Cost(1e6, 90e6, 0, network_egress_bytes=10e6, network_ingress_bytes=20e6)], SHEET)
    assert line.nvlink_us == pytest.approx(200) and line.network_us == pytest.approx(400)
    assert line.bound_by == "network" and line.bound_us == line.network_us
    assert roofline([Cost(0, 0, 0, network_ingress_bytes=8)], SHEET).bound_us == FLAG_EXCHANGE_US


def test_matrix_product_in_two_types_adds_up_by_hand() -> None:
    # 2 x 8192^3 operations in bf16 at 989.4 TFLOP/s: 1111.3 us; as many in fp8 at 1978.9: 555.6 us; one after the other.
    operations = 2.0 * 8192**3
    line = roofline([Cost(4e8, 0, 0, {"bf16": operations, "fp8": operations})], SHEET)
    assert line.tensor_us == pytest.approx(1111.3 + 555.6, rel=1e-4)
    assert line.bound_by == "tensor" and line.latency_us == 0 and line.nvlink_us == 0


def test_every_term_is_the_busiest_ranks() -> None:
    sender = Cost(hbm_bytes=48e6, egress_bytes=45e6, ingress_bytes=0)
    receiver = Cost(hbm_bytes=96e6, egress_bytes=0, ingress_bytes=9e6, flops={"fp64": 67e6})
    line = roofline([sender, receiver], SHEET)
    assert line.nvlink_us == pytest.approx(100)
    assert line.hbm_us == pytest.approx(20)
    assert line.vector_us == pytest.approx(2)


def test_only_a_small_message_is_bound_by_latency() -> None:
    assert roofline([Cost(64, 8, 8)], SHEET).bound_by == "latency"
    local = roofline([Cost(64, 0, 0)], SHEET)
    assert local.bound_by == "hbm" and local.latency_us == 0


def test_receiving_alone_costs_latency() -> None:
    assert roofline([Cost(0, 0, 0), Cost(0, 0, 8)], SHEET).bound_us == FLAG_EXCHANGE_US


def test_unknown_operation_type_is_refused() -> None:
    with pytest.raises(UsageError, match=r"fp4.*bf16"):
        roofline([Cost(1, 1, 1, {"fp4": 1e9})], SHEET)
    with pytest.raises(UsageError, match="fp4"):
        physical_floor_us([Cost(1, 1, 1, {"fp4": 1e9})], H200_SXM)


@pytest.mark.parametrize("measured_us", [0.0, -1.0, float("nan")])
def test_utilisation_needs_a_time(measured_us: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        roofline([Cost(1e6, 0, 0)], SHEET).utilisation(measured_us)


@given(cost_lists)
def test_bound_is_the_largest_term_and_named(ranks: list[Cost]) -> None:
    line = roofline(ranks, SHEET)
    assert line.bound_us == max(line.times_us.values())
    assert line.times_us[line.bound_by] == line.bound_us
    assert all(time >= 0 for time in line.times_us.values())


@given(cost_lists, st.floats(0.1, 1e9), st.floats(1.0, 1e3))
def test_utilisation_falls_as_time_grows_and_grows_with_the_work(ranks: list[Cost], measured_us: float, factor: float) -> None:
    line = roofline(ranks, SHEET)
    assert line.utilisation(measured_us) >= line.utilisation(measured_us * factor)
    assert roofline([*ranks, scaled(ranks[0], factor)], SHEET).utilisation(measured_us) >= line.utilisation(measured_us)


def scaled(cost: Cost, factor: float) -> Cost:
    flops: Mapping[str, float] = {dtype: count * factor for dtype, count in cost.flops.items()}
    return Cost(cost.hbm_bytes * factor, cost.egress_bytes * factor, cost.ingress_bytes * factor, flops)


@given(cost_lists)
def test_nothing_is_accused_above_the_datasheet_bound(ranks: list[Cost]) -> None:
    assert physical_floor_us(ranks, H200_SXM) <= roofline(ranks, SHEET).bound_us * (1 + 1e-9)


@given(cost_lists, st.integers(1, 50))
def test_floor_of_many_calls_is_at_least_that_of_each(ranks: list[Cost], calls: int) -> None:
    assert physical_floor_us(ranks, H200_SXM, calls=calls) >= calls * physical_floor_us(ranks, H200_SXM) * (1 - 1e-9)


def test_floor_by_hand() -> None:
    # The clock may be 1.98 GHz instead of 1.83: 2 x 8192^3 operations then take 1111.3 / 1.082 us.
    assert physical_floor_us([Cost(0, 0, 0, {"bf16": 2.0 * 8192**3})], H200_SXM) == pytest.approx(1111.3 * 1.83 / 1.98, rel=1e-4)
    # Two L2 caches of 60 MiB need not cross the memory bus: of 605.8291 MB, 480 MB remain: 100 us.
    assert physical_floor_us([Cost(480e6 + 120 * 2**20, 0, 0, {"fp32": 1.0})], H200_SXM) == pytest.approx(100)
    assert physical_floor_us([Cost(100e6, 0, 0, {"fp32": 1.0})], H200_SXM) < 1e-6
    # Ten calls have one cache between them: 10 x 100 MB less 125.83 MB at 4.8 TB/s.
    assert physical_floor_us([Cost(100e6, 0, 0, {"fp32": 1.0})], H200_SXM, calls=10) == pytest.approx((1000e6 - 120 * 2**20) / 4.8e6)
    # 45 MB through a port of 450 GB/s: 100 us.
    assert physical_floor_us([Cost(0, 45e6, 9e6)], H200_SXM) == pytest.approx(100)


def test_an_exchange_among_one_rank_may_return_its_input() -> None:
    case = dataclasses.replace(problems.get(27).cases("pkb", 2)[0], world_size=1)
    cost = problems.get(27).cost(case, 0)
    assert cost.hbm_bytes > 0 and physical_floor_us([cost], H200_SXM, calls=128) == 0
    assert physical_floor_us([dataclasses.replace(cost, egress_bytes=1.0)], H200_SXM, calls=128) > 0


def test_measured_peaks_replace_those_of_the_datasheet() -> None:
    peaks = measured_peaks(
        ceilings(hbm_copy_tbps=4.3, bf16_matmul_tflops=780, nvlink_pair_gbps=389, nvlink_ring_gbps=371, nccl_allreduce_8b_us=23), H200_SXM
    )
    assert peaks.source == "measured" and peaks.hbm_tbps == 4.3 and peaks.nvlink_gbps == 389
    assert peaks.tensor_tflops["bf16"] == 780 and peaks.tensor_tflops["fp16"] == 989.4
    assert peaks.latency_us == FLAG_EXCHANGE_US
    assert set(peaks.assumed) == {"fp16", "fp8", "tf32", "fp32", "fp64", "latency"}
    assert roofline([Cost(43e6, 0, 0)], peaks).bound_us == pytest.approx(10)
    assert roofline([Cost(43e6, 0, 0)], peaks).assumed == peaks.assumed


def test_best_mechanism_and_shortest_trip_are_the_ceilings() -> None:
    peaks = measured_peaks(
        ceilings(
            nvlink_pair_gbps=389, nvlink_copy_engine_push_gbps=392, nvlink_sm_store_gbps=366, flag_exchange_us=1.8, packet_round_us=1.4
        ),
        H200_SXM,
    )
    assert peaks.nvlink_gbps == 392 and peaks.latency_us == pytest.approx(0.7)
    assert not {"nvlink", "latency"} & set(peaks.assumed)


def test_nothing_measured_is_the_datasheet_and_says_so() -> None:
    peaks = measured_peaks(ceilings(), H200_SXM)
    assert set(peaks.assumed) == {"bf16", "fp16", "fp8", "tf32", "fp32", "fp64", "hbm", "nvlink", "latency"}
    assert dataclasses.replace(peaks, source="datasheet", assumed=()) == SHEET


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


@pytest.mark.parametrize(
    ("variable", "printed", "expected"),
    [
        ("8.0", "9.0", "8.0"),
        (None, "9.0\\n9.0", "9.0a"),
        (None, "8.9", "8.9"),
        (None, "8.0\\n10.0", "10.0a;8.0"),
        (None, "[N/A]", ARCHITECTURE),
        (None, None, ARCHITECTURE),
    ],
)
def test_the_node_decides(
    variable: str | None, printed: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    if printed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{printed}\\n'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    toolkit.gpu_architectures.cache_clear()
    try:
        assert toolkit.extension_architectures() == expected
    finally:
        toolkit.gpu_architectures.cache_clear()
