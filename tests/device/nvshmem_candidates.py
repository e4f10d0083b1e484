"""The NVSHMEM examples, and broken twins of them: each by one changed line, with the verdicts that it may get on GPUs."""

from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples" / "nvshmem"
PROMPT = Path(__file__).parents[2] / "src/peerlane/generate/prompts/examples/difference_nvshmem.py"


class Twin(NamedTuple):
    """A broken candidate."""

    name: str
    original: str
    line: str
    changed: str
    verdicts: tuple[str, ...]
    folder: Path = EXAMPLES

    def source(self) -> str:
        """Returns its text; raises ValueError if the line to change is not there once."""
        text = (self.folder / self.original).read_text()
        if text.count(self.line) != 1:
            raise ValueError(f"{self.original} has {text.count(self.line)} lines {self.line!r}: expected one")
        return text.replace(self.line, self.changed)


_PUT = """nvshmemx_putmem_signal_nbi_block(
            box + me * slot, outbox + i * stride + first, count, signals + me * parts + part, round, NVSHMEM_SIGNAL_SET, peer);"""
_SIGNAL_FIRST = """if (threadIdx.x == 0) nvshmemx_signal_op(signals + me * parts + part, round, NVSHMEM_SIGNAL_SET, peer);
        __nanosleep(50000);  // or the data may win the race
        nvshmemx_putmem_nbi_block(box + me * slot, outbox + i * stride + first, count, peer);"""

TWINS = (
    Twin("2_signal_before_data_nvshmem", "2_allgather_nvshmem.py", _PUT, _SIGNAL_FIRST, ("wrong_result", "unstable")),
    Twin(
        "1_waits_for_the_round_before_nvshmem",
        "1_allreduce_nvshmem.py",
        "peerlane::wait_signal(signals + peer * parts + part, round);",
        "peerlane::wait_signal(signals + peer * parts + part, round - 1);",
        ("wrong_result", "unstable"),
    ),
    Twin(
        "8_waits_for_ever_nvshmem",
        "8_alltoall_nvshmem.py",
        "peerlane::wait_signal(signals + peer * parts + part, round);",
        "nvshmem_signal_wait_until(signals + peer * parts + part, NVSHMEM_CMP_GE, round + 1);",
        ("hang",),
    ),
)
