"""Measured ceilings of a node: what its GPUs and links reached in plain copies and matrix products, stored per node class.

:mod:`peerlane.hardware.measure` takes them; this module holds and stores them.
"""

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from peerlane.common.files import write_atomically
from peerlane.common.places import ROW_BYTES
from peerlane.settings import cache_dir

SCHEMA = 1

FIGURES: Mapping[str, str] = {
    "hbm_copy_tbps": "copy within one GPU's memory, bytes read plus bytes written, 10^12 bytes/s",
    "bf16_matmul_tflops": "8192^3 matrix product on random data",
    "fp16_matmul_tflops": "8192^3 matrix product on random data",
    "tf32_matmul_tflops": "8192^3 matrix product on random data, tensor cores",
    "fp8_matmul_tflops": "8192^3 matrix product on random data, e4m3, one scale a tensor, bf16 result",
    "fp32_matmul_tflops": "8192^3 matrix product on random data, vector units",
    "kernel_launch_us": "host time per launch of a kernel that does nothing, from Python, back to back",
    "nvlink_pair_gbps": "256 MB pushed by the copy engine to one peer, all else idle, 10^9 bytes/s",
    "nvlink_ring_gbps": "the same, every GPU to its next one at once; each sample is the slowest GPU's",
    "flag_exchange_us": "two GPUs write a flag to each other and wait for the other's, device time",
    **{
        f"nvlink_{mechanism}_gbps": f"{how}; GPU 0 and one peer, all else idle, the fastest size and number of blocks, 10^9 bytes/s"
        for mechanism, how in {
            "copy_engine_push": "written by the copy engine",
            "copy_engine_pull": "read by the copy engine",
            "sm_store": "16-byte stores of SMs",
            "sm_load": "16-byte loads of SMs",
            "bulk_store": "bulk copies out of shared memory",
            "bulk_add": "bulk copies that add",
            "bulk_load": "bulk copies into shared memory",
        }.items()
    },
    "flag_round_us": "a flag from one GPU to another and back, with its fences, device time",
    "packet_round_us": "a packet, which carries its flag, there and back, device time",
    "barrier_round_us": "a barrier of all GPUs inside of a kernel, device time",
    "nccl_allreduce_8b_us": "NCCL all-reduce of 8 bytes, called from Python, slowest rank",
    "nccl_allreduce_256b_us": "NCCL all-reduce of 256 bytes, called from Python, slowest rank",
    "nccl_allreduce_2048b_us": "NCCL all-reduce of 2048 bytes, called from Python, slowest rank",
    "nccl_allreduce_graph_8b_us": "NCCL all-reduce of 8 bytes, replayed as a CUDA graph, slowest rank",
    **{
        f"{what}_{row}b_tbps": f"{how}, rows of {row} bytes in random places, payload, 10^12 bytes/s"
        for what, how in {
            "read_rows": "read from 2 GiB of the GPU's own memory",
            "peer_read_rows": "read from 2 GiB of another GPU's memory, all else idle",
            "add_rows": "four floats at a time added to 32 MiB, which the L2 holds",
        }.items()
        for row in ROW_BYTES
    },
    "read_words_gops": "8 bytes read in random places of 2 GiB of the GPU's own memory, 10^9 reads/s",
    "peer_read_words_gops": "the same of another GPU's memory, all else idle",
    "swap_words_gops": "8 bytes compared and swapped in random places of 2 GiB of the GPU's own memory, 10^9/s",
}
"""Every figure that may be measured, and what it is. Those by mechanism are `peerlane bench mechanisms`'."""


@dataclass(frozen=True)
class Measurement:
    """One figure: the median of ``n`` samples, with their 10th and 90th percentiles. The unit is in the figure's name."""

    median: float
    p10: float
    p90: float
    n: int

    @staticmethod
    def of(samples: Sequence[float]) -> "Measurement":
        """Summarises at least one sample; percentiles interpolate between the nearest two."""
        if not samples:
            raise ValueError("no samples: expected at least one")
        if len(samples) == 1:
            return Measurement(samples[0], samples[0], samples[0], 1)
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return Measurement(statistics.median(samples), deciles[0], deciles[-1], len(samples))


@dataclass(frozen=True)
class Ceilings:
    """The ceilings measured on one node.

    Attributes:
        node: its class, from ``environment.node_class``.
        taken_at: UTC, ISO 8601.
        environment: the record of ``environment.record``, taken just before.
        figures: name from :data:`FIGURES` -> measurement; samples of all GPUs together. What could not be measured is not there.
        notes: what could not be measured, and why.
    """

    node: str
    taken_at: str
    environment: Mapping[str, Any]
    figures: Mapping[str, Measurement] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def median(self, figure: str) -> float | None:
        """Returns the figure's median, or None if it was not measured."""
        measured = self.figures.get(figure)
        return measured.median if measured else None

    def joined(self, figures: Mapping[str, Measurement], notes: Sequence[str] = ()) -> "Ceilings":
        """Returns these ceilings and more."""
        return replace(self, figures={**self.figures, **figures}, notes=(*self.notes, *notes))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON-able form, the inverse of :meth:`from_json`."""
        return {"schema": SCHEMA, **asdict(self), "notes": list(self.notes)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Ceilings":
        """Reads the form of :meth:`to_json`; raises ValueError, KeyError or TypeError for anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"ceilings of schema {data['schema']!r}: expected {SCHEMA}")
        return Ceilings(
            node=data["node"],
            taken_at=data["taken_at"],
            environment=data["environment"],
            figures={name: Measurement(**values) for name, values in data["figures"].items()},
            notes=tuple(data["notes"]),
        )


def ceilings_path(node: str) -> Path:
    """Returns the path of a node class's ceilings: ``<cache>/ceilings/4x-nvidia-h200-nvlink-driver-580.json``."""
    return cache_dir() / "ceilings" / (re.sub(r"[^a-z0-9]+", "-", node.lower()).strip("-") + ".json")


def save_ceilings(ceilings: Ceilings) -> Path:
    """Stores ceilings under the node's class. Replaces the file in one step: a reader sees the old file or the new one, never a part."""
    path = ceilings_path(ceilings.node)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(ceilings.to_json(), indent=1).encode())
    return path


def load_ceilings(node: str) -> Ceilings | None:
    """Loads the ceilings of a node class; None if there are none, or the file is damaged or of another version: measure again."""
    try:
        loaded = Ceilings.from_json(json.loads(ceilings_path(node).read_text()))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return loaded if loaded.node == node else None
