"""Problem 55: an attention layer with its heads sharded over one group and its sequence over another."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import attention, attention_block
from peerlane.problems.families.attention import Grid
from peerlane.problems.families.attention_block import Attend
from peerlane.problems.families.collective import BF16, FP32


def reference(
    hidden_states: torch.Tensor,
    w_qkv: torch.Tensor,
    w_o: torch.Tensor,
    num_heads: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    ranks = dist.get_world_size(tp_group)
    output = attention_block.attention_layer(hidden_states, w_qkv, w_o, num_heads // ranks, softmax_scale, causal, cp_group)
    if ranks > 1:
        dist.all_reduce(output, group=tp_group)
    return output


def _grid(case: pc.Case) -> Grid:
    """Tensor-parallel groups and rings. ``case``: ``tp``, the former's size or ``"world"``; ``inner``: ``tp`` or ``cp``."""
    return Grid.of(case, "tp", inner="tp")


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """With ``case["none"]`` a group that is the whole world is passed as None."""
    grid, least = _grid(case), 2 if case.params.get("none") else 1
    return {name: groups for name, groups in (("tensor", grid.along), ("context", grid.across)) if len(groups) >= least}


def _heads(case: pc.Case) -> int:
    return int(case["heads"] // _grid(case).sizes[0])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Weights of variance ``gain``^2 / fan-in, so that q and k are N(0, gain^2), but for the sizes of channels, outputs' too: see
    :func:`_attention_block.sized`, :func:`_attention_block.draw_hidden` and :func:`_attention_block.shift_scores`.

    ``case["pattern"]`` may also be ``cancelling``: heads of odd tensor-parallel ranks are those of the rank before, and so is their part of
    w_o with the opposite sign, but for noise of half its size.
    """
    tensor, context = _grid(case).lines(rank)
    share, place = tensor.index(rank), context.index(rank)
    hidden, width, gain = case["hidden"], _heads(case) * case["depth"], case.params.get("gain", 1.0)
    states, outputs = draw.shared.octaves((hidden,)), draw.shared.octaves((case["out"],))
    x = attention_block.draw_hidden(case, len(context), place, draw.shared, states)
    w_qkv = draw.shared.normal((len(tensor), 3 * width, hidden), case.dtype, scale=gain * hidden**-0.5)
    w_o = draw.shared.normal((len(tensor), case["out"], width), case.dtype, scale=(len(tensor) * width) ** -0.5)
    if case.params.get("pattern") == "cancelling":
        w_qkv[1::2] = w_qkv[0::2]
        w_o[1::2] = w_o[1::2] / 2 - w_o[0::2]
    attention_block.shift_scores(case, w_qkv, _heads(case))
    w_qkv, w_o = attention_block.sized(w_qkv, w_o, draw.shared, states=states, outputs=outputs)
    groups = process_groups(case)
    tp_group, cp_group = (pc.GroupRef(name) if name in groups else None for name in ("tensor", "context"))
    return x, w_qkv[share].clone(), w_o[share].clone(), case["heads"], case.params.get("scale"), case["causal"], tp_group, cp_group


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    tensor, context = _grid(case).lines(rank)
    xs, place = [inputs[q][0] for q in context], context.index(rank)
    parts = [(attention_block.attended(case, xs, inputs[q][1], _heads(case), place), inputs[q][2]) for q in tensor]
    value, size = attention_block.output_sized(parts)
    return pc.Expected("output", value, case.dtype, magnitude=size)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    return {"output": attention_block.layer_tolerance(case, 1, case.params.get("pattern") == "cancelling")}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The ring's bytes, and an all-reduce over the tensor-parallel group."""
    tensor, context = _grid(case).lines(rank)
    heads, ranks, size = _heads(case), len(tensor), case.dtype.itemsize
    tokens = case["batch"] * attention.local_length(case, len(context))
    reduction = pc.traffic.all_reduce(tokens * case["out"] * size, ranks)
    moved = attention_block.ring_bytes(case, heads, len(context)) + reduction
    return pc.Cost(
        hbm_bytes=(tokens * (case["hidden"] + case["out"]) + heads * case["depth"] * (3 * case["hidden"] + case["out"])) * size,
        egress_bytes=moved,
        ingress_bytes=moved,
        flops={"fp32" if case.dtype == FP32 else "bf16": attention_block.layer_flops(case, heads, len(context), case["out"])},
    )


def _partial(case: pc.Case, inputs: pc.Inputs, rank: int, ring: Sequence[int], attend: Attend) -> torch.Tensor:
    """A rank's part of the output, in float32: its queries, and the keys and values of ``ring``, each computed with its rank's weights."""
    blocks = [attention_block.narrow(case, [inputs[q][0]], inputs[q][1], _heads(case))[0] for q in ring]
    return attention_block.projected(attend(blocks, list(ring).index(rank)), inputs[rank][2])


def _layer(case: pc.Case, inputs: pc.Inputs, rank: int, attend: Attend) -> torch.Tensor:
    tensor, _ = _grid(case).lines(rank)
    return torch.stack([_partial(case, inputs, q, _grid(case).lines(q)[1], attend) for q in tensor]).sum(0).to(case.dtype)


def _rounded(case: pc.Case, inputs: pc.Inputs, rank: int, attend: Attend) -> torch.Tensor:
    """Every step rounded to the dtype, probabilities and the sum of the parts too."""
    return _summed(_rounded_parts(case, inputs, rank, attend))


def _rounded_parts(case: pc.Case, inputs: pc.Inputs, rank: int, attend: Attend) -> list[torch.Tensor]:
    """The summands of the rank's output, in the order of its tensor-parallel group, every step rounded to the dtype."""
    parts = []
    for q in _grid(case).lines(rank)[0]:
        context = _grid(case).lines(q)[1]
        blocks = attention_block.narrow(case, [inputs[p][0] for p in context], inputs[q][1], _heads(case), rounded=True)
        heads_out = attend(blocks, context.index(q))
        parts.append(attention_block.projected(heads_out, inputs[q][2]).to(case.dtype))
    return parts


def _summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


def _own_part(context: pc.AnswerContext, factor: int) -> torch.Tensor:
    """Without the all-reduce, times ``factor``."""
    ring = _grid(context.case).lines(context.rank)[1]
    part = _partial(context.case, context.inputs, context.rank, ring, attention_block.exact(context.case))
    return (factor * part).to(context.case.dtype)


def _groups_swapped(context: pc.AnswerContext) -> torch.Tensor:
    """The ring over the tensor-parallel group, and the sum over the context-parallel one."""
    case = context.case
    attend = attention_block.exact(case)
    summands = _grid(case).lines(context.rank)[1]
    return torch.stack([_partial(case, context.inputs, q, _grid(case).lines(q)[0], attend) for q in summands]).sum(0).to(case.dtype)


def _summed_over_world(context: pc.AnswerContext) -> torch.Tensor:
    """The sum over the tensor-parallel group, of all places' outputs."""
    members = _grid(context.case).lines(context.rank)[1]
    return torch.stack([context.answers[q].to(FP32) for q in members]).sum(0).to(context.case.dtype)


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    sizes = {"batch": 2, "local": 5, "heads": 8, "depth": 32, "hidden": 72, "out": 104, "gain": 1.0}
    return pc.case(label, dtype, **{**sizes, "causal": True, "tp": 2, **params})


def _llama(label: str, *, length: int, hidden: int, tp: int | str, world_sizes: Sequence[int]) -> pc.CaseSpec:
    """Multi-head attention of depth 128, as wide as the hidden states."""
    return pc.case(
        label,
        BF16,
        batch=1,
        length=length,
        heads=hidden // 128,
        depth=128,
        hidden=hidden,
        out=hidden,
        causal=True,
        tp=tp,
        world_sizes=world_sizes,
    )


PRESETS = (
    pc.preset(
        "small",
        "grids of groups in both orders, either group alone; causal and not; an attention sink; large and growing scores; cancelling parts",
        _small("causal_bf16"),
        _small("causal_fp32", FP32),
        _small("scaled_full_fp32", FP32, causal=False, scale=0.28),
        _small("scaled_full_bf16", causal=False, scale=0.28),
        _small("ring_alone_bf16", tp=1),
        _small("heads_alone_bf16", tp="world", none=True),
        _small("sink_bf16", pattern="sink"),
        _small("cancelling_bf16", pattern="cancelling"),
        _small("context_inner_bf16", inner="cp", world_sizes=(4, 8)),
        _small("context_inner_full_fp32", FP32, inner="cp", causal=False, world_sizes=(4, 8)),
        _small("large_bf16", pattern="large", heads=16),
        _small("growing_full_bf16", pattern="growing", causal=False, tp=1, heads=3),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens, two ranks share the heads",
        pc.case("bf16", BF16, batch=16, length=16, heads=8, depth=64, hidden=512, out=512, causal=True, tp=2),
    ),
    pc.preset(
        "production_llama2_7b_32k",
        "32768 tokens, causal; two ranks share the heads",
        _llama("bf16", length=32768, hidden=4096, tp=2, world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_llama3_70b_16k",
        "the width of Llama 3 70B, 16384 tokens, causal; W / 2 ranks share the heads",
        _llama("bf16", length=16384, hidden=8192, tp=4, world_sizes=(8,)),
        _llama("two_by_two_bf16", length=16384, hidden=8192, tp=2, world_sizes=(4,)),
    ),
    pc.preset(
        "production_llama3_70b_8k_heads",
        "the width of Llama 3 70B, 8192 tokens, causal; all ranks share the heads, and there is no ring",
        _llama("bf16", length=8192, hidden=8192, tp="world", world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_llama2_7b_16k_ring",
        "16384 tokens, causal; the ring alone",
        _llama("bf16", length=16384, hidden=4096, tp=1, world_sizes=(4, 8)),
    ),
    pc.preset(
        "production_llama2_7b_8k",
        "8192 tokens, causal; two ranks share the heads",
        _llama("bf16", length=8192, hidden=4096, tp=2, world_sizes=(4, 8)),
    ),
)


PROBLEM = pc.Problem(
    id=55,
    slug="ring_attention_tp",
    title="Attention layer: heads tensor-parallel, sequence in a ring",
    category="context_parallel",
    parallelism=("tensor", "context", "sequence"),
    origin="Megatron-LM attention layers under tensor and context parallelism, with zhuzilin/ring-flash-attention's ring",
    summary=(
        "hidden_states (B, S, H) is the rank's part of a sequence sharded in rank order over cp_group, equal on all ranks of a tp_group; "
        "w_qkv (3 h D, H) has the rows of Q, of K and of V for the rank's h = num_heads / tp heads, head by head, and w_o (H_out, h D) "
        "the columns that belong to them. Projects to q, k and v, attends over the whole sequence of cp_group as in problem 54, projects, "
        "and returns the sum over tp_group (B, S, H_out), in the dtype of the inputs. D = rows of w_qkv / (3 h); the softmax's scale is "
        "D^-0.5 if None. A group that is None is the world. Between the steps values may be rounded to the inputs' dtype or kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_llama2_7b_8k",
    presets=PRESETS,
    known_wrong_answers=(
        *attention_block.wrong_answers(
            _layer,
            ring=lambda c: _grid(c).sizes[1] > 1,
            unequal=lambda c: c.params.get("pattern") != "cancelling",
            several_heads=lambda c: _heads(c) > 1,
        ),
        pc.wrong("no_reduction", "the rank's own heads", lambda c: _own_part(c, 1), lambda c: _grid(c).sizes[0] > 1),
        pc.wrong(
            "own_part_times_ranks",
            "the rank's own heads times the size of tp_group",
            lambda c: _own_part(c, _grid(c.case).sizes[0]),
            lambda c: _grid(c).sizes[0] > 1,
        ),
        pc.wrong("groups_swapped", "the ring over tp_group and the sum over cp_group", _groups_swapped),
        pc.wrong("summed_over_world", "the sum over all ranks", _summed_over_world, lambda c: _grid(c).sizes[1] > 1),
    ),
    alternative_solutions=pc.alternatives(
        fp32_rounded_once=lambda case, inputs, rank: _layer(case, inputs, rank, attention_block.exact(case)),
        every_step_rounded=lambda case, inputs, rank: _rounded(case, inputs, rank, attention_block.blockwise(case)),
    ),
    excused={
        f"another_rank@{name}": "all ranks share one place of the sequence, and have the same answer"
        for name in pc.names_of(PRESETS, lambda c: _grid(c).sizes[1] == 1)
    },
    process_groups=process_groups,
    notes=(
        "The public benchmark's weights have standard deviation 0.02, which makes scores so small that attention is nearly a mean, and its "
        "outputs so small that an absolute tolerance decides. Here weights have variance 1 / fan-in or more.",
        "Outputs are equal on all ranks of a tp_group by definition; that their bits are is not checked.",
        "Groups in both orders occur, neighbouring ranks and strided ones, so that rank arithmetic in place of the groups fails. Groups "
        "whose ranks are not ascending do not occur. A group of one rank is passed as such, and so is one that is the whole world, but in "
        "small/heads_alone_bf16 as None.",
        "Leaving both groups None, the world as both at once, is legal in the public interface but models nothing, and does not occur.",
        "The 70B preset splits the heads over W / 2 ranks, and 32k tokens give 8192 per rank on 8 ranks and 16384 on 4.",
    ),
)
