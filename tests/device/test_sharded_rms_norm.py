"""RMSNorm between a reduce-scatter and an all-gather in one kernel: exact sums, right norms and scales, nothing unordered, broken twins
refused."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from device.runs import run_call, run_calls
from device.twins import use_twin
from peerlane import ops
from peerlane.device import Communicator, group_of
from peerlane.device.collectives import sharded_rms_norm as module
from peerlane.device.collectives.sharded_rms_norm import SHARDED_RMS_NORM, Quantisation, ShardedRmsNorm
from peerlane.device.collectives.workspace import Rings
from peerlane.device.host.jit import compiler_report
from peerlane.errors import UsageError
from representatives import first

EPSILON = 1e-5
RINGS = Rings(tile_bytes=1024, summing_warps=2, depth=4)
Call = tuple[bool, bool, Quantisation, int, int]
"""Whether it reduces and gathers, how it quantises, rows of a rank, columns."""


def drawn(world_size: int, call: Call, seed: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """Of every rank: quarters, whose sums are exact, a residual of its own, and a weight that is the same on all."""
    reduces, _, _, rows, columns = call
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-8, 9, shape, generator=generator).to(dtype) / 4  # noqa: E731
    weight = draw(columns)
    return [(draw(rows * (world_size if reduces else 1), columns), weight.clone(), draw(rows, columns)) for _ in range(world_size)]


def wrong(given: list[tuple[torch.Tensor, ...]], rank: int, got: tuple[Any, ...], call: Call) -> bool:
    reduces, gathers, quantisation, _, columns = call
    y, total, scales = got
    xs = [x.double() for x, *_ in given]
    shards = list(torch.stack(xs).sum(0).chunk(len(xs))) if reduces else xs
    totals = [shard + residual.double() for shard, (_, _, residual) in zip(shards, given, strict=True)]
    if not torch.equal(total.double(), totals[rank]):
        return True
    wanted = torch.cat(totals) if gathers else totals[rank]
    norm = wanted * (wanted.square().mean(1, keepdim=True) + EPSILON).rsqrt() * given[0][1].double()
    if quantisation == "none":
        return not torch.allclose(y.double(), norm, rtol=2**-8, atol=1e-7)
    blocks = norm.view(len(norm), -1, columns if quantisation == "row" else 128)
    by = blocks.abs().amax(2, keepdim=True) / 448
    if not torch.allclose(scales.double().view(by.shape), by, rtol=1e-5):
        return True
    return not torch.allclose(y.double().view(blocks.shape) * by, blocks, rtol=2**-4 + 1e-4, atol=float(by.max()) * 2**-9)


def found(world_size: int, calls: list[Call], *, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Returns the kinds of the emulator's findings for some calls, and ``wrong_result``."""

    def make(rank: int) -> Any:
        norm = ShardedRmsNorm(Communicator(group_of(), rings=RINGS))

        def call(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, call: Call) -> Any:
            return norm(x, weight, residual, reduces=call[0], gathers=call[1], epsilon=EPSILON, quantisation=call[2])

        return call

    given = [drawn(world_size, call, seed, dtype) for seed, call in enumerate(calls)]
    run = run_calls(make, [[(*own, call) for own in ranks] for ranks, call in zip(given, calls, strict=True)], schedules=2)
    of_calls = zip(given, calls, run.outputs, strict=False)
    return run.faults(not any(wrong(ranks, rank, got, call) for ranks, call, outputs in of_calls for rank, got in enumerate(outputs)))


CALLS: list[Call] = [
    (True, False, "none", 5, 136),
    (False, True, "row", 9, 136),
    (True, True, "none", 7, 72),
    (True, True, "block", 3, 256),
    (True, False, "row", 2, 488),
    (True, True, "row", 6, 8),
]


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(2, torch.bfloat16), pytest.param(3, torch.float16, marks=pytest.mark.long), pytest.param(4, torch.bfloat16, marks=pytest.mark.long)],
)
def test_sums_norms_and_scales_of_sharded_rows_are_right(world_size: int, dtype: torch.dtype) -> None:
    """Launches of all kinds follow each other in the same rings."""
    assert not found(world_size, CALLS, dtype=dtype)


TWINS: dict[str, tuple[int, Call, str, str]] = {
    "terms of the tile before": (
        2,
        (True, False, "none", 40, 488),
        "givers.wait_all(terms.arrived_slot(), number + 1,",
        "givers.wait_all(terms.arrived_slot(), number,",
    ),
    "places before they are free": (
        2,
        (False, True, "none", 40, 488),
        "first_sent + turn + 1 - rings.depth, known_used)",
        "first_sent - rings.depth, known_used)",
    ),
    "squares that a warp still adds": (
        2,
        (True, False, "none", 3, 488),
        "scratch[team.thread() / warp_threads] = value;\n        team.sync();",
        "scratch[team.thread() / warp_threads] = value;",
    ),
    "rows of the first rank": (2, (True, False, "none", 5, 136), "REDUCES ? rank * bytes : 0", "0"),
    "scales of what is positive": (2, (False, True, "row", 5, 136), "most = fmaxf(most, fabsf(one));", "most = fmaxf(most, one);"),
}


@pytest.mark.parametrize("name", first(TWINS))
def test_a_broken_twin_of_the_sharded_norm_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, call, old, new = TWINS[name]
    use_twin(monkeypatch, module, "SHARDED_RMS_NORM", old, new)
    assert found(world_size, [call] * 2)


@pytest.mark.parametrize(
    ("columns", "tile_rows", "quantisation"),
    [
        (8192, 2, 0),
        *(
            pytest.param(*shape, marks=pytest.mark.long)
            for shape in ((16384, 1, 1), (8192, 1, 2), (7168, 2, 1), (4096, 4, 1), (1024, 8, 1))
        ),
    ],
)
@pytest.mark.parametrize("world_size", [8, pytest.param(2, marks=pytest.mark.long)])
def test_the_sharded_norm_fits_its_registers(columns: int, tile_rows: int, quantisation: int, world_size: int) -> None:
    shape = {"COLUMNS": columns, "TILE_ROWS": tile_rows, "QUANTISATION": quantisation, "PEERLANE_TILE_BYTES": 2 * columns * tile_rows}
    kind = {"X_TYPE": "BFloat16", "REDUCES": 1, "GATHERS": 1, "WORLD_SIZE": world_size}
    report = compiler_report(SHARDED_RMS_NORM.source, defines={**Rings().defines(), **shape, **kind})
    assert sum(int(found) for found in re.findall(r"(\d+) bytes spill stores", report)) <= 16  # of a scale by row, with four rows a tile


def test_what_the_sharded_norm_has_no_kernel_for_is_refused() -> None:
    def refuse() -> None:
        norm, draw = ShardedRmsNorm(Communicator(group_of(), rings=RINGS)), lambda *shape: torch.ones(shape, dtype=torch.bfloat16)
        for x, weight, quantisation in (
            (draw(3, 64), draw(64), "none"),
            (draw(4, 520), draw(520), "none"),
            (draw(4, 64), draw(64), "block"),
        ):
            with pytest.raises(UsageError, match=r"RMSNorm of sharded rows got .* use reduce_scatter"):
                norm(x, weight, reduces=True, gathers=False, quantisation=quantisation)  # type: ignore[arg-type]

    run_call(refuse, [(), ()])


def differentiate(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor, gathers: bool) -> list[Any]:
    x, weight, residual = (value.clone().requires_grad_() for value in (x, weight, residual))
    y, total = ops.reduce_scatter_rms_norm(x, weight, residual, gathers=gathers)
    ((y * seed[: len(y)]).float().sum() + total.float().sum()).backward()
    y8, _, scales = ops.reduce_scatter_rms_norm_fp8(x.detach(), weight.detach(), residual.detach(), gathers=gathers, by="block")
    return [y, total, x.grad, weight.grad, residual.grad, y8.float(), scales]


@pytest.mark.parametrize(
    ("gathers", "dtype"),
    [
        (True, torch.bfloat16),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(True, torch.float32, marks=pytest.mark.long),
    ],
)
def test_the_operator_and_its_gradients_equal_the_whole(gathers: bool, dtype: torch.dtype) -> None:
    rows, columns, generator = 3, 128, torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randint(-8, 9, shape, generator=generator).to(dtype) / 4  # noqa: E731
    weight = draw(columns)
    ranks = [(draw(2 * rows, 1, columns), weight, draw(rows, 1, columns), draw(2 * rows, 1, columns)) for _ in range(2)]
    outputs = run_call(differentiate, [(*own, gathers) for own in ranks], schedules=4)
    wide = [[value.double().requires_grad_() for value in own] for own in ranks]
    totals = [part + own[2] for part, own in zip((wide[0][0] + wide[1][0]).chunk(2), wide, strict=True)]
    norms = [F.rms_norm(total, (columns,), own[1], 1e-6) for total, own in zip(totals, wide, strict=True)]
    ys = [torch.cat(norms)] * 2 if gathers else norms
    sum((y * own[3][: len(y)]).sum() + total.sum() for y, own, total in zip(ys, wide, totals, strict=True)).backward()  # type: ignore[union-attr]
    for (y, total, *grads, y8, scales), own, want, sums in zip(outputs, wide, ys, totals, strict=True):
        assert torch.equal(total.double(), sums)
        torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(y8.double() * scales.double(), want, rtol=0.07, atol=float(scales.max()) * 2**-9)
        for got, value in zip(grads, own, strict=False):
            assert value.grad is not None
            torch.testing.assert_close(got.double(), value.grad, rtol=2e-2, atol=float(value.grad.abs().max()) * 2e-2)
