"""Problem 26: split sizes and per-expert counts of an expert-parallel dispatch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families import moe
from peerlane.problems.families.collective import FP32, INT64, all_gather_single, group_layout, group_members

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(expert_mask: torch.Tensor, num_experts: int, group: dist.ProcessGroup | None = None) -> Four:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    counts = expert_mask.sum(dim=(1, 2))
    gathered = counts.new_empty(ranks * num_experts)
    all_gather_single(gathered, counts, group=group)
    mine = gathered.view(ranks, ranks, num_experts // ranks)[:, rank]
    host = torch.cat([counts.view(ranks, -1), mine]).cpu()  # the only wait: all results travel together
    sent, received = host[:ranks], host[ranks:]
    return sent.sum(1).to(INT64), received.sum(1).to(INT64), received, received.sum(0)


def lists_accepted(returned: pc.Tree) -> pc.Tree:
    """The same, with split sizes that are lists of whole numbers made int64 tensors."""
    if not isinstance(returned, tuple) or len(returned) != 4:
        return returned
    return (*(_as_tensor(item) if isinstance(item, list) else item for item in returned[:2]), *returned[2:])


def _as_tensor(sizes: list[Any]) -> pc.Tree:
    whole = all(type(size) is int or (type(size) is float and size.is_integer()) for size in sizes)
    return torch.tensor(sizes, dtype=INT64) if whole else sizes


def _selection(case: pc.Case, rank: int, draw: pc.Draw) -> torch.Tensor:
    """Experts of every slot (T, k): distinct within a token unless ``case["replacement"]``.

    ``case["skew"]`` makes the popularity of experts differ between ranks too: by that many natural units, on average.
    """
    tokens, k = moe.tokens_of(case, rank), case["k"]
    popularity = moe.log_popularity(case, draw)
    popularity = popularity + draw.normal(popularity.shape, FP32, scale=case.params.get("skew", 0.0))
    if case.params.get("replacement"):
        return moe.draw_experts(case, draw, popularity.expand(tokens * k, -1), 1).view(tokens, k)
    return moe.draw_experts(case, draw, popularity.expand(tokens, -1), k)


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    permuted = bool(case.params.get("permuted"))
    mask = moe.expert_mask(_selection(case, rank, draw), case["experts"], case.dtype, permuted=permuted)
    return (mask, case["experts"], pc.GroupRef(case["group"]) if "group" in case.params else None)


def _counts(case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
    """Rows per member of the rank's group and expert, (P, E), int64."""
    return torch.stack([(inputs[q][0] != 0).sum((1, 2)) for q in group_members(case, rank)])


def metadata(counts: torch.Tensor, me: int, dtype: torch.dtype) -> Four:
    """The four results of the group's member ``me`` from all members' counts (P, E); the last two in the dtype of the mask's sum."""
    ranks = counts.shape[0]
    per_owner = counts.view(ranks, ranks, -1)
    received = per_owner[:, me].to(FP32 if dtype.is_floating_point else INT64)
    return per_owner[me].sum(-1), per_owner[:, me].sum(-1), received.clone(), received.sum(0)


def _metadata(case: pc.Case, inputs: pc.Inputs, rank: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Four:
    return metadata(change(_counts(case, inputs, rank)), group_members(case, rank).index(rank), case.dtype)


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[pc.Expected, ...]:
    results = _metadata(case, inputs, rank, lambda counts: counts)
    names = ("input_splits", "output_splits", "per_local_expert", "sum_local_expert")
    return tuple(pc.exactly(name, value, host=True) for name, value in zip(names, results, strict=True))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """The mask is read once; each peer needs the counts of its own experts alone, 4 bytes each."""
    ranks = len(group_members(case, rank))
    slots = case["experts"] * case["k"] * moe.tokens_of(case, rank)
    port = (ranks - 1) * (case["experts"] // ranks) * 4
    return pc.Cost(hbm_bytes=slots * case.dtype.itemsize, egress_bytes=port, ingress_bytes=port, flops={"fp32": slots})


def _one_pass(case: pc.Case, rank: int) -> pc.Steps:
    least = cost(case, rank)
    return (
        pc.step("pass over the mask", hbm=least.hbm_bytes, flops=least.flops),
        pc.step("exchange of counts", link=least.egress_bytes, barriers=1),
    )


def _from_counts(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[pc.AnswerContext], Four]:
    """A wrong answer: the right one for counts (P, E) changed by ``change(counts, me)``."""

    def answer(context: pc.AnswerContext) -> Four:
        return _metadata(context.case, context.inputs, context.rank, lambda counts: change(counts, context.place))

    return answer


def _balanced(counts: torch.Tensor, me: int) -> torch.Tensor:
    return counts.sum(1, keepdim=True).div(counts.shape[1], rounding_mode="floor").expand_as(counts)


def _interleaved(counts: torch.Tensor, me: int) -> torch.Tensor:
    """Expert e on rank e mod P."""
    ranks = counts.shape[0]
    return counts.view(ranks, -1, ranks).transpose(1, 2).reshape(ranks, -1)


def _one_off(context: pc.AnswerContext) -> pc.Tree:
    """One row too many: what a tolerance of a percent lets through."""
    results = [leaf.clone() for leaf in context.answer]
    for leaf in results:
        leaf.view(-1)[-1] += 1
    return tuple(results)


def _first_slot(context: pc.AnswerContext) -> Four:
    kept = [(args[0][:, :1], *args[1:]) for args in context.inputs]
    return _metadata(context.case, kept, context.rank, lambda counts: counts)


def _duplicates_merged(context: pc.AnswerContext) -> Four:
    merged = [(args[0].amax(1, keepdim=True), *args[1:]) for args in context.inputs]
    return _metadata(context.case, merged, context.rank, lambda counts: counts)


def _small(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    return pc.case(label, dtype, **{"tokens": (59, 83, 0, 71), "experts": 8, "k": 2, "exponent": 0.7, "skew": 0.5, **params})


PRESETS = (
    pc.preset(
        "small",
        "unequal and empty ranks, empty experts, one popular expert, duplicates, float, integer and bool masks, strides, groups",
        _small("skewed_int64", INT64),
        _small("skewed_fp32", FP32),
        _small("permuted_fp32", FP32, permuted=True),
        _small("duplicates_bool", torch.bool, k=3, replacement=True),
        _small("duplicates_permuted_fp32", FP32, k=3, replacement=True, permuted=True),
        _small("empty_experts_int64", INT64, empty=3, exponent=1.2),
        _small("empty_and_single_bool", torch.bool, tokens=(0, 1), experts=16, k=7),
        _small("one_expert_int64", INT64, k=1, exponent=100.0, skew=0.0),
        _small("wide_int32", torch.int32, experts=64, k=6),
        _small("strided_group_int64", INT64, group="strided", world_sizes=(4, 8)),
        _small("alone_int64", INT64, group="strided", world_sizes=(2,)),
        _small("public_fp32", FP32, tokens=997, k=2, replacement=True, permuted=True, variant="pkb"),
    ),
    pc.preset(
        "pkb",
        "the public benchmark's shape and strides, experts drawn without and with replacement",
        pc.case("fp32", FP32, tokens=1024, experts=8, k=2, exponent=0.3, permuted=True),
        pc.case("replacement_fp32", FP32, tokens=1024, experts=8, k=2, replacement=True, permuted=True),
        pc.case("public_fp32", FP32, tokens=1024, experts=8, k=2, replacement=True, permuted=True, variant="pkb"),
    ),
    pc.preset(
        "production_qwen3_235b",
        "8192 tokens, 8 of 128 experts, Zipf(0.8)",
        pc.case("int64", INT64, tokens=8192, experts=128, k=8, exponent=0.8, skew=0.3),
    ),
    pc.preset(
        "production_deepseek_v3",
        "4096 tokens, 8 of 256 experts out of 4 of 8 groups, Zipf(0.5)",
        pc.case("int64", INT64, tokens=4096, experts=256, k=8, exponent=0.5, skew=0.3, limit=(8, 4)),
    ),
    pc.preset(
        "production_qwen3_235b_prefill",
        "32768 tokens, 8 of 128 experts, Zipf(0.8)",
        pc.case("int64", INT64, tokens=32768, experts=128, k=8, exponent=0.8, skew=0.3),
    ),
    pc.preset(
        "production_mixtral",
        "16384 tokens, 2 of 8 experts, Zipf(0.3)",
        pc.case("fp32", FP32, tokens=16384, experts=8, k=2, exponent=0.3, skew=0.2),
        pc.case("popular_fp32", FP32, tokens=16384, experts=8, k=2, exponent=2.0, empty=2),
    ),
)


def _several(case: pc.Case) -> bool:
    return not (case.world_size == 2 and "group" in case.params)


def _excused() -> dict[str, str]:
    """Counts that another call may well share."""
    alone, single = "alone in its group, a rank sends k T rows to itself in every call", "one token's experts may be spread as before"
    splits = {
        "previous/{}@small/alone_int64": alone,
        "previous_mean/{}@small/alone_int64": alone,
        "previous/{}@small/empty_and_single_bool/w2": single,
    }
    popular = "all rows go to one expert, which may be the same as before"
    return {key.format(name): why for key, why in splits.items() for name in ("input_splits", "output_splits")} | {
        "previous@small/one_expert_int64": popular,
        "previous_mean/sum_local_expert@small/one_expert_int64/w8": popular,
    }


PROBLEM = pc.Problem(
    id=26,
    slug="moe_token_preprocess",
    title="Expert-parallel dispatch metadata",
    category="expert_parallel",
    parallelism=("expert",),
    origin="VeOmni and Megatron-LM: what a mixture-of-experts layer finds out before it sends its tokens",
    summary=(
        "expert_mask (E, k, T), any strides, is one where slot j of token t selects expert e; rank q of the group (P ranks; the world if "
        "None) holds experts [q E/P, (q+1) E/P). Four tensors in host memory: input_splits (P), int64, rows for every rank's experts; "
        "output_splits (P), int64, rows from every rank; rows by source and own expert (P, E/P); and their sum over sources (E/P). The "
        "last two are float32 for a float32 mask, and int64 for masks of integers or bool. A token that selects an expert twice counts "
        "twice; T may differ from rank to rank and be 0."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    attainable=pc.Algorithm(
        "one pass, then the counts", "the mask is read once; the copy of the results to the host is left out", _one_pass
    ),
    bandwidth="production_qwen3_235b_prefill",
    presets=PRESETS,
    known_wrong_answers=(
        pc.wrong(
            "own_counts", "the rank's own counts for every source", _from_counts(lambda counts, me: counts[me].expand_as(counts)), _several
        ),
        pc.wrong("balanced", "as if all experts were equally popular", _from_counts(_balanced)),
        pc.wrong("experts_interleaved", "expert e on rank e mod P", _from_counts(_interleaved), lambda c: c["experts"] > 8),
        pc.wrong("one_off", "one row too many", _one_off),
        pc.wrong(
            "splits_exchanged",
            "rows received for rows sent; two ranks may send each other as many",
            lambda c: (c.answer[1], c.answer[0], c.answer[2], c.answer[3]),
            lambda c: c.world_size > 2,
        ),
        pc.wrong("first_slot", "only the first of a token's experts", _first_slot, lambda c: c["k"] > 1),
        pc.wrong(
            "duplicates_merged",
            "an expert that a token selects twice counted once",
            _duplicates_merged,
            lambda c: bool(c.params.get("replacement")),
        ),
    ),
    excused=_excused(),
    variant_results={"pkb": lists_accepted},
    process_groups=group_layout,
    graph=False,
    graph_reason="the answer lies in host memory, so that a call ends by waiting for the device",
    notes=(
        "The public benchmark compares counts with a tolerance of a percent. Here they are exact.",
        "In the variant pkb, input_splits and output_splits may be lists of whole numbers too. It has the public mask alone.",
        "The public benchmark draws experts with replacement, which no router does, and about equally often. Here a token's experts are "
        "distinct, apart from the cases that say otherwise, and popularity follows Zipf's law in a new order for every call.",
        "A bfloat16 mask, which would round counts above 256, does not occur.",
    ),
)
