"""The examples of training and decoding, a few steps each on two CPU ranks: losses and tokens are those of gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "run_examples.py"
NAMES = ("ddp", "fsdp2", "tensor_parallel", "decode")


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(PROGRAM), *NAMES], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(re.findall(r"== (\w+)\n([^=]*)", done.stdout))


@pytest.mark.parametrize("name", NAMES[:3])
def test_training_has_the_losses_of_gloo(name: str, printed: dict[str, str]) -> None:
    ours, theirs = (re.findall(r"\d+\.\d+", line) for line in printed[name].splitlines()[1:3])
    assert len(ours) == len(theirs) == 5
    assert [float(loss) for loss in ours] == pytest.approx([float(loss) for loss in theirs], rel=1e-4)
    assert float(ours[-1]) < 0.95 * float(ours[0])


def test_decoding_gives_the_tokens_of_gloo(printed: dict[str, str]) -> None:
    assert "of the tokens follow the rule" in printed["decode"]  # the example ends with an error if a token differs
