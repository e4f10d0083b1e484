"""Problem 46: the vocabulary-parallel LM head in decoding: local logits with bias, then all-gather along the vocabulary."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families import matmul
from peerlane.problems.families.collective import all_gather_single
from peerlane.problems.families.matmul import ACCUMULATION, BF16, FP32, FP64

# Times the largest error of correct roundings.
_SLACK = 2.5


def reference(hidden_states: torch.Tensor, weight_shard: torch.Tensor, bias_shard: torch.Tensor) -> torch.Tensor:
    local = F.linear(hidden_states, weight_shard, bias_shard)
    tokens, shard = local.shape
    gathered = local.new_empty((dist.get_world_size() * tokens, shard))
    all_gather_single(gathered, local)
    return gathered.view(-1, tokens, shard).transpose(0, 1).flatten(1)


def _shard(case: pc.Case) -> int:
    """Vocabulary entries per rank: ``shard``, or its share of ``vocab``."""
    return int(case["shard"] if "shard" in case.params else case["vocab"] // case.world_size)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states equal on all ranks, weights that give logits of unit variance, N(0, 1) biases. ``case["pattern"]``:

    * ``outliers``: one channel in 16 of the hidden states is 100 times as large
    * ``large_bias``: biases 30 times as large
    * ``masked``: padding entries, the last third of the last rank's, have the bias -inf
    * ``nan_token``: the last token has a NaN
    """
    tokens, depth, shard, pattern = case["tokens"], case["hidden"], _shard(case), case.params.get("pattern")
    hidden = matmul.activations(case, rank, draw.shared, (tokens, depth), depth)
    weight = matmul.weights(case, draw, (shard, depth), depth)
    if draw.integer:
        return hidden, weight, draw.integers(-4, 5, (shard,), case.dtype)
    bias = draw.normal((shard,), case.dtype, scale=30.0 if pattern == "large_bias" else 1.0)
    if pattern == "masked" and rank == case.world_size - 1:
        bias[-(shard // 3) :] = float("-inf")
    elif pattern == "nan_token":
        hidden[-1, depth // 2] = float("nan")
    return hidden, weight, bias


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    """The magnitude is the product without bias, which may be rounded, plus |x| |w| weighted with the error of accumulation in float32."""
    weight_of_sum = ACCUMULATION / (_SLACK * pc.UNIT_ROUNDOFF[case.dtype])
    blocks, magnitudes = [], []
    for hidden, weight, bias in inputs:
        hidden, weight = hidden.to(FP64), weight.to(FP64).t()
        product = hidden @ weight
        blocks.append(product + bias.to(FP64))
        magnitudes.append(torch.addmm(product.abs_(), hidden.abs_(), weight.abs_(), alpha=weight_of_sum))
    return pc.Expected("logits", torch.cat(blocks, dim=1), case.dtype, magnitude=torch.cat(magnitudes, dim=1))


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """The product may be rounded, and the sum with the bias is: u of each at most, and two and a half times that allowed.

    Normwise, per token and over all, these roundings leave 2.4e-3 at most in bfloat16, if there are enough logits for an average.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    normwise = 6e-3 if case.dtype == BF16 and _shard(case) >= 64 else None
    size = "the absolute value of the product without bias"
    return {"logits": pc.Tolerance(relative=_SLACK * u, magnitude=_SLACK * u, normwise=normwise, rowwise=normwise, size=size)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The weights' shard is read once; every rank's logits reach every other rank."""
    tokens, depth, shard, world, size = case["tokens"], case["hidden"], _shard(case), case.world_size, case.dtype.itemsize
    port = (world - 1) * tokens * shard * size
    return pc.Cost(
        hbm_bytes=(shard * depth + shard + tokens * depth + world * tokens * shard) * size,
        egress_bytes=port,
        ingress_bytes=port,
        flops={matmul.FLOP_UNIT[case.dtype]: 2 * tokens * depth * shard},
    )


def _local(args: tuple[Any, ...], *, two_roundings: bool = False) -> torch.Tensor:
    """One rank's logits from a product in float32."""
    hidden, weight, bias = args
    product = torch.mm(hidden.to(FP32), weight.to(FP32).t())
    if two_roundings:
        return torch.add(product.to(hidden.dtype), bias)
    return torch.add(product, bias.to(FP32)).to(hidden.dtype)


def _logits(inputs: pc.Inputs, *, two_roundings: bool = False) -> torch.Tensor:
    return torch.cat([_local(args, two_roundings=two_roundings) for args in inputs], dim=1)


def _arranged(order: Callable[[list[torch.Tensor], int], torch.Tensor]) -> Callable[[pc.AnswerContext], torch.Tensor]:
    """The right logits of all ranks, put together in a wrong way: ``order(blocks, rank)``."""
    return lambda context: order(list(context.answer.chunk(context.case.world_size, dim=1)), context.rank)


def _bias_ignored(context: pc.AnswerContext) -> torch.Tensor:
    return _logits([(hidden, weight, torch.zeros_like(bias)) for hidden, weight, bias in context.inputs])


def _own_bias_everywhere(context: pc.AnswerContext) -> torch.Tensor:
    return _logits([(hidden, weight, context.args[2]) for hidden, weight, _ in context.inputs])


def _depth_cut(context: pc.AnswerContext) -> torch.Tensor:
    """Without the last of eight parts of the hidden dimension: a loop that forgets its tail."""
    kept = context.case["hidden"] * 7 // 8
    return _logits([(hidden[:, :kept], weight[:, :kept], bias) for hidden, weight, bias in context.inputs])


def _first_token_everywhere(context: pc.AnswerContext) -> pc.Tree:
    return context.answer[:1].expand_as(context.answer).contiguous()


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": 3, "hidden": 48, "shard": 17, **params})


PRESETS = (
    pc.preset(
        "small",
        "odd vocabularies, one token and several, outlier channels, large and -inf biases, a NaN token",
        _small("tokens_bf16", BF16),
        _small("tokens_fp32", FP32),
        _small("single_token_bf16", BF16, tokens=1),
        _small("odd_depth_bf16", BF16, hidden=51),
        _small("wide_bf16", BF16, shard=131),
        _small("outliers_bf16", BF16, pattern="outliers"),
        _small("large_bias_bf16", BF16, pattern="large_bias"),
        _small("masked_bf16", BF16, pattern="masked"),
        _small("nan_token_bf16", BF16, pattern="nan_token"),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("bf16", BF16, tokens=1, hidden=1024, shard=1024)),
    pc.preset(
        "production_llama3_70b", "one token, hidden 8192, vocabulary 128256", pc.case("bf16", BF16, tokens=1, hidden=8192, vocab=128256)
    ),
    pc.preset(
        "production_qwen3_235b", "16 tokens, hidden 4096, vocabulary 151936", pc.case("bf16", BF16, tokens=16, hidden=4096, vocab=151936)
    ),
    pc.preset(
        "production_deepseek_v3", "64 tokens, hidden 7168, vocabulary 129280", pc.case("bf16", BF16, tokens=64, hidden=7168, vocab=129280)
    ),
)

_SEVERAL_TOKENS = pc.where(lambda c: c["tokens"] > 1)

PROBLEM = pc.Problem(
    id=46,
    slug="gemv_decode",
    title="Vocabulary-parallel LM head for decoding: local logits and all-gather",
    category="vocab_parallel",
    parallelism=("vocabulary", "tensor"),
    origin="The vocabulary-parallel LM head of Megatron-LM (column-parallel linear with gathered output) and vLLM, in decoding",
    summary=(
        "hidden_states (T, H) is the same on all ranks, weight_shard (V/W, H) and bias_shard (V/W,) are the rank's part of the vocabulary. "
        "Every rank returns hidden_states @ weight^T + bias over the whole vocabulary in rank order, (T, V), contiguous, in the inputs' "
        "dtype with the same bits everywhere. The product may be rounded before the bias is added, or be kept wider."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "interleaved_vocabulary", "one entry of every rank in turn", _arranged(lambda blocks, rank: torch.stack(blocks, -1).flatten(1))
        ),
        pc.wrong(
            "rank_major",
            "the gathered memory as it comes: all tokens of the first rank first",
            _arranged(lambda blocks, rank: torch.cat(blocks).view(blocks[0].shape[0], -1)),
            _SEVERAL_TOKENS,
        ),
        pc.wrong("first_token_everywhere", "the first token's logits for all", _first_token_everywhere, _SEVERAL_TOKENS),
        pc.wrong("bias_ignored", "logits without bias", _bias_ignored),
        pc.wrong("own_bias_everywhere", "every shard with the rank's own bias", _own_bias_everywhere),
        pc.wrong("depth_cut", "the last eighth of the hidden dimension left out", _depth_cut),
    ),
    alternative_solutions=pc.alternatives(
        rounded_once=lambda case, inputs, rank: _logits(inputs),
        rounded_twice=lambda case, inputs, rank: _logits(inputs, two_roundings=True),
    ),
    excused={"another_rank": "all ranks have the same answer"},
    replicated=True,
    integer_exact=True,
    notes=(
        "The public benchmark has one token and a weight shard of 2 MB, which stays in cache, whatever the world size; production presets "
        "have whole vocabularies, divided by the world size. Its weights have variance 1. Here logits have, and biases matter.",
        "A token with a NaN is NaN in all of its logits and in no other token's.",
        "The order of logits that nearly tie is not part of the answer.",
    ),
)
