import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peerlane.hardware.topology import Gpu, Topology, clock_event_reasons, discover, parse_smi_gpus, parse_smi_topology, visible

SMI_GPUS = """\
0, NVIDIA H200, GPU-aaaa1111, 143771, 580.159.04, 345, 3201, 0x0000000000000001
1, NVIDIA H200, GPU-aaaa2222, 143771, 580.159.04, 1980, 3201, 0x0000000000000024
2, NVIDIA H200, GPU-bbbb3333, 143771, 580.159.04, [N/A], [N/A], [N/A]
"""

ESC = "\x1b"
SMI_TOPOLOGY_NVSWITCH = f"""\
\t{ESC}[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID{ESC}[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\t0-31\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

SMI_TOPOLOGY_MIXED = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      NV4     PHB     SYS     0-15
GPU1    NV4      X      SYS     SYS     0-15
GPU2    PHB     SYS      X      NV4     16-31
GPU3    SYS     SYS     NV4      X      16-31
"""


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, "NVIDIA H200", f"GPU-{index}{index}{index}", 141 * 2**30) for index in range(count))


def machine(count: int, links: dict[tuple[int, int], str]) -> Topology:
    return Topology(gpus(count), links, "580.1", "a CPU", 64, 2**39, "nvml")


def test_smi_gpus() -> None:
    found, driver = parse_smi_gpus(SMI_GPUS)
    assert driver == "580.159.04"
    assert [gpu.index for gpu in found] == [0, 1, 2]
    assert found[1] == Gpu(1, "NVIDIA H200", "GPU-aaaa2222", 143771 * 2**20, 1980, 3201, ("sw_power_cap", "sw_thermal_slowdown"))
    assert (found[2].sm_clock_mhz, found[2].memory_clock_mhz, found[2].clock_event_reasons) == (None, None, None)


@pytest.mark.parametrize(
    "output", ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't communicate with the driver\n"]
)
def test_smi_without_gpus(output: str) -> None:
    assert parse_smi_gpus(output) == ((), None)
    assert parse_smi_topology(output) == {}


def test_smi_topology_behind_nvswitch() -> None:
    assert parse_smi_topology(SMI_TOPOLOGY_NVSWITCH) == {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}


def test_smi_topology_with_pairs_of_bridged_gpus() -> None:
    links = parse_smi_topology(SMI_TOPOLOGY_MIXED)
    assert links == {(0, 1): "NV4", (0, 2): "PHB", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "NV4"}
    assert machine(4, links).interconnect == "partly NVLink"


def test_interconnect() -> None:
    assert machine(2, {(0, 1): "NV18"}).interconnect == "NVLink"
    assert machine(2, {(0, 1): "SYS"}).interconnect == "PCIe"
    assert machine(2, {}).interconnect == "unknown links"
    assert machine(1, {}).interconnect == ""


def test_clock_event_reasons() -> None:
    assert clock_event_reasons(0) == ()
    assert clock_event_reasons(0x48) == ("hw_slowdown", "hw_thermal_slowdown")
    assert clock_event_reasons(0x400) == ("bit_0x400",)


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-111", [1]),
        ("GPU-", []),  # names more than one
        ("0,7,1", [0]),  # the list ends at the first entry that names no GPU
        ("-1", []),
        ("1,1", []),
    ],
)
def test_visible_devices(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(gpus(3), setting)] == indices


class NvmlRefuses(Exception):
    pass


class FakeNvml:
    """NVML with ``count`` GPUs. ``far_ends[i]``: where GPU i's active links lead; None for a switch whose address is hidden."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def __init__(self, far_ends: list[list[int | None]], joined: set[tuple[int, int]], answers_p2p: bool = True) -> None:
        self.far_ends, self.joined, self.answers_p2p = far_ends, joined, answers_p2p
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.far_ends)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159.04"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=150 * 10**9)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if kind == self.NVML_CLOCK_MEM:
            raise NvmlRefuses
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return 0x4

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, capability: int) -> int:
        if not self.answers_p2p:
            raise NvmlRefuses
        return 0 if (a, b) in self.joined else 5

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 18:
            raise NvmlRefuses
        return int(link < len(self.far_ends[handle]))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        end = self.far_ends[handle][link]
        if end is None:
            raise NvmlRefuses
        return self.nvmlDeviceGetPciInfo(end)


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a stand-in for nvidia-smi, the only program there is; nvidia-smi is missing until a test writes it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def write_smi(smi: Path, links: str, gpus: str = "") -> None:
    """Writes a stand-in of an old driver, which refuses to tell clock event reasons by their newer name."""
    smi.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"answers = {{'topo': {links!r}, '--query-gpu': {gpus!r}}}\n"
        "answer = '' if 'clocks_event_reasons' in sys.argv[1] else answers.get(sys.argv[1].partition('=')[0], '')\n"
        "print(answer, end='')\n"
        "sys.exit(not answer)\n"
    )
    smi.chmod(0o755)


def test_nvml_behind_nvswitch(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([[None] * 18, [None] * 18, [None] * 17], {(0, 1), (0, 2), (1, 2)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = discover({})
    assert found.source == "nvml" and found.driver_version == "580.159.04" and found.reason == ""
    assert found.gpus[0] == Gpu(0, "NVIDIA H200", "GPU-0", 150 * 10**9, 1980, None, ("sw_power_cap",))
    assert found.links == {(0, 1): "NV18", (0, 2): "NV17", (1, 2): "NV17"}
    assert found.interconnect == "NVLink"
    assert not nvml.is_open


def test_nvml_with_direct_links(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([[1] * 4 + [2] * 2, [0] * 4, [0] * 2], {(0, 1), (0, 2)})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert discover({}).links == {(0, 1): "NV4", (0, 2): "NV2", (1, 2): "PCIe"}


def test_hidden_gpus_take_their_links_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([[None] * 18] * 3, {(0, 1), (0, 2), (1, 2)}))
    found = discover({"CUDA_VISIBLE_DEVICES": "2,0"})
    assert [gpu.index for gpu in found.gpus] == [2, 0]
    assert found.links == {(0, 2): "NV18"} and found.interconnect == "NVLink"
    hidden = discover({"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.gpus == () and "CUDA_VISIBLE_DEVICES" in hidden.reason


def test_links_come_from_smi_where_nvml_does_not_say(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([[None] * 18] * 3, set(), answers_p2p=False))
    write_smi(smi, SMI_TOPOLOGY_NVSWITCH)
    assert discover({}).links == {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}


def test_smi_answers_where_nvml_is_missing(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    write_smi(smi, SMI_TOPOLOGY_NVSWITCH, SMI_GPUS)
    found = discover({})
    assert found.source == "nvidia-smi" and found.driver_version == "580.159.04" and len(found.gpus) == 3
    assert found.interconnect == "NVLink"


def test_bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = discover({})
    assert found.gpus == () and found.source == "none" and "no NVIDIA driver" in found.reason
    assert found.cpu_cores >= 1 and found.cpu_model and found.ram_bytes is not None and found.ram_bytes > 2**20
