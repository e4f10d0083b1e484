"""The communicator for inference engines, driven as vLLM and SGLang drive theirs."""

import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device.runs import equal, run_calls
from peerlane.errors import UsageError
from peerlane.ops.serving import CustomAllReduce


class Engine:
    """The steps of an engine's group of ranks that concern its custom all-reduce: make it, ask it, capture with it, fall back."""

    def __init__(self, made: type[CustomAllReduce], group: Any, device: Any, **options: Any) -> None:
        self.ca_comm, self.fallbacks = made(group=group, device=device, **options), 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        comm = self.ca_comm
        if comm is not None and not comm.disabled and comm.should_custom_ar(x):
            out = comm.custom_all_reduce(x)
            assert out is not None and out.data_ptr() != x.data_ptr()
            return out
        self.fallbacks += 1
        return None

    def graph(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Warm-up and capture, inside of one context."""
        with self.ca_comm.capture():
            return [self.all_reduce(x) for _ in range(2)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_engine_gets_sums_of_any_dense_tensor(ranks: int) -> None:
    """Odd sizes, strides, integers; what the kit has no kernel for, or is larger than the engine wants, is declined on all ranks."""
    shapes = (5, 7), (3,), (16, 8)
    draw = lambda rank, shape: torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)  # noqa: E731

    def make(rank: int) -> Any:
        engine = Engine(CustomAllReduce, None, "cpu", max_size=1000, symm_mem_enabled=True)
        comm = engine.ca_comm
        assert (comm.disabled, comm.reason, comm.rank, comm.world_size) == (False, "", rank, ranks)
        comm.finalize_p2p(), comm.register_graph_buffers()

        def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found = [engine.all_reduce(x) for x in tensors] + engine.graph(tensors[0])
            found += [engine.all_reduce(tensors[2].t()), comm.all_reduce(tensors[1], out=torch.empty_like(tensors[1]), registered=True)]
            refused = torch.ones(2, dtype=torch.bool), torch.ones(0), torch.ones(2).to_sparse(), torch.ones(1001, dtype=torch.uint8)
            assert [engine.all_reduce(x) for x in refused] == [None] * 4 and engine.fallbacks == 4
            return found

        return call

    (outputs,) = run_calls(make, [[tuple(draw(rank, shape) for shape in shapes) for rank in range(ranks)]]).clean()
    totals = [torch.stack([draw(rank, shape) for rank in range(ranks)]).float().sum(0).to(torch.bfloat16) for shape in shapes]
    assert equal(outputs, [[*totals, totals[0], totals[0], totals[2].t(), totals[1]]] * ranks)


PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


@pytest.mark.parametrize(("engine", "package"), [("vllm", "vllm"), ("sglang", "sglang.srt")])
def test_the_page_puts_the_communicator_into_engines(engine: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With doubles of the modules where the engines look their class up."""
    names = f"{package}.distributed.device_communicators.custom_all_reduce".split(".")
    modules: dict[str, Any] = {".".join(names[: i + 1]): ModuleType(name) for i, name in enumerate(names)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    theirs = modules[".".join(names)]
    modules[".".join(names[:-1])].custom_all_reduce = theirs
    page: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], page)
    page[f"register_in_{engine}"]()
    made = theirs.CustomAllreduce if engine == "vllm" else theirs.dispatch_custom_allreduce(group=None, device=None)
    assert made is CustomAllReduce
    name = re.search(r'"(peerlane[\w.]+)"\}\}', PAGE)
    assert name is not None and callable(pkgutil.resolve_name(name[1]))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("device", "reason"), [("cpu", "the device is cpu; the kit serves CUDA devices"), (0, "the group has one rank")])
def test_a_group_that_the_kit_does_not_serve_says_why(device: Any, reason: str) -> None:
    comm = CustomAllReduce(dist.group.WORLD, device)
    assert (comm.disabled, comm.reason, comm.world_size) == (True, reason, 1)
    assert not comm.should_custom_ar(torch.ones(4)) and comm.custom_all_reduce(torch.ones(4)) is None
    with pytest.raises(UsageError, match="disabled was called"):
        comm.all_reduce(torch.ones(4))
