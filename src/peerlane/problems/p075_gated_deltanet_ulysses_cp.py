"""Problem 75: Gated DeltaNet over a sharded sequence, by exchange of sequence for heads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import delta
from peerlane.problems.families.collective import group_layout, group_members, local_length
from peerlane.problems.families.matmul import BF16, FLOP_UNIT, FP32, FP64

# The smallest norm that queries and keys are divided by.
_FLOOR = 1e-6


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = dist.get_world_size(group)

    def to_heads(x: torch.Tensor) -> torch.Tensor:
        """All tokens of the rank's heads: (B, L, H, ...) to (B, W L, H / W, ...)."""
        blocks = torch.stack(x.chunk(ranks, dim=2))
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return torch.cat(received.unbind(), dim=1)

    arguments = [to_heads(x) for x in (q, k, v, gate, beta)]
    length = arguments[0].shape[1]
    o, _ = delta.chunked_delta_rule(lambda part: prepared(arguments, a_log, dt_bias, part, torch.float32), length)
    by_tokens = torch.stack(o.to(q.dtype).transpose(1, 2).chunk(ranks, dim=1))
    received = torch.empty_like(by_tokens)
    dist.all_to_all_single(received, by_tokens, group=group)
    return torch.cat(received.unbind(), dim=2)


def prepared(arguments: Sequence[torch.Tensor], a_log: torch.Tensor, dt_bias: torch.Tensor, part: slice, work: torch.dtype) -> delta.Tokens:
    """Some tokens of q, k, v, gate and beta (B, L, heads, ...), as (B, value heads, tokens, ...) in ``work``.

    Every query head is repeated for its value heads.
    """
    q, k, v, gate, beta = (x[:, part].to(work).transpose(1, 2) for x in arguments)
    repeats = v.shape[1] // q.shape[1]
    q, k = (delta.normalised(x, _FLOOR).repeat_interleave(repeats, dim=1) for x in (q, k))
    log_decay = -torch.exp(a_log.to(work)).view(-1, 1) * F.softplus(gate + dt_bias.to(work).view(-1, 1))
    return delta.Tokens(q * q.shape[-1] ** -0.5, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1))


def _heads(case: pc.Case, rank: int) -> tuple[int, int]:
    """Query and value heads: ``heads`` rounded up to a multiple of the group's size, and ``ratio`` times as many."""
    ranks = len(group_members(case, rank))
    heads = -(-case["heads"] // ranks) * ranks
    return heads, heads * case.params.get("ratio", 1)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """q, k, v and gate of N(0, 1), beta the sigmoid of N(-1, 1), a_log from -6 to 0 by head: decay 0.5 to 0.998 a token.

    In sequences of ``case["length"]``, the long ones, a quarter of the heads hardly decays and writes little: it remembers ten thousand
    tokens.

    Then channels of k are multiplied and those of q divided by powers of two, and channels of v multiplied by others: products of q and k
    keep their relative errors, but q, k, v, the state and o fit no code with one scale for neighbouring channels.

    ``case["pattern"]`` may make them hard:

    * ``carried``: v is zero but on the first rank, there is next to no decay, and beta is small on the other ranks
    * ``repeated``: one key for all tokens, beta 1 and no decay: every write replaces the one before
    * ``zeros``: every third token has a zero key, and every fourth a zero query
    * ``extreme``: gates are 30 or -30
    * ``fast``: gates are 30 and a_log is 1: decay by e^-80 a token
    """
    pattern, (heads, value_heads), local = case.params.get("pattern"), _heads(case, rank), local_length(case, rank)
    members = group_members(case, rank)
    place, tokens = members.index(rank), (case["batch"], local)
    q, k = (draw.normal((*tokens, heads, case["key_depth"]), case.dtype) for _ in "qk")
    v = draw.normal((*tokens, value_heads, case["value_depth"]), case.dtype)
    gate = draw.normal((*tokens, value_heads), FP32)
    beta = torch.sigmoid(draw.normal((*tokens, value_heads), FP32, shift=-1.0))
    a_log = torch.linspace(-6.0, 0.0, value_heads, device=q.device)[draw.shared.permutation(value_heads)]
    dt_bias = draw.shared.normal((value_heads,), FP32, scale=0.5)
    if "length" in case.params:
        patient = draw.shared.permutation(value_heads)[: value_heads // 4]
        gate[..., patient] -= 12.0
        beta[..., patient] *= 0.02
    pairs, values = draw.shared.octaves((heads, case["key_depth"])), draw.shared.octaves((value_heads, case["value_depth"]))
    match pattern:
        case "carried":
            gate -= 12.0
            if place > 0:
                v.zero_()
                beta *= 0.02
        case "repeated":
            k = draw.shared.normal((case["batch"], 1, heads, case["key_depth"]), case.dtype).expand_as(k).contiguous()
            gate.fill_(-30.0)
            beta.fill_(1.0)
        case "zeros":
            k[:, 1::3] = 0.0
            q[:, 2::4] = 0.0
        case "extreme":
            gate = torch.copysign(torch.full_like(gate, 30.0), gate)
        case "fast":
            gate.fill_(30.0)
            a_log.fill_(1.0)
    own = slice(place * value_heads // len(members), (place + 1) * value_heads // len(members))
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    scalars = (x.to(case.dtype) for x in (gate, beta, a_log[own], dt_bias[own]))
    return (q / pairs.to(q.dtype), k * pairs.to(k.dtype), v * values.to(v.dtype), *scalars, group)


def _tokens(case: pc.Case, inputs: pc.Inputs, ranks: Sequence[int], work: torch.dtype) -> Callable[[slice], delta.Tokens]:
    """All heads of the sequence that the ranks' shards make up, in this order."""
    rows = [torch.cat([inputs[q][i] for q in ranks], dim=1) for i in range(5)]
    members = group_members(case, ranks[0])
    a_log, dt_bias = (torch.cat([inputs[q][i] for q in members]) for i in (5, 6))
    return lambda part: prepared(rows, a_log, dt_bias, part, work)


def _until(case: pc.Case, rank: int) -> tuple[list[int], int, int]:
    """The ranks whose tokens the rank's outputs depend on, and the range of its own tokens."""
    members = group_members(case, rank)
    place, local = members.index(rank), local_length(case, rank)
    return list(members[: place + 1]), place * local, (place + 1) * local


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    ranks, first, length = _until(case, rank)
    o, scale = delta.sized_delta_rule(_tokens(case, inputs, ranks, FP64), [inputs[q][2] for q in ranks], length, first=first)
    return pc.Expected("output", o.transpose(1, 2), case.dtype, magnitude=scale.transpose(1, 2))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """That of the delta rule; ten times as much for ``extreme`` gates in float32.

    Tokens that decay by e^-31 and tokens that do not decay follow each other there. The logarithms of a chunk's 64 tokens then add up to
    as much as 2000, where float32 numbers are 1.2e-4 apart, and sums that should be equal may differ by that, and weights as much.
    """
    if case.dtype == FP32 and case.params.get("pattern") == "extreme":
        return {"output": pc.Tolerance(relative=2 * pc.UNIT_ROUNDOFF[FP32], magnitude=3e-4, normwise=1.5e-4)}
    return delta.delta_tolerance(case)


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """Either tokens are exchanged for heads and back, or only the state is handed on, which may be rounded to the dtype; the less of both.

    Per token and head the state is read by the key and by the query, and written: 6 K V operations; a sequence of S tokens can do without
    a state for 2 S (K + V).
    """
    members, (heads, value_heads), local = group_members(case, rank), _heads(case, rank), local_length(case, rank)
    place, ranks, size = members.index(rank), len(members), case.dtype.itemsize
    key_depth, value_depth = case["key_depth"], case["value_depth"]
    tokens = case["batch"] * local
    moved = tokens * (2 * heads * key_depth + 2 * value_heads * value_depth + 2 * value_heads) * size
    exchanged = pc.traffic.all_to_all(moved, ranks)
    state = case["batch"] * value_heads * key_depth * value_depth * size
    operations = min(6 * key_depth * value_depth, 2 * local * ranks * (key_depth + value_depth))
    return pc.Cost(
        hbm_bytes=moved,
        egress_bytes=min(exchanged, state * (place < ranks - 1)),
        ingress_bytes=min(exchanged, state * (place > 0)),
        flops={FLOP_UNIT[case.dtype]: tokens * value_heads * operations},
    )


def _chunked(case: pc.Case, rank: int) -> pc.Steps:
    states, ranks = case["batch"] * _heads(case, rank)[1], len(group_members(case, rank))
    depths = case["key_depth"], case["value_depth"]
    return delta.chunked_steps(states, states * local_length(case, rank), cost(case, rank).hbm_bytes, ranks, depths, case.dtype)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"batch": 2, "local": 11, "heads": 1, "key_depth": 24, "value_depth": 40, **params})


PRESETS = (
    pc.preset(
        "small",
        "grouped value heads; a state that one rank writes, also long ago; one key; zero keys, queries; extreme and fast gates; groups",
        _small("plain_bf16", BF16),
        _small("plain_fp32", FP32),
        _small("two_value_heads_bf16", BF16, ratio=2, heads=3),
        _small("four_value_heads_fp32", FP32, ratio=4, heads=3),
        _small("carried_bf16", BF16, pattern="carried"),
        _small("carried_fp32", FP32, pattern="carried", local=17),
        _small("repeated_fp32", FP32, pattern="repeated"),
        _small("zeros_bf16", BF16, pattern="zeros"),
        _small("extreme_fp32", FP32, pattern="extreme"),
        _small("fast_bf16", BF16, pattern="fast"),
        _small("strided_group_bf16", BF16, ratio=2, heads=3, group="strided", world_sizes=(4, 8)),
        _small("carried_far_bf16", BF16, pattern="carried", local=41),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 64 tokens per rank, 6 heads rounded up to a multiple of W",
        pc.case("bf16", BF16, batch=1, local=64, heads=6, key_depth=256, value_depth=512),
    ),
    pc.preset(
        "production_qwen3_next_32k",
        "Qwen3-Next-80B-A3B: 16 query and 32 value heads of 128, 32768 tokens",
        pc.case("bf16", BF16, batch=1, length=32768, heads=16, ratio=2, key_depth=128, value_depth=128),
    ),
    pc.preset(
        "production_gated_deltanet_1b",
        "Gated DeltaNet 1.3B: 4 sequences of 16384 tokens, 8 heads of 256 and 512",
        pc.case("bf16", BF16, batch=4, length=16384, heads=8, key_depth=256, value_depth=512),
    ),
    pc.preset(
        "production_qwen3_next_256k",
        "Qwen3-Next-80B-A3B: 262144 tokens",
        pc.case("bf16", BF16, batch=1, length=262144, heads=16, ratio=2, key_depth=128, value_depth=128),
    ),
)


PROBLEM = pc.Problem(
    id=75,
    slug="gated_deltanet_ulysses_cp",
    title="Gated DeltaNet over a sharded sequence",
    category="context_parallel",
    parallelism=("context", "sequence"),
    origin="Gated DeltaNet in flash-linear-attention, Megatron-Core and Qwen3-Next: exchange of sequence for heads around a recurrence",
    summary=(
        "The rank holds tokens [r L, (r + 1) L) of all heads: q, k (B, L, H, K), v (B, L, H', V), gate and beta (B, L, H'); a_log, dt_bias "
        "(H' / W,) are those of value heads [r H' / W, (r + 1) H' / W). H and H' are multiples of W; value head j uses query head "
        "j // (H' / H). With q~ = q / max(|q|, 1e-6) / sqrt(K), k~ = k / max(|k|, 1e-6), d = exp(-exp(a_log) softplus(gate + dt_bias)) and "
        "a state M (K, V) that is zero at first, per head and in float32: M <- d_t M; u = beta_t (v_t - M^T k~_t); M <- M + k~_t u^T; "
        "o_t = M^T q~_t. Returns o for the rank's tokens, (B, L, H', V) in q's dtype."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    attainable=pc.Algorithm(
        "chunked delta rule, states handed on", "Yang et al., Gated Delta Networks, 2024; latencies within a chunk are left out", _chunked
    ),
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    process_groups=group_layout,
    notes=(
        "The public benchmark's decay is 0.47 on average: the state dies within a few tokens, and an answer without communication passes. "
        "Here decay is 0.5 to 0.998 by head, so that hundreds of tokens are remembered, and ten thousand by some heads in long "
        "sequences; errors are measured by the size of the state.",
        "The public reference goes token by token. Here it goes in chunks of 64 tokens, as Hugging Face's fallback does, which gives the "
        "same answer.",
    ),
    speed_note=(
        "The public one steps through the sequence token by token, with several launches for each; this one goes by chunks of 64, with "
        "matrix products."
    ),
)
