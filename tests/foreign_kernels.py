"""Public kernels that others wrote, on emulated ranks: is each verdict the one that the manifest expects?

    make test-foreign DIR=FOLDER        FOLDER holds files of tests/foreign_kernels.toml at the paths that it says

The kernels are not part of this repository. Files whose hash differs are said, and not run.
"""

import hashlib
import importlib
import os
import sys
import time
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton  # noqa: F401, before ranks ask for its driver

from peerlane import testing
from peerlane.errors import PeerlaneError

MANIFEST = Path(__file__).with_suffix(".toml")
_NUMEL = 512


def main(folder: Path) -> int:
    """Runs what lies in the folder; returns the exit code."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "0"
    sys.path.insert(0, str(folder))
    utils = types.ModuleType("megatron.core.utils")  # the package's own imports half of its dependencies
    utils.null_decorator = lambda function=None, **_: function  # type: ignore[attr-defined]
    sys.modules["megatron.core.utils"] = utils
    wrong, ran = 0, 0
    for entry in tomllib.loads(MANIFEST.read_text())["kernel"]:
        file = folder / entry["file"]
        if not file.is_file():
            continue
        if hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
            print(f"{entry['name']}: {file} is another version than {entry['commit']}; not run")
            continue
        begin = time.monotonic()
        got = _verdict(lambda entry=entry, folder=folder: RUNS[entry["name"]](folder))
        ran, wrong = ran + 1, wrong + (not got.startswith(entry["expected"]))
        mark = "" if got.startswith(entry["expected"]) else f"; expected {entry['expected']}"
        said = got if mark else got.splitlines()[0]
        print(f"{entry['name']}: {said[:1500]}{mark} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{ran} kernels, {wrong} unexpected verdicts")
    return 1 if wrong or not ran else 0


def _verdict(run: Callable[[], None]) -> str:
    """Returns clean, the kinds of findings, wrong_result, or the reason of a refusal."""
    try:
        run()
    except testing.RaceFound as found:
        return f"{', '.join(dict.fromkeys(item.kind for item in found.findings))}: {found}"
    except AssertionError as error:
        return f"wrong_result: {error}"
    except (PeerlaneError, ValueError) as error:
        return f"refused: {error}"
    return "clean"


def _inputs(rank: int, numel: int = _NUMEL) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32).add_(rank).remainder_(7).bfloat16()


def _symmetric(numel: int = _NUMEL) -> tuple[torch.Tensor, Any]:
    buffer = symm_mem.empty(numel, dtype=torch.bfloat16, device="cuda")
    return buffer, symm_mem.rendezvous(buffer, dist.group.WORLD)


def _megatron(name: str) -> Any:
    return importlib.import_module(f"megatron.core.inference.communication.torch_symm_triton.{name}")


_SMALL = {"num_warps": 1, "BLOCK_SIZE": 32, "max_num_blocks": 2}


@testing.race(schedules=10)
def _all_gather() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer, handle = _symmetric()
    share = _inputs(rank, _NUMEL // size)
    for _ in range(2):
        _megatron("collectives").multimem_all_gather(buffer, share, handle, **_SMALL)
    assert torch.equal(buffer, torch.cat([_inputs(each, _NUMEL // size) for each in range(size)]))


@testing.race(schedules=10)
def _reduce_scatter() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer, handle = _symmetric()
    out = torch.empty(_NUMEL // size, dtype=torch.bfloat16)
    for _ in range(2):
        buffer.copy_(_inputs(rank))
        _megatron("collectives").multimem_reduce_scatter(out, buffer, handle, **_SMALL)
        handle.barrier(channel=3)
    assert torch.equal(out, sum(_inputs(each) for each in range(size)).chunk(size)[rank])


@testing.race(schedules=10)
def _flashinfer_barrier() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    _, handle = _symmetric()
    pads = tuple(handle.get_signal_pad(each, (size,), torch.uint32, 0) for each in range(size))
    for _ in range(2):
        importlib.import_module("flashinfer.comm.all_gather_matmul_triton").barrier_triton(pads, rank)


@testing.race(schedules=2)
def _flashinfer_matmul() -> None:
    module = importlib.import_module("flashinfer.comm.all_gather_matmul_triton")
    _, handle = _symmetric()
    module.all_gather_matmul_triton(handle.get_buffer(dist.get_rank(), (16, 32), torch.bfloat16), torch.ones(32, 16), dist.group.WORLD)


@testing.race(schedules=10)
def _recipes_one_shot() -> None:
    one_shot = importlib.import_module("symm_mem_recipes.triton_one_shot_all_reduce")
    buffer, handle = _symmetric()
    buffer.copy_(_inputs(dist.get_rank()))
    for _ in range(2):
        out = one_shot.one_shot_all_reduce(buffer)
    handle.barrier(channel=3)
    assert torch.equal(out, sum(_inputs(each) for each in range(dist.get_world_size())))


@testing.race(schedules=10)
def _recipes_barrier() -> None:
    _, handle = _symmetric()
    importlib.import_module("symm_mem_recipes.triton_barrier").barrier_test(handle)


@testing.race(schedules=5)
def _fused_norm() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer, handle = _symmetric(4 * 512)
    rows = buffer.view(4, 512)
    rows.copy_(_inputs(rank, 4 * 512).view(4, 512))
    residual, weights = torch.zeros(4 // size, 512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
    _megatron("fused_collectives").fused_multimem_rs_add_norm_ag(residual.clone(), rows, handle, residual, weights, 1e-5)
    total = sum(_inputs(each, 4 * 512).view(4, 512).float() for each in range(size))
    torch.testing.assert_close(rows.float(), total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5), rtol=0.02, atol=0.02)


RUNS: dict[str, Callable[[Path], None]] = {
    "megatron multimem_all_gather": lambda folder: _all_gather(),
    "megatron multimem_reduce_scatter": lambda folder: _reduce_scatter(),
    "megatron fused_multimem_rs_add_norm_ag": lambda folder: _fused_norm(),
    "symm-mem-recipes barrier_test": lambda folder: _recipes_barrier(),
    "symm-mem-recipes one_shot_all_reduce": lambda folder: _recipes_one_shot(),
    "flashinfer barrier_triton": lambda folder: _flashinfer_barrier(),
    "flashinfer all_gather_matmul_triton": lambda folder: _flashinfer_matmul(),
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
