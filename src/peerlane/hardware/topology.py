"""The hardware of this machine: GPUs, the links between them, cores and memory. Creates no CUDA context, here or anywhere.

Sources, first that answers: NVML through the ``nvidia-ml-py`` package, the ``nvidia-smi`` program; ``Topology.source`` says which.
A machine without GPUs is a normal answer, not an error.
"""

import importlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from peerlane.common.toolkit import output_of

T = TypeVar("T")

SMI_QUERY = ("index", "name", "uuid", "memory.total", "driver_version", "clocks.sm", "clocks.mem", "clocks_event_reasons.active")
_SMI_TIMEOUT_S = 20.0

# nvmlClocksEventReason* of nvml.h; the older name of the same bits is "throttle reasons".
_CLOCK_EVENT_REASONS: Mapping[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it now. None: the driver does not say.

    Attributes:
        index: position in the driver's list, which follows PCI bus order.
        sm_clock_mhz, memory_clock_mhz: at the moment of asking; low when idle.
        clock_event_reasons: why the clock is not at its highest now: ``gpu_idle``, ``sw_power_cap``, ``hw_thermal_slowdown``, ...
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_event_reasons: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Topology:
    """The machine.

    Attributes:
        gpus: those that a program started here would see, after ``CUDA_VISIBLE_DEVICES``.
        links: (lower index, higher index) -> ``NV18`` for 18 NVLinks, directly or through NVSwitch, or how else they are joined: ``PIX``,
            ``PHB``, ``SYS`` as nvidia-smi names PCIe paths, ``PCIe`` where that is all that is known. Empty when nothing is known.
        driver_version: of the NVIDIA driver; None without one.
        cpu_cores: logical cores that this process may use.
        ram_bytes: physical memory as the kernel reports it now (virtual machines may grow it).
        source: ``nvml``, ``nvidia-smi`` or ``none``.
        reason: why there is no GPU, or what could not be read; empty when all is well.
    """

    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], str]
    driver_version: str | None
    cpu_model: str
    cpu_cores: int
    ram_bytes: int | None
    source: str
    reason: str = ""

    @property
    def interconnect(self) -> str:
        """``NVLink`` if it joins every pair, ``PCIe`` if none, ``partly NVLink``, ``unknown links``; empty for fewer than two GPUs."""
        if len(self.gpus) < 2:
            return ""
        if not self.links:
            return "unknown links"
        indices = sorted(gpu.index for gpu in self.gpus)
        joined = [self.links.get((a, b), "").startswith("NV") for i, a in enumerate(indices) for b in indices[i + 1 :]]
        return "NVLink" if all(joined) else "partly NVLink" if any(joined) else "PCIe"


@dataclass(frozen=True)
class _Driver:
    """The answer of NVML or nvidia-smi, before ``CUDA_VISIBLE_DEVICES``."""

    source: str
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    version: str | None = None
    reason: str = ""


def discover(environ: Mapping[str, str] | None = None) -> Topology:
    """Looks at this machine. ``environ`` (default: this process's) is only asked for ``CUDA_VISIBLE_DEVICES``."""
    driver = _or_none(_ask_nvml) or _ask_smi() or _Driver("none", reason="no NVIDIA driver: neither NVML nor nvidia-smi answers")
    gpus = visible(driver.gpus, (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES"))
    seen = {gpu.index for gpu in gpus}
    reason = driver.reason
    if driver.gpus and not gpus:
        reason = f"CUDA_VISIBLE_DEVICES hides all {len(driver.gpus)} GPUs"
    return Topology(
        gpus=gpus,
        links={pair: link for pair, link in driver.links.items() if seen.issuperset(pair)},
        driver_version=driver.version,
        cpu_model=_cpu_model(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_bytes=_ram_bytes(),
        source=driver.source,
        reason=reason,
    )


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that ``CUDA_VISIBLE_DEVICES=setting`` leaves, in its order; entries are indices or starts of UUIDs.

    As in CUDA, the list ends at the first entry that names no GPU, and a GPU named twice hides all. CUDA numbers GPUs fastest first unless
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; this function always counts in bus order, which is the same where all GPUs are alike.
    """
    if setting is None:
        return gpus
    left: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            match = [gpu for gpu in gpus if gpu.index == int(entry)]
        else:
            match = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(match) != 1:
            break
        if match[0] in left:
            return ()
        left.append(match[0])
    return tuple(left)


def clock_event_reasons(mask: int) -> tuple[str, ...]:
    """Returns the names of the bits of NVML's clock event mask; a bit without a name is given as ``bit_0x400``."""
    bits = [1 << position for position in range(mask.bit_length()) if mask >> position & 1]
    return tuple(_CLOCK_EVENT_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)


# NVML


@contextmanager
def _nvml() -> Iterator[Any | None]:
    """Opens the initialised ``pynvml`` module, or None where it is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # ImportError, OSError, NVMLError, whose class comes with the module: all mean "ask someone else"
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _or_none(question: Callable[..., T], *arguments: Any) -> T | None:
    """Returns the answer, or None where the driver refuses: virtual machines and old drivers leave single questions unanswered."""
    try:
        return question(*arguments)
    except Exception:
        return None


def _ask_nvml() -> _Driver | None:
    with _nvml() as nvml:
        if nvml is None:
            return None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_nvml_gpu(nvml, index, handle) for index, handle in enumerate(handles))
        links = _nvml_links(nvml, handles)
        version = _or_none(nvml.nvmlSystemGetDriverVersion)
    if len(gpus) > 1 and not links:
        links = parse_smi_topology(_smi("topo", "-m") or "")
    return _Driver("nvml", gpus, links, _text(version), "" if gpus else "the NVIDIA driver is loaded but lists no GPU")


def _text(value: Any) -> str | None:
    """Returns a string of NVML: older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _nvml_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    mask = _or_none(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return Gpu(
        index=index,
        name=str(_text(nvml.nvmlDeviceGetName(handle))),
        uuid=str(_text(nvml.nvmlDeviceGetUUID(handle))),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        sm_clock_mhz=_or_none(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=_or_none(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        clock_event_reasons=None if mask is None else clock_event_reasons(mask),
    )


def _nvml_links(nvml: Any, handles: list[Any]) -> dict[tuple[int, int], str]:
    """Returns the links of every pair, empty if NVML does not say.

    Behind NVSwitch every link of a GPU leads to a switch, so a pair has as many links as the GPU with fewer; without one, the links whose
    far end is the other GPU count. NVML's peer-to-peer status says whether NVLink joins the pair at all.
    """
    buses = [_bus_id(_or_none(nvml.nvmlDeviceGetPciInfo, handle)) for handle in handles]
    far_ends = [_nvml_far_ends(nvml, handle) for handle in handles]
    links: dict[tuple[int, int], str] = {}
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            try:
                status = nvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            except Exception:
                return {}
            if status != nvml.NVML_P2P_STATUS_OK:
                links[a, b] = "PCIe"
                continue
            direct = far_ends[a].count(buses[b]) if buses[b] is not None else 0
            links[a, b] = f"NV{direct or min(len(far_ends[a]), len(far_ends[b]))}"
    return links


def _nvml_far_ends(nvml: Any, handle: Any) -> list[str | None]:
    """Returns the PCI bus id of the far end of every active NVLink of a GPU; None where it is hidden, as in virtual machines."""
    ends: list[str | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except Exception:
            break  # past the last link of this model
        if active:
            ends.append(_bus_id(_or_none(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
    return ends


def _bus_id(pci: Any) -> str | None:
    return None if pci is None else _text(pci.busId)


# nvidia-smi


def _smi(*arguments: str) -> str | None:
    """Returns what nvidia-smi prints, or None if it is missing, fails or takes too long."""
    return output_of(["nvidia-smi", *arguments], _SMI_TIMEOUT_S)


def _ask_smi() -> _Driver | None:
    fields = ",".join(SMI_QUERY)
    # Drivers before 535 know the last field by its older name.
    for query in (fields, fields.replace("clocks_event_reasons", "clocks_throttle_reasons")):
        output = _smi(f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if output is not None:
            gpus, version = parse_smi_gpus(output)
            links = parse_smi_topology(_smi("topo", "-m") or "") if len(gpus) > 1 else {}
            return _Driver("nvidia-smi", gpus, links, version, "" if gpus else "nvidia-smi lists no GPU")
    return None


def parse_smi_gpus(output: str) -> tuple[tuple[Gpu, ...], str | None]:
    """Parses GPUs and driver version from ``nvidia-smi --query-gpu=`` :data:`SMI_QUERY` ``--format=csv,noheader,nounits``.

    Lines that do not have the eight fields ("No devices were found") are passed over.
    """
    gpus: list[Gpu] = []
    version: str | None = None
    for line in output.splitlines():
        fields = [value.strip() for value in line.split(",")]
        if len(fields) != len(SMI_QUERY) or not fields[0].isdecimal():
            continue
        index, name, uuid, memory_mib, version, sm_clock, memory_clock, reasons = fields
        gpus.append(
            Gpu(
                index=int(index),
                name=name,
                uuid=uuid,
                memory_bytes=int(memory_mib) * 2**20 if memory_mib.isdecimal() else 0,
                sm_clock_mhz=int(sm_clock) if sm_clock.isdecimal() else None,
                memory_clock_mhz=int(memory_clock) if memory_clock.isdecimal() else None,
                clock_event_reasons=clock_event_reasons(int(reasons, 16)) if reasons.startswith("0x") else None,
            )
        )
    return tuple(gpus), version


def parse_smi_topology(output: str) -> dict[tuple[int, int], str]:
    """Parses the links between GPUs from the matrix that ``nvidia-smi topo -m`` prints; empty where there is none."""
    links: dict[tuple[int, int], str] = {}
    columns: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines():
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]):
            continue
        if not columns:
            # The header's first words are the columns with a device each; "CPU Affinity" and so on follow and are not needed.
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
            continue
        row = int(words[0][3:])
        # GPUs are the leading columns of the matrix, so the first cells of a row belong to them.
        for column, cell in zip(columns, words[1:], strict=False):
            other = int(column[3:])
            if row < other:
                links[row, other] = cell
    return links


# The host


def _cpu_model() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU. ``fault``: what the driver said instead of answering; empty where all is well."""

    used_bytes: int
    fault: str = ""


def gpu_memory(indices: Sequence[int]) -> tuple[GpuMemory, ...]:
    """Reads the memory of the GPUs with these numbers of the driver, in this order; empty where neither NVML nor nvidia-smi answers."""
    with _nvml() as nvml:
        if nvml is not None:
            return tuple(_by_nvml(nvml, index) for index in indices)
    output = _smi("--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
    return () if output is None else parse_smi_memory(output, indices)


def _by_nvml(nvml: object, index: int) -> GpuMemory:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[attr-defined]
    except Exception as error:  # NVMLError, whose class comes with the module: the GPU is lost, or needs a reset
        return GpuMemory(0, str(error) or type(error).__name__)
    return GpuMemory(int(info.used))


def parse_smi_memory(output: str, indices: Sequence[int]) -> tuple[GpuMemory, ...]:
    """Parses ``nvidia-smi --query-gpu=index,memory.used``, csv without header and units; a GPU not listed has a fault."""
    memory = {}
    for line in output.splitlines():
        if match := re.fullmatch(r"\s*(\d+)\s*,\s*(.*?)\s*", line):
            index, used = match.groups()
            memory[int(index)] = GpuMemory(int(used) << 20) if used.isdecimal() else GpuMemory(0, f"memory in use: {used}")
    return tuple(memory.get(index, GpuMemory(0, "nvidia-smi does not list it any more")) for index in indices)
