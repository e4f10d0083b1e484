"""Dispatch and combination of experts' rows: right on emulated ranks, compiled for GPUs, and caught with one line lost."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from device.judged import judge_case, require_correct
from device.runs import run_call, run_calls
from device.twins import use_header, use_twin
from peerlane.device import compile_cubin, group_of
from peerlane.device.host.declare import DeclaredKernel
from peerlane.device.host.element_types import ELEMENT_TYPES
from peerlane.device.host.jit import compiler_report
from peerlane.device.host.roles import BlockNeeds
from peerlane.device.moe import exchange, layer
from peerlane.device.moe import router as router_kernel
from peerlane.device.products.gemm import Tiling

NUMBERS = {"dispatch": 28, "combine": 29}
KERNELS = {"dispatch": "MOE_DISPATCH", "combine": "MOE_COMBINE"}


@pytest.mark.parametrize(
    ("number", "label", "world_size"),
    [
        (28, "duplicates_bf16", 2),
        (29, "duplicates_bf16", 2),
        (26, "skewed_int64", 2),
        (51, "alone_in_group_bf16", 2),
        *(pytest.param(number, "strided_group_bf16", 4, marks=pytest.mark.long) for number in (28, 29)),
        *(pytest.param(number, label, 4, marks=pytest.mark.long) for number, label in ((29, "renamed_tokens_fp32"), (51, "two_each_bf16"))),
        pytest.param(31, "no_bias_bf16", 2, marks=pytest.mark.long),
        pytest.param(27, "uneven_bf16", 2, marks=pytest.mark.long),
    ],
)
def test_rows_go_to_their_experts_and_come_back(number: int, label: str, world_size: int) -> None:
    require_correct(judge_case(number, label, world_size, schedules=2))


@pytest.mark.parametrize("kernel", KERNELS.values())
def test_the_kernels_compile(kernel: str) -> None:
    types = {"ROW": torch.bfloat16, "WEIGHT": torch.float32, "RESULT": torch.float32}
    defines = {"WORLD_SIZE": 8, "MAP": "u8", **{name: ELEMENT_TYPES[dtype] for name, dtype in types.items()}}
    compile_cubin(getattr(exchange, kernel).source, defines=defines)


@pytest.mark.parametrize(
    "tiling",
    [layer.TILINGS[0], *(pytest.param(tiling, marks=pytest.mark.long) for tiling in layer.TILINGS[1:])],
    ids=lambda tiling: f"{tiling.rows}x{tiling.columns}",
)
@pytest.mark.parametrize("kernel", [layer.MOE_UP, layer.MOE_DOWN], ids=["up", "down"])
def test_the_kernels_of_a_layer_fit_a_block(kernel: DeclaredKernel, tiling: Tiling) -> None:
    report = compiler_report(kernel.source, defines={**tiling.defines(torch.bfloat16, "k", "k"), "WORLD_SIZE": 8})
    assert "Potential Performance Loss" not in report
    (registers,), (shared,) = re.findall(r"Used (\d+) registers", report), re.findall(r"(\d+) bytes smem", report)
    assert BlockNeeds(tiling.threads, int(registers), tiling.shared_bytes + int(shared)).per_sm() == 1


LAYER_TWINS = {
    "rows told of before they are stored": (
        "                peers.signal(owner, piece_slot(layout.target[d], piece), epoch);\n",
        "                peers.acknowledge(owner, piece_slot(layout.target[d], piece ^ 1), epoch);\n",
        {"race", "deadlock", "trap", "wrong_result"},
    ),
    "tiles that do not wait for their rows": (
        "            if (unit.source >= 0) peers.wait_slots(unit.source, piece_slot",
        "            if (false) peers.wait_slots(unit.source, piece_slot",
        {"race"},
    ),
    "counts that are used before they have come": ("        peers.wait_all(0, epoch);\n", "", {"race"}),
    "sums before all rows are home": (
        "            peers(consumer).wait_slots(q, first * columns(), (end - first) * columns(), epoch);\n",
        "",
        {"race"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYER_TWINS)
def test_a_layer_with_one_line_wrong_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead, kinds = LAYER_TWINS[name]
    use_header(monkeypatch, tmp_path, "moe/moe_layer.cuh", line, instead)
    found = judge_case(31, "no_bias_bf16", schedules=2)
    assert {finding.kind for finding in found.outcome.findings} & kinds or ("wrong_result" in kinds and found.wrong is not None)


LOST = {
    "places of rows that nobody has told of": ("dispatch", "    peers.wait_all(0, epoch);", {"race"}),
    "tokens of rows before they are told": ("dispatch", "    meet_ranks(peers, arena, 1 + gridDim.x, epoch);\n", {"race"}),
    "rows before the lists of them are whole": ("dispatch", "    meet_blocks(peers, arena, 1 + 2 * gridDim.x, epoch);\n", {"race"}),
    "tokens before they have come": ("dispatch", "        team.hear(round);\n", {"race"}),
    "lists before they are empty": ("combine", "    meet_blocks(peers, arena, 1, epoch);\n", {"race"}),
    "sums before the lists are whole": ("combine", "    meet_blocks(peers, arena, 1 + 2 * gridDim.x, epoch);\n", {"race"}),
    "sums before all parts have come": ("combine", "        if (!sends) team.hear(round);\n", {"race"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOST)
def test_a_kernel_that_has_lost_a_line_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, line, kinds = LOST[name]
    use_twin(monkeypatch, exchange, KERNELS[way], line, "")
    outcome = judge_case(NUMBERS[way], "duplicates_bf16", schedules=12).outcome
    assert {finding.kind for finding in outcome.findings} & kinds


def test_the_router_treats_nan_and_infinity_as_torch_does() -> None:
    """Each expert's logit is an entry of the token. Tokens are finite, or hold infinity or NaN."""
    none, most = float("nan"), float("inf")
    rows = [[1, 3, 2, -1], [1, none, 2, 3], [most, 1, 2, 3], [-most, 1, 2, 3], [none] * 4, [-3e38] * 4]
    tokens = torch.tensor(rows, dtype=torch.bfloat16)
    logits = tokens.clone()
    logits[2, 1:] = logits[3, 1:] = none  # infinity times the zeros of other experts
    given = [(tokens.clone(), torch.eye(4, dtype=torch.bfloat16)) for _ in range(2)]
    for weights, experts in run_call(lambda x, router: router_kernel.route(group_of(), x, router, None, 2), given):
        torch.testing.assert_close(weights, logits.softmax(-1).topk(2).values, equal_nan=True)
        assert experts.min() >= 0 and experts.max() < 4 and (experts[:, 0] != experts[:, 1]).all()
        assert torch.equal(experts[0], torch.tensor([1, 2]))


def test_adapters_are_added_to_weights_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters of a library's product may find no SMs beside other ranks' blocks, which wait."""
    monkeypatch.setattr(torch, "addmm", None)
    require_correct(judge_case(32, "rank_one_bf16", schedules=1))


def judged_layers(batches: Sequence[tuple[list[int], int]], owners: Callable[[int, int], range | None], world_size: int) -> None:
    """Calls of one group, each with (tokens of every rank, experts), against the layer in torch. Ranks have the same weights."""
    h, inner = 16, 8
    draw = torch.Generator().manual_seed(1)
    gate, up, down = layers = tuple(
        torch.nn.Linear(a, b, bias=False, dtype=torch.bfloat16) for a, b in ((h, inner), (h, inner), (inner, h))
    )
    own = [copy.deepcopy(layers) for _ in range(world_size)]

    def make(rank: int) -> Callable[..., torch.Tensor]:
        return lambda x, router: layer.gated_experts(group_of(), x, (router, None), own[rank], 1, owners(rank, router.shape[0]))

    calls = []
    for counts, experts in batches:
        router = torch.randn(experts, h, generator=draw).to(torch.bfloat16)
        calls.append([(torch.randn(count, h, generator=draw).to(torch.bfloat16), router.clone()) for count in counts])
    for given, outputs in zip(calls, run_calls(make, calls).clean(), strict=True):
        for (x, router), y in zip(given, outputs, strict=True):
            weight = torch.nn.functional.linear(x, router).softmax(-1).amax(1, keepdim=True)
            torch.testing.assert_close(y, down(torch.nn.functional.silu(gate(x)) * up(x)) * weight, rtol=0.05, atol=0.01)


@pytest.mark.long
def test_one_rank_may_get_more_tokens_than_its_room() -> None:
    judged_layers([([96, 40], 2), ([96, 150], 2)], lambda rank, experts: None, 2)


@pytest.mark.long
def test_calls_of_some_ranks_share_a_layer_with_calls_of_all() -> None:
    def block(rank: int, experts: int) -> range:
        first = rank // experts * experts
        return range(first, first + experts)

    judged_layers([([5, 9, 0, 7], 2), ([5, 9, 0, 7], 4)], block, 4)
