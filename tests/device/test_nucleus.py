"""Filters of sharded logits on emulated ranks, with numbers that no problem draws; and the kernels with one thing broken."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from device.runs import run_calls
from device.twins import use_twin
from peerlane.device import group_of
from peerlane.device.host.jit import compile_cubin
from peerlane.device.host.resources import resources
from peerlane.emulator.ranks import EmulatedRanks
from peerlane.solutions.families import nucleus
from peerlane.solutions.families.nucleus import FILTERED_LOGITS, Filter

BF16, FP32 = torch.bfloat16, torch.float32
HEADERS = ("collectives/nucleus_search.cuh", "collectives/nucleus.cuh")


def normal(tokens: int, vocabulary: int) -> torch.Tensor:
    return 3 * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(82), dtype=torch.float64)


def of_one_thread(tokens: int, vocabulary: int) -> torch.Tensor:
    """The largest numbers of a rank are those of one thread, which is the only one that has more than one."""
    logits = normal(tokens, vocabulary).clamp(max=5)
    logits[:, :8] += 20
    logits[:, 512:520] += 20
    return logits


def with_a_tail(tokens: int, vocabulary: int) -> torch.Tensor:
    """Half of the numbers have no weight, some are -inf."""
    logits = normal(tokens, vocabulary)
    logits[:, ::2] -= 300
    logits[:, 1::16] = -torch.inf
    return logits


def tied_on_one_rank(tokens: int, vocabulary: int) -> torch.Tensor:
    """Whole numbers; all large ones are on the first rank."""
    logits = normal(tokens, vocabulary).round()
    logits[:, vocabulary // 2 :] -= 50
    return logits


@dataclass(frozen=True)
class Filtered:
    """Logits of some ranks, and their filter."""

    draw: Callable[[int, int], torch.Tensor]
    dtype: torch.dtype
    top_k: int = 0
    top_p: float = 1.0
    tokens: int = 5
    shard: int = 83
    ranks: int = 2
    calls: int = 1
    candidates: int = 4096
    """Room for those of a list."""

    def targets(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens from the largest down to what filters drop."""
        order = torch.argsort(logits, dim=-1, descending=True, stable=True)
        return order.gather(-1, torch.tensor([0, 2, 9, 40, 150])[: self.tokens, None] % logits.shape[-1]).squeeze(-1)

    def expected(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Log-probabilities by sorting, in float64; equal numbers at the cut are all kept, with the mass of as many as it takes."""
        ranked, rows = logits.double().sort(-1, descending=True).values, torch.arange(len(target))
        threshold = ranked[:, min(self.top_k or logits.shape[-1], logits.shape[-1]) - 1, None]
        ranked = ranked.masked_fill(ranked < threshold, -torch.inf)
        shares = ranked.softmax(-1)
        before = shares.cumsum(-1) - shares
        before[:, 0] = -1
        kept = (before < (self.top_p if self.top_p < 1 else 2)) & (ranked > -torch.inf)
        threshold = torch.where(kept, ranked, torch.inf).amin(-1)
        own = logits.double()[rows, target]
        value = own - ranked[:, 0] - torch.log(torch.where(kept, (ranked - ranked[:, :1]).exp(), 0).sum(-1))
        return torch.where(own >= threshold, value, -torch.inf)

    def faults(self, schedules: int = 1) -> set[str]:
        """Kinds of findings, and ``wrong_result`` unless all ranks have the same bits, which are close to what is expected."""

        def solution(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found = [nucleus.filtered_logits(group_of(), logits, target, (self.top_k, self.top_p)) for _ in range(self.calls)]
            return found[-1]

        logits = self.draw(self.tokens, self.ranks * self.shard).to(self.dtype)
        target = self.targets(logits)
        shards = [(part.clone(memory_format=torch.contiguous_format), target.clone()) for part in logits.chunk(self.ranks, -1)]
        with mock.patch.object(nucleus, "CANDIDATES", self.candidates):
            run = run_calls(lambda rank: solution, [shards], schedules=schedules)
        wanted = self.expected(logits, target)
        same = all(torch.equal(found, outputs[0]) for outputs in run.outputs for found in outputs)
        return run.faults(same and all(torch.allclose(found.double(), wanted, atol=1e-4, rtol=1e-5) for found, *_ in run.outputs))


CASES = {
    "list_of_one_thread": Filtered(of_one_thread, BF16, 5, shard=1024, tokens=3, candidates=8),
    "list_on_three_ranks": Filtered(normal, BF16, 40, 0.9, ranks=3),
    "list_longer_than_a_team": Filtered(normal, FP32, 93, 0.9),
    "list_longer_than_a_shard": Filtered(normal, FP32, 90, shard=50),
    "tied_list": Filtered(lambda *shape: normal(*shape).round(), BF16, 30, 0.9),
    "list_tied_on_one_rank": Filtered(tied_on_one_rank, BF16, 30),
    "count": Filtered(with_a_tail, BF16, 100),
    "count_to_minus_infinity": Filtered(with_a_tail, FP32, 160),
    "both_by_search": Filtered(normal, FP32, 100, 0.9),
    "large": Filtered(lambda *shape: normal(*shape) + 1000, FP32, top_p=0.9),
    "large_bf16": Filtered(lambda *shape: 100 * normal(*shape), BF16, top_p=0.9, ranks=3),
    "low": Filtered(lambda *shape: normal(*shape) - 1000, FP32, 100, 0.9),
    "tiny": Filtered(lambda *shape: normal(*shape) * 2.0**-24, FP32, top_p=0.5),
    "tiny_bf16": Filtered(lambda *shape: normal(*shape) * 2.0**-24, BF16, top_p=0.5),
    "around_zero": Filtered(lambda *shape: normal(*shape).abs().neg(), BF16, top_p=0.7, ranks=3),
    "repeated": Filtered(normal, BF16, 3, tokens=1, shard=8, calls=3),
    "no_filter": Filtered(lambda *shape: 100 * normal(*shape), BF16, ranks=3),
}


@pytest.mark.parametrize("name", ["list_of_one_thread", "both_by_search"])
def test_a_filter_is_exact(name: str) -> None:
    assert not CASES[name].faults()


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_all_filters_are_exact(name: str) -> None:
    assert not CASES[name].faults(schedules=2)


TWINS = {
    "a full list is cut off": ("list_of_one_thread", "if (memory.count > capacity)", "if (false)"),
    "equal numbers are forgotten": ("list_tied_on_one_rank", "equal += memory.of_rank[q][1]", "equal += 0.0f"),
    "a window that does not fit stays": ("large", "if (first && cut.maximum > -infinity &&", "if (false &&"),
    "a bin is not divided": ("tiny", "bins = Bins::divided(cut.range);", "return cut;"),
    "the bins of the token before": ("around_zero", "        histogram.clear(team);\n", ""),
    "no meeting behind the clearing": ("around_zero", "histogram.clear(team);\n        team.sync();", "histogram.clear(team);"),
    "no meeting behind the last packet": ("count", "        team_.sync();\n    }\n    // At the end", "    }\n    // At the end"),
    "no meeting before the first packet": (
        "count",
        "        team_.sync();\n        const u32 own = team_.thread();",
        "        const u32 own = team_.thread();",
    ),
    "masses of another base": ("around_zero", "one_base || !masses ? 1.0f", "true ? 1.0f"),
    "an odd number of rounds": ("repeated", "if (used_ % 2) exchange(1);", ""),
    "one buffer": ("around_zero", "epoch_ + used_++)", "epoch_ + 2 * used_++)"),
    "teams share packets": ("around_zero", "(blockIdx.x * TEAMS + number) * round_packets", "blockIdx.x * TEAMS * round_packets"),
}
"""Of a case: what stands in the kernel or its headers, and what stands there in the twin."""


@pytest.mark.long
@pytest.mark.parametrize("name", TWINS)
def test_a_broken_twin_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = TWINS[name]
    use_twin(monkeypatch, nucleus, "FILTERED_LOGITS", old, new, *HEADERS)
    assert CASES[case].faults(schedules=6)


def test_rounds_are_even_and_teams_enough() -> None:
    group = EmulatedRanks(2, schedules=1)._everyone.group(0)
    for tokens in (1, 2, 3, 5, 1000):
        shape = nucleus.Shape.of(group, tokens, Filter(0, 0.9), FP32)
        assert shape.grid * shape.teams >= min(tokens, group.sm_count * 2) and shape.teams * shape.team_threads <= group.max_threads
        assert shape.rounds(tokens, 9) % 2 == 0 and shape.rounds(tokens, 9) * shape.grid * shape.teams >= 9 * tokens


@pytest.mark.parametrize(("kept", "world_size"), [(Filter(0, 0.95), 8), (Filter(20, 0.8), 8)], ids=["search", "list"])
def test_four_teams_fit_on_an_sm(kept: Filter, world_size: int) -> None:
    for dtype in (BF16, FP32):
        launch = nucleus.Shape(132, 4, 256)
        defines = launch.defines(kept, dtype, None, world_size)
        needs = resources(compile_cubin(FILTERED_LOGITS.source, arch="sm_90a", defines={"WORLD_SIZE": world_size, **defines}))
        assert needs["filtered_logits"].registers <= 64 and int(defines["SHARED_BYTES"]) < 227 << 10
