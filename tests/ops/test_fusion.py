"""The compiler's pass on graphs of two ranks: what it replaces, and what it leaves. Sums of the fake group are one rank's own terms."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.distributed.fake_pg import FakeStore

from device.runs import run_calls
from ops.llama import Llama, rms_norm
from peerlane import ops
from peerlane.emulator.team import EmulatedLaunch
from peerlane.ops.fusion import AllReduceFusion, fuse_all_reduces

BF16 = torch.bfloat16
NORM, PRODUCT, SUM = "peerlane.all_reduce_rms_norm.default", "peerlane.gemm_all_reduce.default", "_c10d_functional.all_reduce.default"


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def graphs(function: Callable[..., Any], *given: torch.Tensor, gradients: bool = False) -> tuple[AllReduceFusion, list[str], list[str]]:
    """Returns the pass, and the operators of all graphs of a function before it and after it. The graphs behind it are run."""
    torch.compiler.reset()
    fuse, before, after = AllReduceFusion(), list[str](), list[str]()

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        before.extend(str(node.target) for node in module.graph.nodes)
        fuse(module.graph)
        module.graph.lint()
        module.recompile()
        after.extend(str(node.target) for node in module.graph.nodes)
        assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
        return functional_boxed(module)

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    with torch.set_grad_enabled(gradients):
        torch.compile(function, backend=backend, fullgraph=True)(*given)
    return fuse, before, after


def functional_boxed(module: torch.fx.GraphModule) -> Any:
    """Returns a function of a list that does not run sums: a fake group has none of the kit's."""
    outputs = next(node for node in module.graph.nodes if node.op == "output").args[0]

    def run(values: list[Any]) -> list[Any]:
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]
        return [torch.zeros([int(size) for size in value.shape], dtype=value.dtype) if hasattr(value, "shape") else 6 for value in values]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def summed(x: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = functional.all_reduce(x, "sum", dist.group.WORLD)
    return total


def of_vllm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and the norm in float32, the sum rounded beside."""
    wide = x.float() + residual.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight, wide.to(x.dtype)


def of_gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).type_as(x)


def in_e4m3(y: torch.Tensor, columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    parts = y.float().unflatten(-1, (-1, columns)) if columns else y.float()
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


X, W = torch.randn(4, 256).to(BF16), torch.randn(256).to(BF16)
NORMS: dict[str, tuple[Callable[..., Any], str, float]] = {
    "Llama's": (lambda: rms_norm(summed(X) + X, W), "none", 0.0),
    "with its sum": (lambda: (rms_norm(t := X + summed(X), W), t * 2), "none", 0.0),
    "without a residual": (lambda: F.rms_norm(summed(X), (256,), W, 1e-6), "none", 0.0),
    "vLLM's": (lambda: of_vllm(summed(X), X, W), "none", 0.0),
    "Gemma's": (lambda: of_gemma(summed(X) + X, W), "none", 1.0),
    "of this library's sum": (lambda: rms_norm(ops.all_reduce(X, dist.group.WORLD) + X, W), "none", 0.0),
    "to e4m3 by tokens": (lambda: in_e4m3(rms_norm(summed(X) + X, W)), "token", 0.0),
    "to e4m3 by blocks": (lambda: in_e4m3(of_gemma(summed(X) + X, W), 128), "block", 1.0),
    "to e4m3 by one scale": (
        lambda scale: (rms_norm(summed(X) + X, W).float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), "tensor", 0.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_sums_become_one_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, kind, offset = NORMS[name]
    settings: list[tuple[Any, ...]] = []
    call = torch.fx.Graph.call_function

    def spied(graph: Any, target: Any, args: tuple[Any, ...] = (), *others: Any, **more: Any) -> Any:
        if str(target) == NORM:
            settings.append(args[5:7])
        return call(graph, target, args, *others, **more)

    monkeypatch.setattr(torch.fx.Graph, "call_function", spied)
    fuse, before, after = graphs(function, *([torch.ones(1)] if kind == "tensor" else []))
    assert fuse.found == {"all_reduce_rms_norm": 1, "gemm_all_reduce": 0} and settings == [(offset, kind)]
    assert NORM not in before and after.count(NORM) == 1
    assert not {SUM, "aten.rsqrt.default", "peerlane.all_reduce.default", "aten.amax.default"} & set(after)


LEFT: dict[str, Callable[..., Any]] = {
    "of another axis": lambda: (t := summed(X)) * torch.rsqrt(t.float().pow(2).mean(0, keepdim=True) + 1e-6).to(BF16) * W,
    "of a sum that others see": lambda: (rms_norm((s := summed(X)) + X, W), s),
    "of a maximum": lambda: rms_norm(functional.all_reduce(X, "max", dist.group.WORLD) + X, W),
    "in float32": lambda: rms_norm(summed(X.float()) + X.float(), W.float()),
    "of few columns": lambda: rms_norm(summed(X[:, :4]) + X[:, :4], W[:4]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_kernel_or_other_uses_stays(name: str) -> None:
    fuse, before, after = graphs(LEFT[name])
    assert not any(fuse.found.values()) and after.count(SUM) == before.count(SUM) == 1


def test_a_quantised_norm_that_others_see_is_left_to_torch() -> None:
    fuse, _, after = graphs(lambda: (*in_e4m3(y := rms_norm(summed(X) + X, W)), y))
    assert fuse.found["all_reduce_rms_norm"] == 1 and "aten.amax.default" in after


@pytest.mark.parametrize("kind", ["token", "block", "tensor", "none"])
def test_numbers_of_tokens_may_be_symbols(kind: str) -> None:
    """Engines compile for any number of tokens: of rows, of sequences, and of the views between them."""
    tokens, scale = torch.randn(6, 256).to(BF16), torch.ones(1)
    torch._dynamo.mark_dynamic(tokens, 0)

    def function(x: torch.Tensor, scale: torch.Tensor) -> Any:
        y = rms_norm(summed(F.linear(x.unsqueeze(0), torch.eye(256, dtype=BF16))) + x.unsqueeze(0), W)
        if kind == "tensor":
            return (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), x.shape[0]
        return (in_e4m3(y, 128 if kind == "block" else 0) if kind != "none" else y), summed(x @ x.new_ones(256, 8))

    fuse, _, after = graphs(function, tokens, scale)
    assert fuse.found == {"all_reduce_rms_norm": 1, "gemm_all_reduce": int(kind != "tensor")}
    assert SUM not in after and "aten.amax.default" not in after and "aten.rsqrt.default" not in after


def test_gradients_keep_the_norm_as_it_is() -> None:
    fuse, _, after = graphs(lambda w: rms_norm(summed(X) + X, w), W.clone().requires_grad_(), gradients=True)
    assert not any(fuse.found.values()) and SUM in after


def test_sums_of_products_become_one_operator() -> None:
    fuse, _, after = graphs(lambda: (summed(F.linear(X.view(2, 2, 256), torch.eye(256, dtype=BF16))), summed(X @ X.t())))
    assert fuse.found == {"all_reduce_rms_norm": 0, "gemm_all_reduce": 2}
    assert after.count(PRODUCT) == 2 and SUM not in after and "aten.mm.default" not in after


def test_a_llama_has_one_operator_for_each_sum() -> None:
    """Of four sums three have a norm behind them, and the last one the model's."""
    model = Llama(0, 2, summed)
    fuse, before, after = graphs(model, torch.arange(12).view(2, 6))
    assert before.count(SUM) == 4 and fuse.found == {"all_reduce_rms_norm": 4, "gemm_all_reduce": 0}
    assert after.count(NORM) == 4 and SUM not in after and after.count("aten.rsqrt.default") == 1  # of the embedding


@pytest.mark.slow
def test_a_fused_llama_has_the_whole_losses_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs behind the pass, on emulated ranks, beside the eager model of one rank."""
    tokens, ran = torch.arange(12).view(2, 6) % 7, list[tuple[torch.fx.GraphModule, list[Any]]]()

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        AllReduceFusion()(module.graph)
        module.recompile()

        def run(values: list[Any]) -> list[Any]:
            ran.append((module, list(values)))
            return [torch.zeros(())]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    with torch.no_grad():
        for rank in range(2):
            torch.compiler.reset()
            torch.compile(Llama(rank, 2, summed), backend=backend, fullgraph=True)(tokens)
        whole = Llama(0, 1, lambda x: x)(tokens)
    launched, launch = list[str](), EmulatedLaunch.__call__
    monkeypatch.setattr(EmulatedLaunch, "__call__", lambda own: (launched.append(own.kernel.name), launch(own))[1])
    (losses,) = run_calls(lambda rank: lambda: torch.no_grad()(ran[rank][0])(*ran[rank][1])[0], [[()] * 2]).clean()
    assert torch.equal(*losses) and abs(float(losses[0] - whole)) < 0.02 * float(whole), (losses, whole)
    assert launched == ["all_reduce_rms_norm"] * 4 * 2


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sums_of_engines_are_found_by_their_groups(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles of the operators and of the tables of groups that vLLM and SGLang have."""
    name, package, more = {
        "vllm": ("vllm::all_reduce", "vllm", ()), "sglang": ("sglang::outplace_all_reduce", "sglang.srt", ("ca",))
    }[engine]  # fmt: skip
    library = torch.library.Library(name.split("::")[0], "FRAGMENT")
    library.define(f"{name.split('::')[1]}(Tensor tensor, str group_name{', str outplace_all_reduce_method' * len(more)}) -> Tensor")
    library.impl(name.split("::")[1], lambda tensor, group_name, *_: tensor.clone(), "CompositeExplicitAutograd")
    called = getattr(getattr(torch.ops, engine), name.split("::")[1])
    state: Any = ModuleType("parallel_state")
    state._groups = {"tp:0": lambda: SimpleNamespace(device_group=dist.group.WORLD)}
    monkeypatch.setitem(sys.modules, f"{package}.distributed.parallel_state", state)
    fuse, _, after = graphs(lambda: (of_vllm(called(X, "tp:0", *more), X, W), called(X, "other", *more)))
    assert fuse.found["all_reduce_rms_norm"] == 1 and sum(name.replace("::", ".") in target for target in after) == 1
    fuse_all_reduces(torch.fx.Graph())
    library._destroy()
