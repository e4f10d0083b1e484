"""`peerlane.ops` on CPU ranks: results, gradients, compilation, autocast, DTensors and what is told of wrong calls."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "on_ranks.py"
CHECKS = (
    "results_and_gradients", "compiled", "autocast", "compiled_autocast", "opcheck", "replicated_losses", "unequal_parts", "dtensors",
    "two_dimensional_mesh", "styles", "layers_train_as_whole_ones", "layers_are_drawn_again_and_load_whole_ones", "layers_are_saved",
    "layers_compile_and_take_no_tokens", "dispatch_and_combine", "dispatch_in_fp8", "dispatch_and_combine_obey_torch", "products_in_fp8",
    "experts_in_fp8", "wrong_shapes_are_told_alike", "different_calls_are_told", "forgotten_groups_are_told_once",
)  # fmt: skip


def outcomes(*arguments: str) -> dict[str, str | None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    return outcomes(*CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_operators_on_cpu_ranks(name: str, found: dict[str, str | None]) -> None:
    assert found[name] is None, found[name]


THOROUGH = ("compiled", "compiled_autocast opcheck dispatch_and_combine_obey_torch", "compiled_with_fused_sums")


@pytest.mark.long
@pytest.mark.parametrize("names", THOROUGH)
def test_operators_compile_on_more_groups(names: str) -> None:
    found = outcomes("--thorough", *names.split())
    assert set(found.values()) == {None}, found
