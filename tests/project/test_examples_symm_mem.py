"""The candidates in examples/symm_mem: what can be known of them without GPUs."""

import ast
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from peerlane import problems
from peerlane.problems import Draw

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "symm_mem"
FILES = sorted(FOLDER.glob("*.py"))
RANKS = 4
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_operator_takes_the_arguments_without_multicast(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = path.read_text()
    assert "multimem" not in source and f'os.environ.setdefault("{MULTICAST}", "1")' in source
    (name,) = set(re.findall(r"torch\.ops\.symm_mem\.(\w+)\(", source))
    (call,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(f".{name}"))
    declared = [argument.name for argument in getattr(torch.ops.symm_mem, name).default._schema.arguments]
    given = [ast.unparse(argument) for argument in call.args]
    assert len(given) == len(declared) and given[declared.index("group_name")] == "dist.group.WORLD.group_name"

    monkeypatch.setenv(MULTICAST, "1")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    problem = problems.get(int(path.stem.split("_")[0]))
    case = problem.cases("pkb", 2)[0]
    arguments = problem.inputs(case, 0, Draw(secret="test", case_key=case.key, slot=0, block=0, rank=0))
    with pytest.raises(RuntimeError, match=r"got a tensor on cpu, but .* evaluate with --device cuda"):
        runpy.run_path(str(path))["solution"](*arguments)


class Operators:
    """The operators that pad their buffers, on the CPU: ``buffers`` holds all ranks', of which only this rank's own is passed."""

    def __init__(self, rank: int, buffers: dict[int, torch.Tensor]) -> None:
        self.rank, self.buffers = rank, buffers

    def total(self, buffer: torch.Tensor) -> torch.Tensor:
        assert buffer.nbytes % (16 * RANKS if buffer.dim() == 2 else 16) == 0 and buffer.dtype in (torch.bfloat16, torch.float32)
        self.buffers[self.rank] = buffer.clone()
        if len(self.buffers) < RANKS:
            raise NotAllThere
        return torch.stack([self.buffers[rank].float() for rank in range(RANKS)]).sum(0).to(buffer.dtype)

    def one_shot_all_reduce(self, buffer: torch.Tensor, op: str, group: str) -> torch.Tensor:
        return self.total(buffer)

    def two_shot_all_reduce_out(self, buffer: torch.Tensor, op: str, group: str, out: torch.Tensor) -> torch.Tensor:
        buffer.copy_(total := self.total(buffer))  # it uses its input
        return out.copy_(total)

    def reduce_scatter_out(self, buffer: torch.Tensor, group: str, split_last_dim: bool, out: torch.Tensor) -> torch.Tensor:
        assert buffer.dim() == out.dim() == 1 and not split_last_dim and buffer.nbytes % (16 * RANKS) == 0
        return out.copy_(self.total(buffer).view(RANKS, -1)[self.rank])


class NotAllThere(Exception):
    """A rank called before the last one's buffer was there: call again."""


@pytest.mark.parametrize("name", ["1_allreduce_one_shot_pytorch", "1_allreduce_two_shot_pytorch", "7_reducescatter_one_kernel_pytorch"])
@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (4, 37, 5)), (torch.float16, (8, 3)), (torch.float32, (4,))])
def test_padding_and_conversion_leave_the_sum_as_it_is(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MULTICAST, "1")
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    monkeypatch.setattr(symm_mem, "empty", lambda *size, dtype, device: torch.full(size, torch.nan, dtype=dtype))
    monkeypatch.setattr(symm_mem, "rendezvous", lambda buffer, group: None)
    tensors = [torch.randint(-8, 9, shape).to(dtype) for _ in range(RANKS)]
    total = torch.stack(tensors).sum(0)
    buffers: dict[int, torch.Tensor] = {}

    def answer(rank: int) -> Any:
        candidate = runpy.run_path(str(FOLDER / f"{name}.py"))
        namespace = candidate["solution"].__globals__
        made = namespace["buffer_of"].__wrapped__
        namespace["buffer_of"] = lambda numel, dtype, device: made(numel, dtype, SimpleNamespace(type="cuda"))
        monkeypatch.setattr(torch.ops, "symm_mem", Operators(rank, buffers))
        return candidate["solution"](tensors[rank])

    for rank in range(RANKS - 1):
        with pytest.raises(NotAllThere):
            answer(rank)
    for rank in reversed(range(RANKS)):
        expected = total if name.startswith("1_") else total.chunk(RANKS)[rank]
        assert torch.equal(answer(rank), expected) and expected.dtype == dtype
