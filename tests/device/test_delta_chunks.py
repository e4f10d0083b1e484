"""The gated delta rule in chunks: its algebra in float64, and its kernel on emulated ranks, as it is and with one thing broken."""

import dataclasses
from typing import Any

import pytest
import torch

from device.judged import judge, require_correct
from device.twins import use_twin
from peerlane import problems, solutions
from peerlane.device.host.jit import compile_cubin
from peerlane.device.host.resources import resources
from peerlane.device.tools.lint import lint
from peerlane.problems import Case
from peerlane.problems.families.delta import Tokens, normalised, recurrence
from peerlane.solutions.families import delta_chunks
from peerlane.solutions.families.delta_chunks import CHUNK, DELTA_CHUNKS, ChunkShape

BLOCK = 16


def part_of(tokens: Tokens) -> tuple[torch.Tensor, ...]:
    """What the kernel prepares of a chunk, with decay by channel: -G k, G q, k G_64 / G_t, solution, weights, G_64."""
    blocks = CHUNK // BLOCK
    within = tokens.log_decay.view(blocks, BLOCK, -1).cumsum(1)
    ends = within[:, -1].cumsum(0)
    middle = ends - within[:, -1] + within[:, BLOCK // 2 - 1]
    shift = (within - within[:, BLOCK // 2 - 1 : BLOCK // 2]).flatten(0, 1)
    keys, queries, right = tokens.k * shift.exp(), tokens.q * shift.exp(), tokens.k * (-shift).exp()
    system, weights = torch.zeros(2, CHUNK, CHUNK, dtype=keys.dtype)
    for row in range(blocks):
        for column in range(row + 1):
            between = (middle[row] - middle[column]).exp()
            t, s = (slice(BLOCK * block, BLOCK * (block + 1)) for block in (row, column))
            system[t, s] = (tokens.beta[t] * keys[t] * between) @ right[s].T
            weights[t, s] = (queries[t] * between) @ right[s].T
    solution = torch.linalg.inv(torch.eye(CHUNK, dtype=keys.dtype) + system.tril(-1)) * tokens.beta.T
    start, end = (x.repeat_interleave(BLOCK, 0) for x in (middle.exp(), (ends[-1] - middle).exp()))
    return -start * keys, start * queries, end * right, solution, weights.tril(), ends[-1].exp()


def scanned(tokens: Tokens) -> torch.Tensor:
    """The outputs of whole chunks (chunks 64, ...), as the kernel's scan makes them of parts."""
    state, outputs = tokens.k.new_zeros(tokens.k.shape[-1], tokens.v.shape[-1]), []
    for first in range(0, len(tokens.q), CHUNK):
        rows = slice(first, first + CHUNK)
        one = Tokens(tokens.q[rows], tokens.k[rows], tokens.v[rows], tokens.log_decay[rows], tokens.beta[rows])
        keys, queries, carriers, solution, weights, decay = part_of(one)
        writes = solution @ (one.v + keys @ state)
        outputs.append(queries @ state + weights @ writes)
        state = decay[:, None] * state + carriers.T @ writes
    return torch.cat(outputs)


def drawn(length: int, dtype: torch.dtype, log_decay: float | None) -> Tokens:
    random = torch.Generator().manual_seed(74)
    q, k, v, g = (torch.randn(length, size, generator=random, dtype=torch.float64) for size in (24, 24, 16, 24))
    decay = -5 * torch.sigmoid(3 * g - 2) if log_decay is None else torch.full_like(g, log_decay)
    beta = torch.rand(length, 1, generator=random, dtype=torch.float64)
    return Tokens(*(x.to(dtype) for x in (normalised(q, 1e-12), normalised(k, 1e-12), v, decay, beta)))


@pytest.mark.parametrize("log_decay", [None, -5.0, 0.0])
def test_parts_and_scans_give_what_the_recurrence_gives(log_decay: float | None) -> None:
    exact = drawn(3 * CHUNK, torch.float64, log_decay)
    want = recurrence(exact)
    assert torch.allclose(scanned(exact), want, rtol=0, atol=1e-12)
    single = scanned(drawn(3 * CHUNK, torch.float32, log_decay))
    assert torch.allclose(single.double(), want, rtol=0, atol=1e-5)


def case_of(number: int, label: str, world_size: int, **params: Any) -> Case:
    case = problems.get(number).case("small", label, 2)
    return dataclasses.replace(case, world_size=world_size, params={**case.params, "batch": 1, **params})


SMALL_RINGS = ((74, "carried_bf16", 2, {"heads": 1, "local": 70}), (75, "carried_bf16", 3, {"local": 70}))


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is prepared ahead, so that its memory is used again."""
    monkeypatch.setattr(delta_chunks, "RING", 1)
    monkeypatch.setattr(delta_chunks, "RING_BYTES", 0)


@pytest.mark.long
@pytest.mark.usefixtures("small_ring")
@pytest.mark.parametrize(("number", "label", "world_size", "params"), SMALL_RINGS)
def test_ragged_chunks_pass_through_a_small_ring(number: int, label: str, world_size: int, params: dict[str, Any]) -> None:
    require_correct(judge(solutions.files()[number], number, case_of(number, label, world_size, **params), schedules=2))


@pytest.mark.long
def test_scans_count_four_parts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_chunks, "RING", 8)
    require_correct(judge(solutions.files()[74], 74, case_of(74, "carried_bf16", 2, heads=1, local=9 * CHUNK), schedules=1))


def test_a_state_moves_on_to_the_next_rank() -> None:
    require_correct(judge(solutions.files()[75], 75, case_of(75, "carried_bf16", 2), schedules=1))


TWINS = [
    (74, 11, "if (epoch > first_epoch) peers.wait(rank + 1, items + item, epoch - 1);", ""),
    (74, 11, "peers.acknowledge(rank - 1, items + item, epoch);", ""),
    (75, 11, "+ (epoch & 1) * WORLD_SIZE * args.parameter_bytes", ""),
    (75, 70, "reached(ptx::load_relaxed_gpu(ready + later % args.ring), number)", "true"),
    (75, 70, "before + 1 - args.ring", "before + 1 - 2 * args.ring"),
    (
        75,
        70,
        "        front.release();\n        back.wait();",
        "        front.release();\n        count_local(Warp{}, taken);\n        back.wait();",
    ),
]
"""Of a problem, its tokens, and the kernel and its header: what stands there, and what a careless author would write."""


@pytest.mark.long
@pytest.mark.usefixtures("small_ring")
@pytest.mark.parametrize(("number", "local", "old", "new"), TWINS)
def test_a_broken_kernel_is_refused(number: int, local: int, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_twin(monkeypatch, delta_chunks, "DELTA_CHUNKS", old, new, "attention/delta_rule.cuh")
    assert not judge(solutions.files()[number], number, case_of(number, "carried_bf16", 2, heads=2, local=local), schedules=3).correct


SHAPES = {"kimi": ChunkShape(1, 8192, 32, 128, 32, 128, True, 1, 8256), "qwen": ChunkShape(1, 8192, 32, 128, 16, 128, False, 4, 32)}


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_fits_a_block(name: str) -> None:
    cubin = compile_cubin(DELTA_CHUNKS.source, arch="sm_90a", defines={"WORLD_SIZE": 4, **SHAPES[name].defines()})
    taken = resources(cubin)["delta_chunks"]
    assert lint(cubin.ptx()) == []
    assert taken.registers * SHAPES[name].threads <= 1 << 16 and SHAPES[name].shared_bytes <= 227 << 10


def test_roles_share_the_blocks_of_a_gpu() -> None:
    kimi, qwen = SHAPES["kimi"], SHAPES["qwen"]
    assert kimi.slices == qwen.slices == 2
    assert 16 <= kimi.scan_blocks(132) <= 32 and qwen.scan_blocks(132) == 64
    for shape in SHAPES.values():
        assert 0 < shape.scan_blocks(33) <= 16
    assert ChunkShape(1, 64, 8, 512, 8, 256, False, 4, 8).scan_blocks(40) % 8 == 0


def test_lines_that_share_keys_are_scanned_at_a_time() -> None:
    qwen = SHAPES["qwen"]
    for blocks in (5, 6, 33, 132):
        assert qwen.sharing(blocks) == 2 and qwen.scan_blocks(blocks) // qwen.slices % 2 == 0
    assert qwen.sharing(4) == 1 and SHAPES["kimi"].sharing(132) == 1
