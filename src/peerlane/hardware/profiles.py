"""Datasheet figures of the GPUs that peerlane knows: upper ends that no machine reaches, the same for everyone.

Units: TFLOP/s are 10^12 operations per second, a fused multiply-add counting as two; TB/s and GB/s are 10^12 and 10^9 bytes per second; L2
is in MiB, as the device properties report it. All tensor-core figures are dense: vendors also print twice as much, for 2:4 sparse operands.
To add a GPU, add a :class:`HardwareProfile` to :data:`PROFILES`, each figure with its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class HardwareProfile:
    """The published peaks of one GPU model.

    Attributes:
        name: short name, ``H200 SXM``.
        device_names: what the driver calls it, exactly (case aside): PCIe, NVL and MIG parts of the same chip have other figures.
        compute_capability: (major, minor).
        tensor_tflops: dense tensor-core peak by dtype: ``bf16``, ``fp16``, ``fp8``, ``tf32``, ``fp64``.
        vector_tflops: peak of the vector units by dtype: ``fp32``, ``fp64``.
        hbm_tbps, hbm_gb: device memory bandwidth (reads and writes together) and size as printed.
        nvlink_gbps: all NVLinks of the GPU together, in one direction.
        network_gbps: the GPU's own network adapter in the vendor's server of eight, in one direction.
        sm_count: multiprocessors that programs see.
        l2_mib: L2 cache.
        tensor_clock_headroom: highest SM clock divided by the clock that the tensor figures assume; short bursts run this much faster than
            the datasheet says.
        sources: where each figure is from.
    """

    name: str
    device_names: tuple[str, ...]
    compute_capability: tuple[int, int]
    tensor_tflops: Mapping[str, float]
    vector_tflops: Mapping[str, float]
    hbm_tbps: float
    hbm_gb: float
    nvlink_gbps: float
    network_gbps: float
    sm_count: int
    l2_mib: float
    tensor_clock_headroom: float
    sources: tuple[str, ...]


_HOPPER_COMPUTE_SOURCE = (
    "compute: NVIDIA H100 Tensor Core GPU Architecture whitepaper, table of H100 SXM5 peak rates, without sparsity; the tensor rates below "
    "fp64 are 132 SMs x 4096 bf16 operations x 1.83 GHz, the fp32 and fp64 rates assume 1.98 GHz, which is also the highest SM clock"
)

H100_SXM = HardwareProfile(
    name="H100 SXM",
    device_names=("NVIDIA H100 80GB HBM3",),
    compute_capability=(9, 0),
    tensor_tflops=MappingProxyType({"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp64": 66.9}),
    vector_tflops=MappingProxyType({"fp32": 66.9, "fp64": 33.5}),
    hbm_tbps=3.35,
    hbm_gb=80,
    nvlink_gbps=450,
    network_gbps=50,
    sm_count=132,
    l2_mib=50,
    tensor_clock_headroom=1.98 / 1.83,
    sources=(
        _HOPPER_COMPUTE_SOURCE,
        "memory: NVIDIA H100 datasheet, SXM column: 80 GB, 3.35 TB/s",
        "links: the same datasheet: NVLink 900 GB/s, both directions together, halved; 18 links of 25 GB/s",
        "network: NVIDIA DGX H100 datasheet: eight ConnectX-7 adapters of 400 Gbit/s, one for each GPU",
        "SMs and L2 (132, 50 MB): the architecture whitepaper",
    ),
)
"""H100 SXM5, 80 GB HBM3."""

H200_SXM = replace(
    H100_SXM,
    name="H200 SXM",
    device_names=("NVIDIA H200",),
    hbm_tbps=4.8,
    hbm_gb=141,
    l2_mib=60,
    sources=(
        _HOPPER_COMPUTE_SOURCE + "; the H200 datasheet prints the same rates",
        "memory: NVIDIA H200 datasheet, SXM column: 141 GB, 4.8 TB/s",
        "links: the same datasheet: NVLink 900 GB/s, both directions together, halved",
        "network: NVIDIA DGX H200 datasheet: eight ConnectX-7 adapters of 400 Gbit/s, one for each GPU",
        "SMs and L2 (132, 60 MB): device properties read on an H200",
    ),
)
"""H200 SXM5, 141 GB HBM3e: the H100's processor with other memory."""

B200_SXM = HardwareProfile(
    name="B200 SXM",
    device_names=("NVIDIA B200",),
    compute_capability=(10, 0),
    tensor_tflops=MappingProxyType({"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1100, "fp64": 40}),
    vector_tflops=MappingProxyType({"fp32": 80, "fp64": 40}),
    hbm_tbps=8.0,
    hbm_gb=180,
    nvlink_gbps=900,
    network_gbps=50,
    sm_count=148,
    l2_mib=126.5,
    tensor_clock_headroom=1.1,
    sources=(
        "compute: NVIDIA Blackwell Architecture Technical Brief, HGX B200 column (1000 W), per GPU, without sparsity; later HGX datasheets "
        "print 75 (fp32) and 37 (fp64), and the larger figure is kept so that the bound stays a bound",
        "memory: NVIDIA HGX B200 datasheet: 8 TB/s and 1.44 TB for eight GPUs",
        "links: the same datasheet: NVLink 5, 1.8 TB/s a GPU, both directions together, halved",
        "network: NVIDIA DGX B200 datasheet: eight ConnectX-7 adapters of 400 Gbit/s, one for each GPU",
        "SMs and L2 (148, 126.5 MB): device properties published by users, not checked by peerlane",
        "clock headroom: not published; 10 % is an allowance",
    ),
)
"""B200 SXM (HGX), 180 GB HBM3e. peerlane has not been run on one."""

PROFILES: tuple[HardwareProfile, ...] = (H100_SXM, H200_SXM, B200_SXM)


def profile_for(device_name: str) -> HardwareProfile | None:
    """Returns the profile of the GPU that the driver calls ``device_name`` ("NVIDIA H200"), or None for one that peerlane has no figures
    of."""
    wanted = device_name.strip().casefold()
    for profile in PROFILES:
        if wanted in (name.casefold() for name in profile.device_names):
            return profile
    return None
