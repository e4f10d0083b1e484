"""Ulysses attention on emulated ranks: right numbers, nothing unordered, and twins with one thing wrong are caught."""

from functools import partial

import pytest
import torch

from device.judged import judge_case, require_correct
from device.runs import Run, run_calls
from device.test_attention import BF16, expected
from device.twins import use_twin
from peerlane.device.attention import shards, short, ulysses
from peerlane.device.attention.forward import choose_tiling
from peerlane.device.attention.shards import PARCEL_BYTES, PARCELS
from peerlane.device.host.jit import compiler_report
from representatives import first

HEADERS = ("attention/ulysses_attention.cuh", "attention/shards.cuh", "attention/attention.cuh")


def run(length: int, *, causal: bool, calls: int = 3) -> tuple[Run, float]:
    """What came of two ranks with two heads, and the largest error of a result."""
    generator = torch.Generator().manual_seed(length)
    arguments = [
        [tuple(torch.randn(1, length, 2, 32, generator=generator).to(BF16) for _ in range(3)) for _ in range(2)] for _ in range(calls)
    ]
    found, worst = run_calls(lambda rank: partial(ulysses.attend_by_heads, causal=causal), arguments), 0.0
    for given, got in zip(arguments, found.outputs, strict=False):
        wanted, _ = expected(*(torch.cat([own[i] for own in given], 1) for i in range(3)), None, causal)
        worst = max(worst, float((torch.cat(got, 1) - wanted).norm() / wanted.norm()))
    return found, worst


@pytest.mark.parametrize("label", ["one_head_causal_bf16", "causal_fp32"])
def test_the_solution_is_right(label: str) -> None:
    require_correct(judge_case(39, label, schedules=1))


def test_longer_sequences_are_right() -> None:
    found, worst = run(20, causal=True, calls=2)
    found.clean(worst < 0.01)


SHORT_TWINS = {
    "no wait for a line": ("        peers.wait_all(line, epoch);\n", ""),
    "no wait for results": ("peers.wait_all(lines + line, epoch);", ";"),
    "results of another rank's heads": ("+ arena.rank * args.heads + head", "+ owner * args.heads + head"),
}


@pytest.mark.parametrize("name", first(SHORT_TWINS))
def test_a_twin_for_short_sequences_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, short, "SHORT_ATTENTION", *SHORT_TWINS[name])
    found, worst = run(3, causal=False)
    assert found.faults(worst <= 0.01)


TWINS = {
    "no wait for a piece": ("peers.wait_leading(flag != no_flag, step.source, flag, epoch);", "warp_threads;"),
    "results told of to nobody": (
        "        if (tile.owner != arena.rank) peers(storer).signal(",
        "        if (false) peers(storer).signal(",
    ),
    "results stored at the wrong rank": ("parameters.out + tile.owner,", "parameters.out + arena.rank,"),
}


@pytest.mark.parametrize("name", first(TWINS))
def test_a_twin_with_one_thing_wrong_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, ulysses, "ULYSSES_ATTENTION", *TWINS[name], *HEADERS)
    found, worst = run(20, causal=True, calls=2)
    assert found.faults(worst <= 0.01)


@pytest.mark.long
def test_a_twin_in_which_one_piece_speaks_for_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", 1)  # so that a shard has two of them
    run(200, causal=False, calls=2)[0].clean()
    line = "const u32 come = peers.wait_leading("
    use_twin(monkeypatch, ulysses, "ULYSSES_ATTENTION", line, line.replace("peers", "warp_threads + 0 * peers"), *HEADERS)
    found, worst = run(200, causal=False, calls=2)
    assert found.faults(worst <= 0.01)


def test_kernels_keep_to_their_registers_and_their_shared_memory() -> None:
    tiling = choose_tiling(4096, 4096, 128, causal=False, parcels=True)
    layout = f"static_assert(sizeof(RoleMemory<Roles>) == {tiling.shared_bytes + PARCELS * PARCEL_BYTES});\n"
    report = compiler_report(ulysses.ULYSSES_ATTENTION.source + layout, defines={"SHAPE": tiling.define(BF16), "WORLD_SIZE": 4})
    assert "0 bytes spill stores, 0 bytes spill loads" in report and "Potential Performance Loss" not in report
