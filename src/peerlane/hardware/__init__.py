"""The machine: datasheet profiles, topology, environment record, measured ceilings, rooflines, and the doctor's checks.

Nothing here creates a CUDA context in the calling process; measuring happens in processes that :mod:`peerlane.hardware.measure` starts.
"""

from peerlane.hardware.ceilings import Ceilings, Measurement, load_ceilings, save_ceilings
from peerlane.hardware.doctor import Check, diagnose
from peerlane.hardware.environment import node_class, record
from peerlane.hardware.profiles import PROFILES, HardwareProfile, profile_for
from peerlane.hardware.roofline import Peaks, Roofline, datasheet_peaks, measured_peaks, physical_floor_us, roofline
from peerlane.hardware.topology import Gpu, Topology, discover

__all__ = [
    "PROFILES",
    "Ceilings",
    "Check",
    "Gpu",
    "HardwareProfile",
    "Measurement",
    "Peaks",
    "Roofline",
    "Topology",
    "datasheet_peaks",
    "diagnose",
    "discover",
    "load_ceilings",
    "measured_peaks",
    "node_class",
    "physical_floor_us",
    "profile_for",
    "record",
    "roofline",
    "save_ceilings",
]
