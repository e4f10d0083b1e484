"""Dispatch and combine: rows where they belong and exact sums at home on emulated ranks, for any routes; broken twins are refused."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from device.runs import run_call, run_calls
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.device.host.jit import compiler_report
from peerlane.device.moe import dispatch
from peerlane.device.moe.dispatch import Received, Routing, TokenCombine, TokenDispatch, token_combine, token_dispatch
from peerlane.errors import UsageError

HIDDEN, SLOTS, OWN, MOST = 24, 3, 2, 6
Step = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Calls:
    """A group's calls: the tokens of every rank in each, and their sizes."""

    world_size: int
    tokens: tuple[tuple[int, ...], ...]
    capacity: int = 64
    alignment: int = 1
    num_sms: int = 0
    in_a_row: int = 1
    """launches of a kernel, one behind the other"""

    @property
    def routing(self) -> Routing:
        return Routing(OWN, MOST, self.capacity, self.alignment, self.num_sms)


def drawn(calls: Calls, number: int) -> list[Step]:
    """Of every rank: tokens in quarters, slots of which some have no expert, weights, values of rows, weights and scalars of rows."""
    generator = torch.Generator().manual_seed(number)

    def quarters(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator) / 4

    found: list[Step] = []
    for tokens in calls.tokens[number]:
        experts = torch.rand(tokens, calls.world_size * OWN, generator=generator).argsort(1)[:, :SLOTS]
        experts[torch.rand(tokens, SLOTS, generator=generator) < 0.2] = -1
        rows = quarters(calls.capacity, HIDDEN).bfloat16(), quarters(calls.capacity), quarters(calls.capacity)
        found.append((quarters(tokens, HIDDEN).bfloat16(), experts.contiguous(), quarters(tokens, SLOTS), *rows))
    return found


def wanted(calls: Calls, given: list[Step]) -> list[dict[str, torch.Tensor]]:
    """Of every rank what it receives and what comes home, by loops over all slots."""
    found = []
    for rank in range(calls.world_size):
        sources = torch.full((calls.world_size, MOST, SLOTS), -1, dtype=torch.int32)
        x, weights = torch.zeros(calls.capacity, HIDDEN).bfloat16(), torch.zeros(calls.capacity)
        ends, row, dropped = [], 0, 0
        for expert in range(rank * OWN, rank * OWN + OWN):
            row = -(-row // calls.alignment) * calls.alignment
            for source, (tokens, experts, slot_weights, *_) in enumerate(given):
                for token, slot in (experts == expert).nonzero().tolist():
                    if row < calls.capacity:
                        x[row], weights[row] = tokens[token], slot_weights[token, slot]
                    sources[source, token, slot] = row if row < calls.capacity else -2
                    dropped += row >= calls.capacity
                    row += 1
            ends.append(min(calls.capacity, -(-row // calls.alignment) * calls.alignment))
        found.append({"x": x, "weights": weights, "sources": sources, "ends": torch.tensor(ends), "dropped": torch.tensor([dropped])})
    for rank, (tokens, *_) in enumerate(given):
        y, scalars = torch.zeros(len(tokens), HIDDEN, dtype=torch.float64), torch.zeros(len(tokens), SLOTS)
        for owner, (*_, values, row_weights, row_scalars) in enumerate(given):
            for token, slot in (found[owner]["sources"][rank, : len(tokens)] >= 0).nonzero().tolist():
                row = int(found[owner]["sources"][rank, token, slot])
                y[token] += values[row].double() * row_weights[row].double()
                scalars[token, slot] = row_scalars[row]
        found[rank] |= {"y": y, "scalars": scalars}
    return found


def solution(calls: Calls) -> Any:
    sizes = MOST, SLOTS, OWN, HIDDEN * 2
    send, add = token_dispatch(group_of(), *sizes), token_combine(group_of(), *sizes)

    def call(x: torch.Tensor, experts: torch.Tensor, slot_weights: torch.Tensor, *rows: torch.Tensor) -> Any:
        values, weights, scalars = rows
        received = send(x, experts, slot_weights, calls.routing)
        for _ in range(calls.in_a_row):
            again = send.again(x + x, received.sources, calls.routing)
        for _ in range(calls.in_a_row):
            y, home = add(values, received.sources, experts, calls.routing, weights, scalars)
        return received, again, y, home

    return call


def is_wrong(want: dict[str, torch.Tensor], got: Any, alignment: int) -> bool:
    received, again, y, scalars = got
    assert isinstance(received, Received) and received.weights is not None
    if any(not torch.equal(getattr(received, name).long(), want[name].long()) for name in ("sources", "ends", "dropped")):
        return True
    end, own = int(want["ends"][-1]), want["sources"][want["sources"] >= 0].long()
    exact = (
        (received.x[:end], want["x"][:end]),
        (received.weights[:end], want["weights"][:end]),
        (again[own], 2 * want["x"][own]),
        (scalars, want["scalars"]),
    )
    return any(not torch.equal(a, b) for a, b in exact) or not torch.equal(y.double(), want["y"])


def found(calls: Calls, schedules: int = 3) -> set[str]:
    """Returns the kinds of the emulator's findings, and ``wrong_result``."""
    given = [drawn(calls, number) for number in range(len(calls.tokens))]
    run = run_calls(lambda rank: solution(calls), given, schedules=schedules)
    pairs = [pair for one, got in zip(given, run.outputs, strict=False) for pair in zip(wanted(calls, one), got, strict=True)]
    return run.faults(not any(is_wrong(want, got, calls.alignment) for want, got in pairs))


@pytest.mark.parametrize(
    "calls",
    [
        Calls(2, ((5, 3), (0, 6), (6, 6))),
        Calls(3, ((5, 3, 1), (6, 0, 2), (1, 1, 1)), alignment=4),
        Calls(4, ((2, 3, 0, 1), (1, 1, 6, 1)), capacity=8, alignment=4, num_sms=1),
    ],
    ids=["two ranks", "three ranks, aligned", "four ranks, dropped"],
)
def test_rows_reach_their_experts_and_sums_their_tokens(calls: Calls) -> None:
    assert not found(calls)


def found_in_fp8(world_size: int) -> set[str]:
    """Returns what :func:`found` does, of tokens in fp8 beside the same ones as they are."""
    columns, routing = 384, Routing(OWN, MOST, 32, alignment=2)

    def make(rank: int) -> Any:
        send = token_dispatch(group_of(), MOST, 2, OWN, columns * 2)
        return lambda x, topk_idx: (send(x, topk_idx, None, routing, fp8=True), send(x, topk_idx, None, routing))

    generator, given, right = torch.Generator().manual_seed(1), [], True
    for tokens in (MOST, 4, 1)[:world_size]:
        x = torch.randn(tokens, columns, generator=generator).bfloat16()
        x[0, :128] = 0
        given.append((x, torch.rand(tokens, world_size * OWN, generator=generator).topk(2).indices))
    run = run_calls(make, [given], schedules=2)
    for fp8, plain in [pair for outputs in run.outputs for pair in outputs]:
        end, own = int(plain.ends[-1]), plain.sources[plain.sources >= 0].long()
        wanted = plain.x[:end].float().view(end, 3, 128)
        scales = (wanted.abs().amax(2) / 448).clamp(min=1e-12)
        values = (wanted / scales.unsqueeze(2)).clamp(-448, 448).to(torch.float8_e4m3fn).float().view(end, columns)
        right &= torch.equal(fp8.sources, plain.sources) and torch.equal(fp8.scales[own], scales[own])
        right &= torch.equal(fp8.x[:end].float(), values)
    return run.faults(right)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_tokens_travel_in_fp8_with_a_scale_for_128_columns(world_size: int) -> None:
    assert not found_in_fp8(world_size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("warp_reduce<scale_columns / row_lanes>(most", "warp_reduce<8>(most"),
        ("args.recv_scales[to] = scale", "args.recv_scales[i] = scale"),
    ],
    ids=["a scale of 64 columns", "scales of the first row"],
)
def test_a_broken_twin_in_fp8_is_refused(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, dispatch, "TOKEN_DISPATCH", old, new, "moe/dispatch.cuh")
    assert found_in_fp8(2) & {"wrong_result", "race"}


MEETING = "        meet_ranks(Peers<W>(arena, args.flags), arena, 0, epoch);\n"
TWINS = {
    "rows that nobody has told of": ("TOKEN_DISPATCH", MEETING, "", {"race"}),
    "one buffer for tokens": (
        "TOKEN_DISPATCH",
        "u64 row_at(u32 token) const { return args.rows + (turn() * args.room + token)",
        "u64 row_at(u32 token) const { return args.rows + (u64(token))",
        {"race", "wrong_result"},
    ),
    "rows numbered from one": ("TOKEN_DISPATCH", "((1u << lane) - 1)", "((2u << lane) - 1)", {"wrong_result"}),
    "rows above the capacity": ("TOKEN_DISPATCH", "if (row >= args.capacity) row = dropped_row;", "", {"wrong_result", "illegal_address"}),
    "sums over those of the call before": (
        "TOKEN_COMBINE",
        "        peers.wait_all(0, epoch);  // all have read what came home in the call before\n",
        "",
        {"race", "wrong_result"},
    ),
    "sums that have not come": ("TOKEN_COMBINE", "        meet_ranks(peers, arena, 1, epoch);\n", "", {"race", "wrong_result"}),
    "weights of other slots": ("TOKEN_COMBINE", "__shfl_sync(full_warp, weight, slot)", "weight", {"wrong_result"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_of_dispatch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new, kinds = TWINS[name]
    use_twin(monkeypatch, dispatch, kernel, old, new, "moe/dispatch.cuh")
    assert found(Calls(2, ((6, 5),) * 2, capacity=12, in_a_row=3), schedules=8) & kinds


@pytest.mark.parametrize("routed", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_the_kernels_fit_their_registers(routed: str) -> None:
    of_dispatch = [{"ROUTED": routed, "QUANTISED": "AsTheyAre"}, {"ROUTED": "true", "QUANTISED": "peerlane::BFloat16"}]
    of_combine = {"ELEMENT": "peerlane::BFloat16"}
    for kernel, defines in (*((dispatch.TOKEN_DISPATCH, each) for each in of_dispatch), (dispatch.TOKEN_COMBINE, of_combine)):
        report = compiler_report(kernel.source, defines={**defines, "WORLD_SIZE": 8})
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        assert max(map(int, re.findall(r"Used (\d+) registers", report))) <= 65_536 // dispatch.MAX_THREADS


def test_what_there_is_no_exchange_for_is_refused() -> None:
    def refuse() -> None:
        for sizes in ((64, 33, 1, 64), (64, 2, 512, 64), (64, 2, 1, 24)):
            for kind in (TokenDispatch, TokenCombine):
                with pytest.raises(UsageError, match="a multiple of 16 bytes, 1 to 32 slots, 1 to 1023 experts"):
                    kind(group_of(), *sizes)

    run_call(refuse, [(), ()])
