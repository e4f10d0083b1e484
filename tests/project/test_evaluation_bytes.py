"""The bytes of evaluations, as far as they can be known without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "evaluation_bytes.py"


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_its_largest_part() -> None:
    asked = [sys.executable, str(SCRIPT), "--problem", "2,56,64,68", "--memory-gib", "79"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert lines[1].startswith("  2 allgather") and "0.10     0.41     0.51" in lines[1], "a shard, the whole, and both"
    assert "does not fit: both sides' calls take" in lines[2], "the last rank of the ring holds the scores of two blocks of keys"
    assert "contents decide" in lines[3] and "does not fit: slots take" in lines[4]
    assert lines[-1] == "do not fit: 56, 68"
