"""Problem 56: attention layers as stages of a pipeline, each with its sequence in a ring."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    cp_group: dist.ProcessGroup | None = None,
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    stage, stages = (0, 1) if pp_group is None else (dist.get_rank(pp_group), dist.get_world_size(pp_group))
    stage_input = hidden_states
    if stage > 0:
        stage_input = torch.empty_like(hidden_states)
        dist.recv(stage_input, group=pp_group, group_src=stage - 1)
    output = attention_block.attention_layer(stage_input, w_qkv, w_o, num_heads, softmax_scale, causal, cp_group)
    if stage + 1 < stages:
        dist.send(output, group=pp_group, group_dst=stage + 1)
    return output


def _grid(case: pc.Case) -> Grid:
    """Pipelines and rings. ``case``: ``pp``, the stages of a pipeline or ``"world"``; ``inner``: ``pp`` or ``cp``."""
    return Grid.of(case, "pp", inner="cp")


def process_groups(case: pc.Case) -> pc.GroupLayout:
    """With a single stage both groups are None: no pipeline, and the ring is the world."""
    return {} if case["pp"] == 1 else {"pipeline": _grid(case).along, "context": _grid(case).across}


def _first_inputs(case: pc.Case, inputs: pc.Inputs, ring: Sequence[int]) -> list[torch.Tensor]:
    """What the first stage finds at the places of these ranks."""
    return [inputs[_grid(case).lines(q)[0][0]][0] for q in ring]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """Weights of variance ``gain``^2 / fan-in (gain 1 for w_o), but for the sizes of channels, those of hidden states the same in all
    stages: see :func:`_attention_block.sized`, :func:`_attention_block.draw_hidden` and, for the first stage alone,
    :func:`_attention_block.shift_scores`.

    Stages after the first, which must ignore hidden_states, find numbers of the same kind there, or NaN if ``case["stale"]`` is ``nan``.
    ``case["pattern"]`` may also be ``stage_scale``: even stages' outputs are 100 times as large, and odd stages' w_qkv as much smaller.
    """
    pipeline, ring = _grid(case).lines(rank)
    stage, place = pipeline.index(rank), ring.index(rank)
    hidden, width = case["hidden"], case["heads"] * case["depth"]
    states = draw.shared.octaves((hidden,), most=6)
    x = attention_block.draw_hidden(case, len(ring), place, draw.shared, states)
    w_qkv = draw.shared.normal((len(pipeline), 3 * width, hidden), case.dtype, scale=case.params.get("gain", 1.0) * hidden**-0.5)[stage]
    w_o = draw.shared.normal((len(pipeline), hidden, width), case.dtype, scale=width**-0.5)[stage]
    if stage == 0:
        attention_block.shift_scores(case, w_qkv, case["heads"])
    w_qkv, w_o = attention_block.sized(w_qkv, w_o, draw.shared, states=states, outputs=states)
    if case.params.get("pattern") == "stage_scale":
        w_qkv, w_o = (w_qkv / 100, w_o) if stage % 2 else (w_qkv, w_o * 100)
    if stage > 0:
        x = torch.full_like(x, math.nan) if case.params.get("stale") == "nan" else draw.normal(x.shape, case.dtype) * states.to(x.dtype)
    groups = process_groups(case)
    cp_group, pp_group = (pc.GroupRef(name) if name in groups else None for name in ("context", "pipeline"))
    return x, w_qkv.clone(), w_o.clone(), case["heads"], case.params.get("scale"), case["causal"], cp_group, pp_group


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """Earlier stages in float64 too, at all places that the rank's queries see."""
    pipeline, ring = _grid(case).lines(rank)
    seen = attention.visible(ring.index(rank), len(ring), case["causal"])
    xs = _first_inputs(case, inputs, [ring[place] for place in seen])
    for member in pipeline[: pipeline.index(rank)]:
        heads_outs = [attention_block.attended(case, xs, inputs[member][1], case["heads"], place) for place in range(len(xs))]
        xs = [attention_block.wide_product(heads_out, inputs[member][2]) for heads_out in heads_outs]
    # Under a causal mask the rank's own place is the last of those it sees.
    heads_out = attention_block.attended(case, xs, inputs[rank][1], case["heads"], ring.index(rank))
    value, size = attention_block.output_sized([(heads_out, inputs[rank][2])])
    return pc.Expected("output", value, case.dtype, magnitude=size)


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """That of as many layers as there are stages; a stage's own tolerance would be tighter before the last one."""
    return {"output": attention_block.layer_tolerance(case, _grid(case).sizes[0], cancels=False)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The ring's bytes; the stage's input from the stage before and its output to the next."""
    pipeline, ring = _grid(case).lines(rank)
    stage, size = pipeline.index(rank), case.dtype.itemsize
    heads, hidden = case["heads"], case["hidden"]
    tokens = case["batch"] * attention.local_length(case, len(ring))
    activations = tokens * hidden * size
    moved = attention_block.ring_bytes(case, heads, len(ring))
    return pc.Cost(
        hbm_bytes=2 * activations + 4 * heads * case["depth"] * hidden * size,
        egress_bytes=moved + activations * (stage + 1 < len(pipeline)),
        ingress_bytes=moved + activations * (stage > 0),
        flops={"fp32" if case.dtype == FP32 else "bf16": attention_block.layer_flops(case, heads, len(ring), hidden)},
    )


def _stage(
    case: pc.Case, args: tuple[Any, ...], xs: Sequence[torch.Tensor], place: int, attend: Attend, *, rounded: bool = False
) -> torch.Tensor:
    """One stage's output at one place, in the dtype; steps within it in float32, or rounded."""
    blocks = attention_block.narrow(case, xs, args[1], case["heads"], rounded=rounded)
    return attention_block.projected(attend(blocks, place), args[2]).to(case.dtype)


def _pipeline(
    case: pc.Case,
    inputs: pc.Inputs,
    rank: int,
    attend: Attend,
    *,
    rounded: bool = False,
    shift: int = 0,
    last: int | None = None,
    sent: Callable[[torch.Tensor], torch.Tensor] = lambda activations: activations,
) -> torch.Tensor:
    """The output of the rank's stage, or of stage ``last``; activations come from ``shift`` places further along the ring, as what
    ``sent`` makes of them."""
    pipeline, ring = _grid(case).lines(rank)
    stage = pipeline.index(rank) if last is None else last
    xs = _first_inputs(case, inputs, ring)
    for member in pipeline[:stage]:
        outputs = [_stage(case, inputs[member], xs, place, attend, rounded=rounded) for place in range(len(ring))]
        xs = [sent(outputs[(place + shift) % len(ring)]) for place in range(len(ring))]
    return _stage(case, inputs[pipeline[stage]], xs, ring.index(rank), attend, rounded=rounded)


def _own_hidden_states(context: pc.AnswerContext) -> torch.Tensor:
    case, ring = context.case, _grid(context.case).lines(context.rank)[1]
    xs = [context.inputs[q][0] for q in ring]
    return _stage(case, context.args, xs, ring.index(context.rank), attention_block.exact(case))


def _first_input(context: pc.AnswerContext) -> torch.Tensor:
    case, ring = context.case, _grid(context.case).lines(context.rank)[1]
    xs = _first_inputs(case, context.inputs, ring)
    return _stage(case, context.args, xs, ring.index(context.rank), attention_block.exact(case))


def _last_stage(context: pc.AnswerContext) -> torch.Tensor:
    return _pipeline(context.case, context.inputs, context.rank, attention_block.exact(context.case), last=_grid(context.case).sizes[0] - 1)


def _residual(context: pc.AnswerContext) -> pc.Tree:
    """The right layer's output added to its input, in the first stage; later ones as they should be."""
    first_stage = context.rank == _grid(context.case).lines(context.rank)[0][0]
    return context.answer + context.args[0] if first_stage else context.answer


def _small(label: str, dtype: torch.dtype = BF16, **params: Any) -> pc.CaseSpec:
    sizes = {"batch": 2, "local": 5, "heads": 2, "depth": 32, "hidden": 104, "gain": 1.0}
    return pc.case(label, dtype, **{**sizes, "causal": True, "pp": 2, **params})


def _llama(*, batch: int, length: int, hidden: int, pp: int) -> pc.CaseSpec:
    """Multi-head attention of depth 128, as wide as the hidden states."""
    return pc.case(
        "bf16", BF16, batch=batch, length=length, heads=hidden // 128, depth=128, hidden=hidden, causal=True, pp=pp, world_sizes=(4, 8)
    )


PRESETS = (
    pc.preset(
        "small",
        "two and more stages, or none; rings of neighbours and strided ones; ignored NaN; a sink; large and growing scores",
        _small("causal_bf16", stale="nan"),
        _small("causal_fp32", FP32),
        _small("scaled_full_fp32", FP32, causal=False, scale=0.28, stale="nan"),
        _small("scaled_full_bf16", causal=False, scale=0.36),
        _small("ring_alone_bf16", pp=1),
        _small("chain_bf16", pp="world"),
        _small("stage_scale_bf16", pattern="stage_scale"),
        _small("sink_bf16", pattern="sink"),
        _small("pipeline_inner_bf16", inner="pp", world_sizes=(4, 8)),
        _small("nan_last_bf16", pattern="nan_last", world_sizes=(4, 8)),
        _small("large_bf16", pattern="large", heads=3),
        _small("growing_full_bf16", pattern="growing", causal=False, pp=1, heads=4),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape: 16 tokens, two stages",
        pc.case("bf16", BF16, batch=16, length=16, heads=8, depth=64, hidden=512, causal=True, pp=2),
    ),
    pc.preset("production_llama2_7b_16k", "two stages, 16384 tokens, causal", _llama(batch=1, length=16384, hidden=4096, pp=2)),
    pc.preset(
        "production_llama2_7b_batched",
        "four stages, 4 sequences of 4096 tokens, causal: the batch can be split into micro-batches",
        _llama(batch=4, length=4096, hidden=4096, pp=4),
    ),
    pc.preset(
        "production_llama3_70b_8k",
        "the width of Llama 3 70B, two stages, 8192 tokens, causal",
        _llama(batch=1, length=8192, hidden=8192, pp=2),
    ),
    pc.preset("production_llama2_7b_8k", "two stages, 8192 tokens, causal", _llama(batch=1, length=8192, hidden=4096, pp=2)),
)


def _needs_ring(case: pc.Case) -> bool:
    """Where no_ring is wrong: of two places with the last one NaN, the first needs no other."""
    return _grid(case).sizes[1] > (2 if case.params.get("pattern") == "nan_last" else 1)


_STAGED = pc.where(lambda c: _grid(c).sizes[0] > 1)

PROBLEM = pc.Problem(
    id=56,
    slug="ring_attention_pp",
    title="Pipeline of attention layers, each over a ring",
    category="pipeline_parallel",
    parallelism=("pipeline", "context", "sequence"),
    origin="Megatron-LM pipeline parallelism, with the ring of zhuzilin/ring-flash-attention in every stage",
    summary=(
        "A stage is the rank's place in pp_group (a single stage if None). The first stage's input is hidden_states (B, S, H), its part "
        "of a sequence sharded in rank order over cp_group (the world if None); that of a later stage is the output of the stage before, "
        "at the same place of the sequence, and its hidden_states give shape and dtype only. Every stage projects with its w_qkv (3 h D, "
        "H: the rows of Q, of K and of V, head by head), attends over the whole sequence as in problem 54, projects with its w_o (H, h D), "
        "and returns its own output (B, S, H). The softmax's scale is D^-0.5 if None. No residual, norm or bias. Between the steps of a "
        "stage values may be rounded to the inputs' dtype or kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    bandwidth="production_llama2_7b_8k",
    presets=PRESETS,
    known_wrong_answers=(
        *attention_block.wrong_answers(_pipeline, ring=_needs_ring),
        pc.wrong("own_hidden_states", "the stage applied to its own hidden_states", _own_hidden_states, _STAGED),
        pc.wrong("stages_skipped", "the stage applied to the first stage's input", _first_input, _STAGED),
        pc.wrong("last_stage", "the last stage's output on every stage", _last_stage, _STAGED),
        pc.wrong(
            "neighbours_activations",
            "activations received from the next place of the ring",
            lambda c: _pipeline(c.case, c.inputs, c.rank, attention_block.exact(c.case), shift=1),
            lambda c: c["causal"] and min(_grid(c).sizes) > 1,
        ),
        pc.wrong("residual", "the first stage's input added to its output", _residual, lambda c: c.params.get("pattern") != "stage_scale"),
    ),
    alternative_solutions=pc.alternatives(
        fp32_steps=lambda case, inputs, rank: _pipeline(case, inputs, rank, attention_block.exact(case)),
        every_step_rounded=lambda case, inputs, rank: _pipeline(case, inputs, rank, attention_block.blockwise(case), rounded=True),
    ),
    process_groups=process_groups,
    notes=(
        "The public benchmark's weights have standard deviation 0.02, so that the second stage's outputs are of the size of its absolute "
        "tolerance. Here weights have variance 1 / fan-in or more, and nothing is compared with an absolute tolerance.",
        "In the public benchmark hidden_states of later stages equal the first stage's input. Here they are other numbers, or NaN.",
        "NaN fills the last rank's tokens only, under a causal mask, for the reason that problem 54 gives.",
        "Float64 takes the answer through all stages; roundings of earlier stages are part of the tolerance.",
        "The outputs of middle stages are returned too, as in the public benchmark. A good solution may cut the batch, or the queries, "
        "into parts that follow each other through the stages.",
    ),
)
