"""All-reduce and RMSNorm in one kernel: exact sums, right norms and scales in one shot and in two, nothing unordered, broken twins
refused."""

from typing import Any

import pytest
import torch

from device.runs import run_call, run_calls
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.device.collectives import rms_norm
from peerlane.device.collectives.rms_norm import AllReduceRmsNorm, one_shot_rows
from peerlane.device.host.jit import compiler_report
from peerlane.errors import UsageError

COLUMNS, BLOCKS_COLUMNS, EPSILON = 104, 384, 1e-5
SCALE = 0.015625


def drawn(world_size: int, rows: int, call: int, dtype: torch.dtype, columns: int = COLUMNS) -> list[tuple[torch.Tensor, ...]]:
    """Of every rank: quarters, whose sums are exact, residual and weight the same on all, and a scale."""
    generator = torch.Generator().manual_seed(call)
    shared = [torch.randint(-8, 9, shape, generator=generator).to(dtype) / 4 for shape in ((rows, columns), (columns,))]
    own = [torch.randint(-8, 9, (rows, columns), generator=generator).to(dtype) / 4 for _ in range(world_size)]
    return [(x, *(value.clone() for value in shared), torch.tensor([SCALE])) for x in own]


def wrong(given: list[tuple[torch.Tensor, ...]], got: tuple[Any, ...], quantisation: str) -> bool:
    y, total, scales = got
    wanted = torch.stack([x for x, *_ in given]).double().sum(0) + given[0][1].double()
    if not torch.equal(total.double(), wanted):
        return True
    norm = wanted * (wanted.square().mean(1, keepdim=True) + EPSILON).rsqrt() * (given[0][2].double() + (quantisation == "block"))
    if quantisation == "none":
        return not torch.allclose(y.double(), norm, rtol=2**-8, atol=1e-7)
    if quantisation == "block":  # the rest is judged as tokens of 128 columns
        norm, y, scales = norm.view(-1, 128), y.view(-1, 128), scales.view(-1)
    by = torch.full((len(norm), 1), SCALE, dtype=torch.float64)
    if quantisation in ("token", "block"):
        by = norm.abs().amax(1, keepdim=True) / 448
        if not torch.allclose(scales.double().unsqueeze(1), by, rtol=1e-5):
            return True
    return not torch.allclose(y.double() * by, norm.clamp(-448 * by, 448 * by), rtol=2**-4 + 1e-4, atol=float(by.max()) * 2**-9)


def found(
    world_size: int, calls: list[tuple[int, str]], *, one_shot: int, dtype: torch.dtype = torch.bfloat16, schedules: int = 3
) -> set[str]:
    """Returns the kinds of the emulator's findings for calls of these tokens and quantisations, and ``wrong_result``."""
    columns = BLOCKS_COLUMNS if any(quantisation == "block" for _, quantisation in calls) else COLUMNS

    def make(rank: int) -> Any:
        norm = AllReduceRmsNorm(group_of(), columns, dtype)

        def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantisation: Any) -> Any:
            by = scale if quantisation == "tensor" else None
            return norm(
                x, weight, residual, epsilon=EPSILON, quantisation=quantisation, scale=by, weight_offset=float(quantisation == "block")
            )

        return call

    given = [drawn(world_size, rows, number, dtype, columns) for number, (rows, _) in enumerate(calls)]
    arguments = [[(*own, quantisation) for own in ranks] for ranks, (_, quantisation) in zip(given, calls, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms_norm, "one_shot_rows", lambda columns, world_size: one_shot)
        run = run_calls(make, arguments, schedules=schedules)
    of_calls = zip(given, calls, run.outputs, strict=False)
    return run.faults(not any(wrong(ranks, got, quantisation) for ranks, (_, quantisation), outputs in of_calls for got in outputs))


@pytest.mark.parametrize(
    ("world_size", "one_shot", "dtype"),
    [
        (2, 2, torch.bfloat16),
        (3, 2, torch.float16),
        pytest.param(4, 2, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_sums_norms_and_scales_are_right_in_one_and_two_shots(world_size: int, one_shot: int, dtype: torch.dtype) -> None:
    """Up to two tokens go in one shot, more in two; launches of both kinds follow each other."""
    calls = [(1, "none"), (3, "token"), (2, "tensor"), (3, "none"), (1, "token")]
    assert not found(world_size, calls, one_shot=one_shot, dtype=dtype)


def test_blocks_of_128_columns_have_scales_and_weights_an_offset() -> None:
    """In one shot and in two, of weights of Gemma's kind."""
    assert not found(2, [(2, "block"), (3, "block")], one_shot=2)


TWINS = {
    "one buffer for tokens": (2, "args.tokens + ((u64((epoch & 1) * WORLD_SIZE + source)", "args.tokens + ((u64(source)"),
    "sums of the last call": (0, "i, epoch, sum.word);", "i, epoch & ~1u, sum.word);"),
    "epoch of the last call": (2, "i, epoch, terms);", "i, epoch & ~1u, terms);"),
    "parts of another rank": (0, "sum_of(part_at(0, row, i), stride, row, before + i)", "sum_of(part_at(0, row, i), stride, row, i)"),
    "residual of every rank": (
        2,
        "if (args.residual != nullptr) total.add(",
        "if (args.residual != nullptr) for (int q = 0; q < WORLD_SIZE; ++q) total.add(",
    ),
    "blocks without what packets share": (2, "peaks[number][elements * i / block_columns != b][i]", "peaks[number][0][i]"),
    "scale of what is positive": (2, "most = fmaxf(most, fabsf(v));", "most = fmaxf(most, v);"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_of_the_norm_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_shot, old, new = TWINS[name]
    use_twin(monkeypatch, rms_norm, "ALL_REDUCE_RMS_NORM", old, new)
    quantisation = "block" if "blocks" in name else "token"
    calls = [(2, quantisation)] * 4 if one_shot else [(3, "none")] * 4
    assert found(2 if "parts" not in name else 3, calls, one_shot=one_shot or 1, schedules=10)


@pytest.mark.parametrize(
    ("two_shot", "columns", "teams", "quantisation"),
    [(0, 8192, 1, 2), (1, 8192, rms_norm.MOST_TEAMS, 3), (0, 16384, 1, 3)],
)
def test_the_norm_fits_its_registers(two_shot: int, columns: int, teams: int, quantisation: int) -> None:
    packets = -(-columns // rms_norm.PACKET_ELEMENTS)
    threads = rms_norm.threads_of(packets, teams)
    shape = {"THREADS": threads, "TEAMS": teams, "PACKETS": -(-packets * teams // threads), "TWO_SHOT": two_shot}
    defines = {"X_TYPE": "BFloat16", "QUANTISATION": quantisation, "WORLD_SIZE": 8, **shape}
    report = compiler_report(rms_norm.ALL_REDUCE_RMS_NORM.source, defines=defines)
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def test_more_ranks_leave_fewer_tokens_to_one_shot() -> None:
    assert [one_shot_rows(8192, world_size) for world_size in (2, 3, 4, 8)] == [512, 70, 31, 8]
    assert one_shot_rows(1 << 20, 8) == 1 and one_shot_rows(64, 4) == 512


def test_what_the_norm_has_no_kernel_for_is_refused() -> None:
    def refuse() -> None:
        with pytest.raises(UsageError, match=r"100 columns in torch\.bfloat16 on 2 ranks: expected bfloat16 or float16, a multiple of 8"):
            AllReduceRmsNorm(group_of(), 100, torch.bfloat16)
        norm, weight = AllReduceRmsNorm(group_of(), 64, torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
        with pytest.raises(UsageError, match=r"expected \(tokens, 64\)"):
            norm(torch.ones(5, 63, dtype=torch.bfloat16), weight)
        with pytest.raises(UsageError, match="quantisation by 'tensor' got no scale"):
            norm(torch.ones(1, 64, dtype=torch.bfloat16), weight, quantisation="tensor")

    run_call(refuse, [(), ()])
