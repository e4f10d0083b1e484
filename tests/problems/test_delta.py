"""Problems 74 and 75 beyond the contract: the chunked delta rule against the recurrence, oracles against the definition, costs."""

import math

import pytest
import torch

from peerlane import problems
from peerlane.problems.families.delta import Tokens, chunked_delta_rule, normalised, recurrence
from problem_cases import arguments, costs, drawn, oracle, oracles

FP32, FP64 = torch.float32, torch.float64


def random_tokens(length: int, *, by_channel: bool, least_log_decay: float, repeated: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=FP64)

    k = normalised(normal(2, 3, 1 if repeated else length, 8), 1e-6).expand(2, 3, length, 8)
    log_decay = least_log_decay * torch.rand((2, 3, length, 8 if by_channel else 1), generator=generator, dtype=FP64)
    beta = torch.rand((2, 3, length, 1), generator=generator, dtype=FP64)
    return Tokens(
        q=normalised(normal(2, 3, length, 8), 1e-6) * 8**-0.5,
        k=k,
        v=normal(2, 3, length, 6),
        log_decay=log_decay,
        beta=torch.ones_like(beta) if repeated else beta,
    )


def some(tokens: Tokens, part: slice, dtype: torch.dtype = FP64) -> Tokens:
    return Tokens(*(getattr(tokens, name)[:, :, part].to(dtype) for name in ("q", "k", "v", "log_decay", "beta")))


DECAYS = [(by_channel, least) for by_channel in (True, False) for least in (-0.01, -1.0, -5.0)]


@pytest.mark.parametrize(
    ("length", "first", "by_channel", "least_log_decay"),
    [*((*part, *decay) for part in ((64, 0), (150, 33), (7, 3)) for decay in DECAYS), (2200, 2100, True, -1.0), (2200, 2040, False, -1.0)],
)
def test_chunks_compute_the_recurrence(length: int, first: int, by_channel: bool, least_log_decay: float) -> None:
    tokens = random_tokens(length, by_channel=by_channel, least_log_decay=least_log_decay)
    want = recurrence(tokens)[..., first:, :]
    got, scale = chunked_delta_rule(lambda part: some(tokens, part), length, first=first, with_scale=True)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert scale is not None and scale.shape == (*want.shape[:-1], 1)
    assert 0.2 < float((want / scale).square().mean().sqrt()) < 1.5
    single, _ = chunked_delta_rule(lambda part: some(tokens, part, FP32), length, first=first)
    assert float((single - want).norm() / want.norm()) < 2e-6


@pytest.mark.parametrize("by_channel", [True, False])
def test_chunks_survive_the_fastest_decay(by_channel: bool) -> None:
    """e^-5 a token by channel, and e^-80 for all channels alike."""
    tokens = random_tokens(130, by_channel=by_channel, least_log_decay=0.0)
    fast = Tokens(tokens.q, tokens.k, tokens.v, torch.full_like(tokens.log_decay, -5.0 if by_channel else -80.0), tokens.beta)
    for dtype, tolerance in ((FP64, 1e-12), (FP32, 1e-5)):
        got, _ = chunked_delta_rule(lambda part, dtype=dtype: some(fast, part, dtype), 130)
        torch.testing.assert_close(got.to(FP64), recurrence(fast), rtol=tolerance, atol=tolerance)


def test_one_key_written_with_beta_one_holds_the_last_value() -> None:
    tokens = random_tokens(200, by_channel=True, least_log_decay=0.0, repeated=True)
    got, _ = chunked_delta_rule(lambda part: some(tokens, part), 200)
    torch.testing.assert_close(got, (tokens.q * tokens.k).sum(-1, keepdim=True) * tokens.v, rtol=1e-10, atol=1e-12)


def sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, floor: float) -> torch.Tensor:
    """o (L, V) of one head by the definition: raw q, k (L, K), v (L, V), decay (L, K), beta (L,)."""
    state, outputs = torch.zeros((q.shape[1], v.shape[1]), dtype=FP64), []
    for t in range(q.shape[0]):
        query = q[t] / max(float(q[t].norm()), floor) / math.sqrt(q.shape[1])
        key = k[t] / max(float(k[t].norm()), floor)
        state = torch.diag(decay[t]) @ state
        state = state + torch.outer(key, beta[t] * (v[t] - state.t() @ key))
        outputs.append(state.t() @ query)
    return torch.stack(outputs)


@pytest.mark.parametrize("label", ["plain_fp32", "four_value_heads_fp32", "zeros_bf16", "extreme_fp32"])
def test_gated_deltanet_by_its_definition(label: str) -> None:
    case, inputs = drawn(75, label, 2)
    q, k, v, gate, beta = (torch.cat([args[i] for args in inputs], 1).to(FP64) for i in range(5))
    a_log, dt_bias = (torch.cat([args[i] for args in inputs]).to(FP64) for i in (5, 6))
    got = torch.cat([expected.value for expected in oracles(case, inputs)], 1)
    for head in range(v.shape[2]):
        own = head // case.params.get("ratio", 1)
        decay = torch.exp(-torch.exp(a_log[head]) * torch.log1p(torch.exp(gate[1, :, head] + dt_bias[head])))
        want = sequence(q[1, :, own], k[1, :, own], v[1, :, head], decay.unsqueeze(-1).expand(-1, q.shape[-1]), beta[1, :, head], 1e-6)
        torch.testing.assert_close(got[1, :, head], want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("label", "sequences"), [("plain_fp32", [[0, 1, 2, 3]]), ("summed_fp32", [[0, 2], [1, 3]])])
def test_kimi_delta_attention_by_its_definition(label: str, sequences: list[list[int]]) -> None:
    case, inputs = drawn(74, label)
    total = torch.zeros(())
    for ranks in sequences:
        q, k, v, g, beta = (torch.cat([inputs[rank][i] for rank in ranks], 1)[0].to(FP64) for i in range(5))
        a_log, dt_bias = inputs[0][5].to(FP64), inputs[0][6].to(FP64).view(q.shape[1], q.shape[2])
        heads = []
        for head in range(q.shape[1]):
            decay = torch.exp(-5 / (1 + torch.exp(-torch.exp(a_log[head]) * (g[:, head] + dt_bias[head]))))
            heads.append(sequence(q[:, head], k[:, head], v[:, head], decay, 1 / (1 + torch.exp(-beta[:, head])), 1e-12))
        total = total + torch.stack(heads, 1)
    shards = total.chunk(len(sequences[0]))
    for rank, expected in enumerate(oracles(case, inputs)):
        place = next(ranks.index(rank) for ranks in sequences if rank in ranks)
        torch.testing.assert_close(expected.value[0], shards[place], rtol=1e-8, atol=1e-10)


def test_the_public_shape_remembers_across_ranks() -> None:
    """With the public benchmark's gates an answer from a state of zero passes; here the state decides the first tokens of every rank."""
    (case,) = problems.get(74).cases("pkb", 2)
    inputs = arguments(case)
    whole = oracle(case, inputs, 1).value
    alone = oracle(case, [inputs[1], inputs[1]]).value
    assert float((whole - alone).norm() / whole.norm()) > 0.3
    late = slice(-8, None)
    assert float((whole - alone)[:, late].norm() / whole[:, late].norm()) > 0.05


def test_costs_choose_between_tokens_and_states() -> None:
    tokens = 64 * 2 * (2 * 8 * 256 + 2 * 8 * 512 + 2 * 8)
    cost = costs(75, "pkb")[3]
    assert cost.egress_bytes == cost.ingress_bytes == tokens * 7 / 8 and cost.hbm_bytes == tokens
    state = 32 * 128 * 128 * 2
    found = costs(74, "production_kimi_linear_32k", 4)
    assert [cost.egress_bytes for cost in found] == [state, state, state, 0]
    assert [cost.ingress_bytes for cost in found] == [0, state, state, state]
    pairs = costs(74, "production_kimi_linear_tp2", 4)[2]
    assert pairs.egress_bytes == 4096 * 16 * 128 * 2  # of two tensor-parallel ranks, each sends half and the other's half of the sum
    assert pairs.ingress_bytes == 4096 * 16 * 128 * 2 + 16 * 128 * 128 * 2
