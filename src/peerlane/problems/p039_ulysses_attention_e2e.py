"""Problem 39: a Ulysses attention block: QKV projection, exchange, attention, exchange back, output projection."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import ulysses
from peerlane.problems.families.attention import attention
from peerlane.problems.families.collective import BF16, FP32, group_layout, group_members

FP64 = torch.float64


def reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    num_heads: int = 8,
    causal: bool = False,
) -> torch.Tensor:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return _block(hidden_states, w_qkv, w_o, group, num_heads, attend)


def legacy_reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    num_heads: int = 8,
    causal: bool = False,
) -> torch.Tensor:
    """The public semantics: in every position the heads of one rank attend to one another, and positions never meet."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return _block(hidden_states, w_qkv, w_o, group, num_heads, attend)


def _block(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    group: dist.ProcessGroup | None,
    num_heads: int,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``attend`` gets q, k, v and returns the context, all (B, S, h / W, D), for the whole sequence and the rank's heads."""
    qkv = _split(F.linear(hidden_states, w_qkv), num_heads)
    context = attend(*ulysses.exchange(qkv, 3, 1, group).unbind(2))
    return F.linear(ulysses.exchange(context, 1, 2, group).flatten(2), w_o)


def _split(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, 3 h D) as (B, S, 3, h, D)."""
    return qkv.view(*qkv.shape[:-1], 3, heads, qkv.shape[-1] // (3 * heads))


def _local_length(case: pc.Case) -> int:
    return int(case["local"] if "local" in case.params else case["length"] // case.world_size)


def _heads(case: pc.Case, rank: int) -> int:
    """Heads of the model: ``heads``, or ``heads_per_rank`` times the group's size."""
    ranks = len(group_members(case, rank))
    return int(case["heads"] if "heads" in case.params else case["heads_per_rank"] * ranks)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """N(0, 1) hidden states; weights equal on all ranks, that give values and outputs of unit scale and scores N(0, case["spread"]^2).

    So it is but for powers of two, which cancel bit for bit: channels of the hidden states, of every head's q and k, and of its values and
    results differ in size, so that none of them fits a code with one scale for neighbouring channels. In the public semantics, where heads
    meet, all heads' channels are of the same sizes.
    """
    heads, depth, hidden = _heads(case, rank), case["depth"], case["hidden"]
    width, spread = heads * depth, case.params.get("spread", 1.0)
    states = draw.shared.octaves((hidden,))
    pairs, values = (draw.shared.octaves((1 if case.variant == "pkb" else heads, depth)).expand(heads, depth).reshape(-1) for _ in "kv")
    hidden_states = draw.normal((case["batch"], _local_length(case), hidden), FP32) * states
    w_qkv = draw.shared.normal((3, width, hidden), FP32, scale=hidden**-0.5)
    w_qkv[:2].mul_(math.sqrt(spread))
    w_qkv *= torch.stack([pairs, 1 / pairs, values]).unsqueeze(-1) / states
    w_o = draw.shared.normal((case["out"], width), FP32, scale=width**-0.5) / values
    group = ulysses.group_argument(case)
    return hidden_states.to(case.dtype), w_qkv.flatten(0, 1).to(case.dtype), w_o.to(case.dtype), group, heads, case["causal"]


def _projected(case: pc.Case, inputs: pc.Inputs, rank: int, work: torch.dtype) -> torch.Tensor:
    """One rank's queries, keys and values (B, S_l, 3, h, D), in ``work``."""
    hidden_states, w_qkv = (tensor.to(work) for tensor in inputs[rank][:2])
    return _split(F.linear(hidden_states, w_qkv), _heads(case, rank))


def _visible(case: pc.Case, rank: int, causal: bool) -> list[int]:
    """The group's ranks whose keys the rank's queries see; under a causal mask the last of them is the rank itself."""
    members = list(group_members(case, rank))
    return members[: members.index(rank) + 1] if causal else members


def _context(
    case: pc.Case, inputs: pc.Inputs, rank: int, *, owners: Sequence[int], causal: bool, scale: float | None = None
) -> torch.Tensor:
    """Float64 attention (B, S_l, h, D) of the rank's queries to the owners' keys; under a causal mask the rank is the last owner."""
    q = _projected(case, inputs, rank, FP64)[:, :, 0]
    projected = [_projected(case, inputs, owner, FP64)[:, :, 1:] for owner in owners]
    k, v = torch.cat(projected, dim=1).unbind(2)
    value, _ = attention(q, k, v, scale=case["depth"] ** -0.5 if scale is None else scale, causal=causal)
    return value


def _among_heads(case: pc.Case, rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """(B, S, h, D) as (B S, h / W, W, D): the heads of a group take the place of positions, the groups that of heads."""
    groups = len(group_members(case, rank))
    split = tensor.view(*tensor.shape[:2], groups, tensor.shape[2] // groups, tensor.shape[3])
    return split.transpose(2, 3).flatten(0, 1)


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, hidden: torch.Tensor | None, rounded: torch.dtype | None = None
) -> torch.Tensor:
    """Attention at once in q's dtype, (B, S_q, h, D) to (B, S_k, h, D); ``hidden`` (S_q, S_k) marks pairs that do not count.

    ``rounded``: a dtype that probabilities are rounded to.
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    probabilities = torch.softmax(scores, dim=-1)
    if rounded is not None:
        probabilities = probabilities.to(rounded).to(q.dtype)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)


def _future(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Keys behind each query, where the queries are the last positions of the keys' sequence."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1 + keys - queries)


def _legacy_context(
    case: pc.Case, inputs: pc.Inputs, rank: int, *, causal: bool, work: torch.dtype, rounded: torch.dtype | None = None
) -> torch.Tensor:
    """The public semantics' context (B, S_l, h, D), in ``work``; with ``rounded``, rounded to that dtype before and inside attention."""
    qkv = _projected(case, inputs, rank, work)
    if rounded is not None:
        qkv = qkv.to(rounded).to(work)
    q, k, v = (_among_heads(case, rank, tensor) for tensor in qkv.unbind(2))
    hidden = _future(q.shape[1], q.shape[1], q.device) if causal else None
    context = _dense(q, k, v, scale=case["depth"] ** -0.5, hidden=hidden, rounded=rounded)
    return context.transpose(1, 2).reshape(qkv.shape[:2] + qkv.shape[3:])


def _output(inputs: pc.Inputs, rank: int, context: torch.Tensor) -> torch.Tensor:
    """The output projection, in the context's dtype."""
    return F.linear(context.flatten(2), inputs[rank][2].to(context.dtype))


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is the root mean square of each token's output."""
    causal = case["causal"]
    if case.variant == "pkb":
        context = _legacy_context(case, inputs, rank, causal=causal, work=FP64)
    else:
        context = _context(case, inputs, rank, owners=_visible(case, rank, causal), causal=causal)
    value = _output(inputs, rank, context)
    return pc.Expected("output", value, case.dtype, magnitude=value.square().mean(-1, keepdim=True).sqrt())


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """Errors relative to the norm of a token's output, and elementwise six times as much as an average element of it may have.

    In bfloat16 queries, keys, values, probabilities, context and output are rounded, 1.7e-3 normwise each; scores of deviation one then err
    by 2.4e-3, as their weights do relatively, and all together leave 4.5e-3. Twice that is allowed over many tokens, and five times for a
    token. In float32, 256 u for products in any order, and as much again times the spread of the scores, for their errors are the weights'.
    """
    spread = case.params.get("spread", 1.0)
    rowwise = 2.5e-2 if case.dtype == BF16 else 256 * pc.UNIT_ROUNDOFF[FP32] * (1 + spread)
    normwise = 1e-2 if case.dtype == BF16 and case["batch"] * _local_length(case) >= 16 else None
    size, u = "the root mean square of the element's row", pc.UNIT_ROUNDOFF[case.dtype]
    return {"output": pc.Tolerance(relative=2 * u, magnitude=6 * rowwise, normwise=normwise, rowwise=rowwise, size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """A rank sends and receives 3 (W - 1) / W of its projected tokens, and (W - 1) / W of its context.

    On two ranks, to gather all hidden states and to project keys and values twice takes less. What is stored between the stages is not
    counted, since they can be fused. In the public semantics nothing need travel.
    """
    members, size = group_members(case, rank), case.dtype.itemsize
    ranks, tokens, hidden, width = len(members), case["batch"] * _local_length(case), case["hidden"], _heads(case, rank) * case["depth"]
    if case.variant == "pkb":
        group = _heads(case, rank) // ranks
        pairs, port = tokens * group * ranks * group, 0.0
        pairs = tokens * ranks * group * (group + 1) // 2 if case["causal"] else pairs
    else:
        length = _local_length(case) * ranks
        positions = length * (length + 1) // 2 if case["causal"] else length**2
        pairs = case["batch"] * positions * _heads(case, rank) // ranks
        port = min(pc.traffic.all_to_all(4 * tokens * width, ranks), (ranks - 1) * tokens * hidden) * size
    return pc.Cost(
        hbm_bytes=(tokens * (hidden + case["out"]) + width * (3 * hidden + case["out"])) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={"fp32" if case.dtype == FP32 else "bf16": 2 * tokens * width * (3 * hidden + case["out"]) + 4 * case["depth"] * pairs},
    )


def _small(label: str, dtype: torch.dtype = BF16, *, causal: bool = False, **params: Any) -> pc.CaseSpec:
    return pc.case(
        label,
        dtype,
        variant=params.pop("variant", "default"),
        world_sizes=params.pop("world_sizes", None),
        causal=causal,
        **{"batch": 2, "local": 3, "heads_per_rank": 2, "depth": 32, "hidden": 32, "out": 24, **params},
    )


_PUBLIC: dict[str, Any] = {"batch": 16, "length": 16, "heads": 8, "depth": 64, "hidden": 512, "out": 512}

PRESETS = (
    pc.preset(
        "small",
        "causal and not, one token or one head per rank, an output narrower than the input, scores that overflow exp, a group",
        _small("full_bf16"),
        _small("causal_bf16", causal=True),
        _small("full_fp32", FP32),
        _small("causal_fp32", FP32, causal=True),
        _small("one_token_bf16", batch=4, local=1),
        _small("one_head_causal_bf16", causal=True, heads_per_rank=1, local=5),
        _small("large_scores_fp32", FP32, spread=60.0),
        _small("strided_group_bf16", causal=True, group="strided", world_sizes=(4, 8)),
        _small("public_full_bf16", variant="pkb"),
        _small("public_causal_fp32", FP32, causal=True, variant="pkb"),
        _small("public_one_head_bf16", heads_per_rank=1, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens over all ranks",
        pc.case("bf16", BF16, causal=False, **_PUBLIC),
        pc.case("public_bf16", BF16, causal=False, variant="pkb", **_PUBLIC),
    ),
    pc.preset(
        "production_llama2_7b_16k",
        "32 heads of 128, 16384 tokens, causal",
        pc.case("bf16", BF16, causal=True, batch=1, length=16384, heads=32, depth=128, hidden=4096, out=4096),
    ),
    pc.preset(
        "production_wan21_14b_480p",
        "video diffusion: 40 heads of 128, 32760 tokens, not causal",
        pc.case("bf16", BF16, causal=False, batch=1, length=32760, heads=40, depth=128, hidden=5120, out=5120),
    ),
    pc.preset(
        "production_hunyuan_video",
        "video diffusion: 24 heads of 128, 65536 tokens, not causal",
        pc.case("bf16", BF16, causal=False, batch=1, length=65536, heads=24, depth=128, hidden=3072, out=3072),
    ),
)


PROBLEM = pc.Problem(
    id=39,
    slug="ulysses_attention_e2e",
    title="Ulysses attention block: QKV projection, exchange, attention, exchange back, output projection",
    category="sequence_parallel",
    parallelism=("sequence",),
    origin="DeepSpeed-Ulysses' attention block, from the exchanges of VeOmni's sequence parallelism",
    summary=(
        "hidden_states (B, S/W, H) is the rank's part of a sequence that is sharded in rank order over the group (the world if None). "
        "[q | k | v] = hidden_states @ w_qkv^T, each num_heads x D wide, head by head; w_qkv (3 h D, H) and w_o (H_out, h D) are the same "
        "on all ranks. Every head's softmax(q k^T / sqrt(D)) v runs over all positions of the sequence, with causal over those up to the "
        "query's own. Returns the heads' results @ w_o^T for the rank's tokens, (B, S/W, H_out), in the input dtype, to which all stages "
        "may round. num_heads is a multiple of W."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=pc.FromProof(__name__, "KNOWN_WRONG_ANSWERS"),
    alternative_solutions=pc.FromProof(__name__, "ALTERNATIVE_SOLUTIONS"),
    variant_references={"pkb": legacy_reference},
    process_groups=group_layout,
    notes=(
        "The public reference attends over the wrong axis: after the exchange, the h/W heads of a rank attend to one another in every "
        "position, the causal mask lies over heads, tokens never meet, and no communication is needed. The default variant attends over "
        "the sequence; the variant pkb keeps the public semantics, with its exchanges in the reference and none in the cost.",
        "The public benchmark draws other weights on every rank, of variance 1, which makes scores so large that one key takes all. Here "
        "weights are the same on all ranks and scores have deviation one.",
        "A score matrix in bfloat16 and probabilities in bfloat16 are within the tolerance.",
    ),
)
