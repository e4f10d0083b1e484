"""Problem 74: Kimi Delta Attention over a sharded sequence, summed over tensor-parallel ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import delta
from peerlane.problems.families.collective import all_gather_single
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32, FP64

# The smallest norm that queries and keys are divided by, and the least logarithm of a token's decay.
_FLOOR, _LEAST_LOG_DECAY = 1e-12, -5.0


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    cp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rank, ranks, local = dist.get_rank(cp_group), dist.get_world_size(cp_group), q.shape[1]

    def whole_sequence(x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
        all_gather_single(gathered, x.contiguous(), group=cp_group)
        return torch.cat(gathered.chunk(ranks), dim=1)

    arguments = [whole_sequence(x) for x in (q, k, v, g, beta)]
    # Later tokens do not matter to the rank's own.
    first, length = rank * local, (rank + 1) * local
    o, _ = delta.chunked_delta_rule(lambda part: prepared(arguments, a_log, dt_bias, part, torch.float32), length, first=first)
    result = o.to(q.dtype).transpose(1, 2).contiguous()
    if tp_group is not None:
        dist.all_reduce(result, group=tp_group)
    return result


def prepared(arguments: Sequence[torch.Tensor], a_log: torch.Tensor, dt_bias: torch.Tensor, part: slice, work: torch.dtype) -> delta.Tokens:
    """Some tokens of q, k, v, g and beta (B, L, H, ...), as (B, H, tokens, ...) in ``work``."""
    q, k, v, g, beta = (x[:, part].to(work).transpose(1, 2) for x in arguments)
    rate = torch.exp(a_log.to(work)).view(-1, 1, 1) * (g + dt_bias.to(work).view(-1, 1, g.shape[-1]))
    return delta.Tokens(
        delta.normalised(q, _FLOOR) * q.shape[-1] ** -0.5,
        delta.normalised(k, _FLOOR),
        v,
        _LEAST_LOG_DECAY * torch.sigmoid(rate),
        torch.sigmoid(beta).unsqueeze(-1),
    )


def _tensor_parallel(case: pc.Case) -> int:
    """The size of a tensor-parallel group: 1, or ``case["tp"]`` where there are four ranks or more."""
    return int(case.params.get("tp", 1)) if case.world_size >= 4 else 1


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """Neighbours are tensor-parallel; ranks with the same place among them share a sequence. None (the world, nobody) otherwise."""
    tp = _tensor_parallel(case)
    if tp == 1:
        return {}
    return {
        "cp": [range(first, case.world_size, tp) for first in range(tp)],
        "tp": [range(first, first + tp) for first in range(0, case.world_size, tp)],
    }


def _sequence_ranks(case: pc.Case, rank: int) -> list[int]:
    """The ranks that share a sequence with this one, in order."""
    tp = _tensor_parallel(case)
    return list(range(rank % tp, case.world_size, tp))


def _summed_ranks(case: pc.Case, rank: int) -> list[int]:
    """The ranks whose outputs are added."""
    tp = _tensor_parallel(case)
    return list(range(rank - rank % tp, rank - rank % tp + tp))


def _local_length(case: pc.Case) -> int:
    """``local`` tokens per rank, or ``length`` in the whole sequence."""
    return int(case["local"] if "local" in case.params else case["length"] // len(_sequence_ranks(case, 0)))


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """q, k, v and beta of N(0, 1), a_log of N(0, 0.01); g of N(-4, 1) and dt_bias in [-4, 3): decay 0.2 to 0.999 by channel.

    A quarter of the heads (of four or more) hardly decays and writes little, so that it remembers ten thousand tokens.

    Then channels of k are multiplied and those of q divided by powers of two, and channels of v multiplied by others: products of q and k
    keep their relative errors, but q, k, v, the state and o fit no code with one scale for neighbouring channels.

    ``case["pattern"]`` may make them hard:

    * ``carried``: v is zero but on the first rank of the sequence, there is next to no decay, and beta is small on the other ranks
    * ``repeated``: one key for all tokens, beta 1 and no decay: every write replaces the one before
    * ``zeros``: every third token has a zero key, and every fourth a zero query
    * ``fast``: decay by e^-5 a token
    * ``large``: v is 1000 times as large
    """
    pattern, heads, depth = case.params.get("pattern"), case["heads"], case["key_depth"]
    tokens = (case["batch"], _local_length(case), heads)
    q, k = (draw.normal((*tokens, depth), case.dtype) for _ in "qk")
    v = draw.normal((*tokens, case["value_depth"]), case.dtype, scale=1000.0 if pattern == "large" else 1.0)
    g, beta = draw.normal((*tokens, depth), FP32, shift=-4.0), draw.normal(tokens, FP32)
    a_log = draw.shared.normal((heads,), case.dtype, scale=0.1)
    dt_bias = draw.shared.uniform((heads * depth,), case.dtype, low=-4.0, high=3.0)
    patient = draw.shared.permutation(heads)[: heads // 4]
    g[:, :, patient] -= 8.0
    beta[:, :, patient] -= 5.0
    pairs, values = (draw.shared.octaves((heads, size)).to(case.dtype) for size in (depth, case["value_depth"]))
    match pattern:
        case "carried":
            g -= 8.0
            if _sequence_ranks(case, rank).index(rank) > 0:
                v.zero_()
                beta -= 5.0
        case "repeated":
            k = draw.shared.normal((case["batch"], 1, heads, depth), case.dtype).expand_as(k).contiguous()
            g.fill_(-40.0)
            beta.fill_(40.0)
        case "zeros":
            k[:, 1::3] = 0.0
            q[:, 2::4] = 0.0
        case "fast":
            g.fill_(40.0)
    groups = (pc.GroupRef("cp"), pc.GroupRef("tp")) if process_groups(case) else (None, None)
    return (q / pairs, k * pairs, v * values, g.to(case.dtype), beta.to(case.dtype), a_log, dt_bias, *groups)


def _tokens(inputs: pc.Inputs, ranks: Sequence[int], work: torch.dtype) -> Callable[[slice], delta.Tokens]:
    """The sequence that the ranks' shards make up, in this order."""
    arguments = [torch.cat([inputs[q][i] for q in ranks], dim=1) for i in range(5)]
    a_log, dt_bias = inputs[ranks[-1]][5:7]
    return lambda part: prepared(arguments, a_log, dt_bias, part, work)


def _until(case: pc.Case, rank: int) -> list[int]:
    """The ranks of the sequence up to this one: those that its outputs depend on."""
    ranks = _sequence_ranks(case, rank)
    return ranks[: ranks.index(rank) + 1]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    local, sums = _local_length(case), []
    for peer in _summed_ranks(case, rank):
        ranks = _until(case, peer)
        first = (len(ranks) - 1) * local
        sums.append(delta.sized_delta_rule(_tokens(inputs, ranks, FP64), [inputs[q][2] for q in ranks], first + local, first=first))
    value, magnitude = (torch.stack(terms).sum(0) for terms in zip(*sums, strict=True))
    return pc.Expected("output", value.transpose(1, 2), case.dtype, magnitude=magnitude.transpose(1, 2))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Along the sequence either tokens are exchanged for heads and back, or the state is handed on, rounded to the dtype; the less of both.

    Outputs of tensor-parallel ranks are reduced and spread in parts. Operations as in the Gated DeltaNet: 6 K V per token and head with a
    state, 2 S (K + V) without one.
    """
    ranks, tp, local, size = _sequence_ranks(case, rank), _tensor_parallel(case), _local_length(case), case.dtype.itemsize
    place, heads, key_depth, value_depth = ranks.index(rank), case["heads"], case["key_depth"], case["value_depth"]
    tokens = case["batch"] * local * heads
    moved = tokens * (3 * key_depth + 2 * value_depth + 1) * size
    exchanged = moved * (len(ranks) - 1) / len(ranks)
    state = case["batch"] * heads * key_depth * value_depth * size
    summed = 2 * (tp - 1) / tp * tokens * value_depth * size
    operations = min(6 * key_depth * value_depth, 2 * local * len(ranks) * (key_depth + value_depth))
    return pc.Cost(
        hbm_bytes=moved,
        egress_bytes=summed + min(exchanged, state * (place < len(ranks) - 1)),
        ingress_bytes=summed + min(exchanged, state * (place > 0)),
        flops={FLOP_UNIT[case.dtype]: tokens * operations},
    )


def _chunked(case: pc.Case, rank: int) -> pc.Steps:
    ranks, tp, depths = _sequence_ranks(case, rank), _tensor_parallel(case), (case["key_depth"], case["value_depth"])
    states = case["batch"] * case["heads"]
    tokens = states * _local_length(case)
    summed = pc.traffic.all_reduce(tokens * depths[1] * case.dtype.itemsize, tp)
    steps = delta.chunked_steps(states, tokens, cost(case, rank).hbm_bytes, len(ranks), depths, case.dtype)
    return (*steps, pc.step("sum over tensor-parallel ranks", link=summed, barriers=2 * (tp > 1)))


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 2, "local": 11, "heads": 4, "key_depth": 24, "value_depth": 40, **params})


PRESETS = (
    pc.preset(
        "small",
        "with and without tensor parallelism; a state that only the first rank writes; one key; zero keys and queries; fast decay; large v",
        _small("plain_bf16", BF16),
        _small("plain_fp32", FP32),
        _small("summed_bf16", BF16, tp=2, world_sizes=(4, 8)),
        _small("summed_fp32", FP32, tp=2, world_sizes=(4, 8)),
        _small("carried_bf16", BF16, pattern="carried"),
        _small("carried_fp32", FP32, pattern="carried", local=17),
        _small("repeated_fp32", FP32, pattern="repeated"),
        _small("zeros_bf16", BF16, pattern="zeros", local=17),
        _small("fast_fp32", FP32, pattern="fast", local=40),
        _small("large_bf16", BF16, pattern="large"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 64 tokens per rank, 16 heads of 128; on four ranks and more, pairs are tensor-parallel",
        pc.case("bf16", BF16, batch=1, local=64, heads=16, key_depth=128, value_depth=128, tp=2),
    ),
    pc.preset(
        "production_kimi_linear_32k",
        "Kimi-Linear-48B-A3B: 32 heads of 128, 32768 tokens",
        pc.case("bf16", BF16, batch=1, length=32768, heads=32, key_depth=128, value_depth=128),
    ),
    pc.preset(
        "production_kimi_linear_128k",
        "Kimi-Linear-48B-A3B: 131072 tokens",
        pc.case("bf16", BF16, batch=1, length=131072, heads=32, key_depth=128, value_depth=128),
    ),
    pc.preset(
        "production_kimi_linear_tp2",
        "Kimi-Linear-48B-A3B with two tensor-parallel ranks: 16 heads, 4096 tokens per rank",
        pc.case("bf16", BF16, batch=1, local=4096, heads=16, key_depth=128, value_depth=128, tp=2, world_sizes=(4, 8)),
    ),
)


PROBLEM = pc.Problem(
    id=74,
    slug="kimi_delta_attention_cp_tp",
    title="Kimi Delta Attention over a sharded sequence, summed over tensor-parallel ranks",
    category="context_parallel",
    parallelism=("context", "sequence", "tensor"),
    origin="Kimi Delta Attention of Kimi Linear in flash-linear-attention; the sum over tensor-parallel ranks is synthetic",
    summary=(
        "The rank holds tokens [r L, (r + 1) L) of a sequence sharded over cp_group (the world if None): q, k, g (B, L, H, K), v "
        "(B, L, H, V), beta (B, L, H); a_log (H,) and dt_bias (H K,) are the same on all ranks. With q~ = q / max(|q|, 1e-12) / sqrt(K), "
        "k~ = k / max(|k|, 1e-12), d = exp(-5 sigmoid(exp(a_log) (g + dt_bias))) for every key channel, and a state M (K, V) that is "
        "zero at first, per head and in float32: M <- diag(d_t) M; u = sigmoid(beta_t) (v_t - M^T k~_t); M <- M + k~_t u^T; "
        "o_t = M^T q~_t. o, rounded to q's dtype, is summed in it over tp_group (no sum if None); the rank's tokens are returned, "
        "(B, L, H, V)."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=delta.delta_tolerance,
    cost=cost,
    attainable=pc.Algorithm("chunked delta rule, states handed on", "Kimi Linear, 2025; latencies within a chunk are left out", _chunked),
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    process_groups=process_groups,
    notes=(
        "The public benchmark's decay is 0.14 on average: the state dies with the next token, and an answer without communication passes. "
        "Here decay is 0.2 to 0.999 by channel, so that hundreds of tokens are remembered, and ten thousand by some heads, so that states "
        "of ranks far behind count; errors are measured by the size of the state.",
        "The public reference goes token by token through the whole sequence and sums all of it. Here it goes in chunks, up to the rank's "
        "last token, and sums the rank's own tokens, which gives the same answer.",
        "On two ranks there is no tensor parallelism, as in the public benchmark.",
    ),
    speed_note=(
        "The public one steps through the sequence token by token in Python; this one goes by chunks of 32 tokens, with matrix products."
    ),
)
