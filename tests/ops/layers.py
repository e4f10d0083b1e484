"""Checks of ``peerlane.nn`` on CPU ranks, beside ``torch.nn.Linear`` in one place. ``on_ranks.py`` runs them."""

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from peerlane import nn
from peerlane.errors import UsageError

WIDTH, INNER, TOKENS = 8, 24, 12


class Perceptron(torch.nn.Module):
    """A norm and two layers: whole ones, or peerlane's if there is a group."""

    def __init__(self, group: Any = None, **kind: Any) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
        if group is None:
            self.up, self.down = (torch.nn.Linear(*sizes, dtype=torch.float64) for sizes in ((WIDTH, INNER), (INNER, WIDTH)))
        else:
            self.up = nn.ColumnParallelLinear(WIDTH, INNER, activation="gelu", group=group, dtype=torch.float64, **kind)
            self.down = nn.RowParallelLinear(INNER, WIDTH, group=group, dtype=torch.float64, **kind)
            nn.replicate_others(self, group, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(self.norm(x))
        return self.down(F.gelu(inner)) + x if type(self.up) is torch.nn.Linear else self.down(inner, residual=x)


def made(group: Any, seed: int = 0, **kind: Any) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron(group, **kind)


def whole(values: Any) -> list[torch.Tensor]:
    return [(value.full_tensor() if isinstance(value, DTensor) else value).detach().clone() for value in values]


def trained(
    model: torch.nn.Module, average: torch.nn.Module, part: Callable[[torch.Tensor], torch.Tensor], scale: float = 1, foreach: bool = True
) -> list[torch.Tensor]:
    """Returns the whole parameters before and after 20 steps, the first gradients, and the parameters of an average of the models."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    found = whole(model.parameters())
    for step in range(20):
        x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        (model(part(x[0])) - part(x[1])).square().sum().mul(scale).backward()
        found += whole(value.grad for value in model.parameters()) if step == 0 else []
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.detach().lerp_(value.detach(), 0.1)
    return [*found, *whole(model.parameters()), *whole(average.parameters())]


def layers_train_as_whole_ones(group: dist.ProcessGroup) -> None:
    """Whatever the seeds of ranks other than the first."""
    expected = trained(made(None), made(None), lambda x: x)
    for sharded in (False, True):
        model = made(group, group.rank(), sequence_parallel=sharded)
        part = (lambda x: x.chunk(group.size())[group.rank()]) if sharded else (lambda x: x)
        found = trained(model, copy.deepcopy(model), part, foreach=sharded)
        assert all(map(torch.equal, found[:6], expected[:6]))
        torch.testing.assert_close(found, expected)


def layers_are_drawn_again_and_load_whole_ones(group: dist.ProcessGroup) -> None:
    """Also on a mesh that FSDP2 shares, from the meta device."""
    mesh, expected = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), made(None)
    with torch.device("meta"):
        model = Perceptron(mesh["tp"])
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    torch.manual_seed(group.rank())
    for layer in (model.norm, model.up, model.down):
        layer.reset_parameters()
    assert all(map(torch.equal, whole(model.parameters()), expected.parameters()))
    replica = mesh.get_local_rank("dp")
    models = [fully_shard(made(mesh["tp"]), mesh=mesh["dp"]) for _ in range(2)]
    torch.testing.assert_close(trained(*models, lambda x: x.chunk(2)[replica], scale=2), trained(made(None), made(None), lambda x: x))
    other = made(None, 5)
    model.up.load_state_dict(other.up.state_dict())
    model.down.load_whole(other.down.weight, other.down.bias)
    assert all(map(torch.equal, whole(model.up.parameters()), other.up.parameters()))
    assert all(map(torch.equal, whole(model.down.parameters()), other.down.parameters()))


def layers_are_saved(group: dist.ProcessGroup) -> None:
    """At four ranks, and loaded at two."""
    model, expected, folder = made(group, 3), made(None, 3), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0, group)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0], process_group=group)
    pair = dist.new_group([0, 1])
    if group.rank() < 2:
        fewer = made(pair, 4)
        state = {"model": fewer.state_dict()}
        dcp.load(state, checkpoint_id=folder[0], process_group=pair)
        fewer.load_state_dict(state["model"])
        assert all(map(torch.equal, whole(fewer.parameters()), expected.parameters()))
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(gathered[name], value) for name, value in expected.state_dict().items())
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    again = torch.load(held, weights_only=False)
    x = torch.ones(3, WIDTH, dtype=torch.float64)
    assert torch.equal(again(x), model(x)) and again.up.layout.group == group.group_name
    shards = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in model.up.state_dict().items()}
    with pytest.raises(UsageError, match=r"weight is a plain tensor of \(6, 8\): .* \(24, 8\)\. .* torch\.cat"):
        model.up.load_state_dict(shards)
    for name, value in shards.items():
        parts = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(parts, value, group=group)
        shards[name] = torch.cat(parts)
    model.up.load_state_dict(shards)
    dcp.save({"up": {"weight": model.up.weight.to_local().detach()}}, checkpoint_id=folder[0] + "/old", process_group=group)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"up": model.up.state_dict()}, checkpoint_id=folder[0] + "/old", process_group=group)


def layers_compile_and_take_no_tokens(group: dist.ProcessGroup) -> None:
    for sharded in (False, True):
        model = made(group, sequence_parallel=sharded)
        torch._dynamo.reset()
        model.norm(torch.ones(2, WIDTH, dtype=torch.float64)).mul_(2)  # its output is no view, which autograd would refuse to change
        compiled, found = torch.compile(model, fullgraph=True, backend="aot_eager"), []
        for call, tokens in ((compiled, 3), (model, 3), (model, 0)):
            x = torch.ones(tokens, WIDTH, dtype=torch.float64)
            y = call(x)
            y.square().sum().backward()
            found.append([y.detach(), *whole(value.grad for value in model.parameters())])
            model.zero_grad()
        assert all(map(torch.equal, found[0], found[1]))
        assert found[2][0].shape == x.shape and not any(value.any() for value in found[2])
