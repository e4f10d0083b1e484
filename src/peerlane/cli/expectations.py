"""The verdicts that broken examples are made for, as their first comments state them."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from peerlane.common.place import Device, Place
from peerlane.errors import UsageError

BROKEN = "broken"
"""the folder of such examples"""


def stated(path: Path) -> dict[str, str]:
    """Returns ``expect`` and ``needs``, as the first comments of a file state them."""
    comments = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return dict(re.findall(r"^#\s*(expect|needs):\s*(.+?)\s*$", "\n".join(comments), re.MULTILINE))


@dataclass(frozen=True)
class Expectation:
    """The verdicts that a broken candidate must get.

    Attributes:
        cuda, cpu: the verdicts that are right for it on GPUs and on CPU ranks.
        needs: ``gpu`` or ``nvrtc``, if it says nothing without it.
    """

    cuda: tuple[str, ...]
    cpu: tuple[str, ...]
    needs: str | None = None

    def on(self, device: Device) -> tuple[str, ...]:
        """Returns the verdicts that are right on this device."""
        return self.cuda if Place.of(device).has_gpus else self.cpu


def read_expectation(path: Path) -> Expectation:
    """Reads the expectation from a broken candidate's first comments; raises UsageError if they state none.

    ``# expect: hang``, ``# expect: cuda_error on gpu, runtime_error on cpu``, then perhaps ``# needs: nvrtc``. Several verdicts for one
    device are all right.
    """
    comments = stated(path)
    verdicts = [re.fullmatch(r"\s*(\w+)(?: on (gpu|cpu))?\s*", part) for part in comments.get("expect", "").split(",")]
    needs = comments.get("needs")
    if not all(verdicts) or needs not in (None, "gpu", "nvrtc"):
        raise UsageError(
            f"{path} does not say what it is made for: expected a first line such as '# expect: wrong_result' or "
            f"'# expect: cuda_error on gpu, not_run on cpu', then perhaps '# needs: gpu' or '# needs: nvrtc'; got {comments}"
        )
    pairs = [(match[1], match[2]) for match in verdicts if match]
    cuda, cpu = (tuple(kind for kind, device in pairs if device in (None, name)) for name in ("gpu", "cpu"))
    return Expectation(cuda, cpu, needs)
