"""Problem 27: variable-split all-to-all of token rows."""

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, fitted, group_layout, group_members, neighbours


def reference(
    local_tensor: torch.Tensor,
    input_split_sizes: list[int] | torch.Tensor | None = None,
    output_split_sizes: list[int] | torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    rows = local_tensor.contiguous()
    if dist.get_world_size(group) == 1:
        return rows
    sent, received = split_list(input_split_sizes), split_list(output_split_sizes)
    result = rows.new_empty((rows.shape[0] if received is None else sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows, received, sent, group=group)
    return result


def split_list(sizes: list[int] | torch.Tensor | None) -> list[int] | None:
    """Split sizes as the list that the collective wants; a tensor of them must be one-dimensional (and costs a wait if on a GPU)."""
    if not isinstance(sizes, torch.Tensor):
        return sizes
    if sizes.dim() != 1:
        raise ValueError(f"split sizes have {sizes.dim()} axes: expected a one-dimensional tensor with an entry per rank of the group")
    converted: list[int] = sizes.tolist()
    return converted


def popularity(ranks: int, exponent: float) -> list[float]:
    """Zipf's law: the probability that a row goes to rank d is proportional to (d + 1) ** -exponent."""
    weights = [(rank + 1) ** -exponent for rank in range(ranks)]
    return [weight / sum(weights) for weight in weights]


def split_table(case: pc.Case, ranks: int, layout: random.Random) -> list[list[int]]:
    """Rows that every source (first index) sends to every destination in a group of ``ranks``. ``case["splits"]``:

    * none, equal: the same for every pair (none: and the arguments are left out)
    * uneven: 3, 5, 7 ... in random order: no two entries are closer than 2, so that no row of the table is an equal split
    * idle: uneven, but the first rank sends nothing and the second receives nothing
    * incast: all rows to the last rank
    * nothing: no rows at all
    * zipf: every row goes to a rank drawn by its popularity
    """
    match case["splits"]:
        case "none" | "equal":
            return [[case["rows"] // ranks] * ranks for _ in range(ranks)]
        case "uneven" | "idle":
            counts = iter(layout.sample(range(3, 2 * ranks * ranks + 3, 2), ranks * ranks))
            table = [[next(counts) for _ in range(ranks)] for _ in range(ranks)]
            if case["splits"] == "idle":
                table = [[0 if source == 0 or target == 1 else n for target, n in enumerate(row)] for source, row in enumerate(table)]
            return table
        case "incast":
            return [[0] * (ranks - 1) + [case["rows"]] for _ in range(ranks)]
        case "nothing":
            return [[0] * ranks for _ in range(ranks)]
        case "zipf":
            generator = torch.Generator().manual_seed(layout.getrandbits(62))
            weights = torch.tensor(popularity(ranks, case["exponent"]), dtype=torch.float64)
            targets = torch.multinomial(weights.expand(ranks, -1), case["rows"], replacement=True, generator=generator)
            return [row.bincount(minlength=ranks).tolist() for row in targets]
        case other:
            raise ValueError(f"unknown splits {other!r}")


def expected_table(case: pc.Case, ranks: int) -> list[list[float]]:
    """The mean of :func:`split_table` over slots; equal to it where nothing is random."""
    mean = ranks * ranks + 2
    match case["splits"]:
        case "uneven":
            return [[mean] * ranks for _ in range(ranks)]
        case "idle":
            return [[0 if source == 0 or target == 1 else mean for target in range(ranks)] for source in range(ranks)]
        case "zipf":
            return [[case["rows"] * share for share in popularity(ranks, case["exponent"])] for _ in range(ranks)]
        case _:
            return [list(map(float, row)) for row in split_table(case, ranks, random.Random(0))]


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    members = group_members(case, rank)
    me, table = members.index(rank), split_table(case, len(members), draw.layout)
    shape = (sum(table[me]), *case["row"])
    local_tensor = draw.bits(shape[::-1], case.dtype).t() if case.params.get("transposed") else draw.bits(shape, case.dtype)
    group = pc.GroupRef(case["group"]) if "group" in case.params else None
    if case["splits"] == "none":
        return (local_tensor, None, None, group)
    return (local_tensor, table[me], [row[me] for row in table], group)


def _parts(case: pc.Case, inputs: pc.Inputs, members: Sequence[int], index: int) -> list[torch.Tensor]:
    """What every member sends to the member ``index``, in the order of sources."""
    sizes = [args[1] or [args[0].shape[0] // len(members)] * len(members) for args in inputs]
    return [inputs[source][0].split(sizes[source])[index] for source in members]


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Expected:
    members = group_members(case, rank)
    return pc.exactly("received", torch.cat(_parts(case, inputs, members, members.index(rank))))


def cost(case: pc.Case, rank: int) -> pc.Cost:
    members = group_members(case, rank)
    me, table = members.index(rank), expected_table(case, len(members))
    row = torch.Size(case["row"]).numel() * case.dtype.itemsize
    sent, received = sum(table[me]), sum(line[me] for line in table)
    return pc.Cost(
        hbm_bytes=(sent + received) * row,
        egress_bytes=(sent - table[me][me]) * row,
        ingress_bytes=(received - table[me][me]) * row,
        typical=case["splits"] in ("uneven", "idle", "zipf"),
    )


def _equal_splits(context: pc.AnswerContext) -> torch.Tensor:
    chunks = [context.inputs[source][0].tensor_split(len(context.members))[context.place] for source in context.members]
    return fitted(torch.cat(chunks), len(context.answer))


def _own_offsets(context: pc.AnswerContext) -> torch.Tensor:
    offset = sum(context.args[1][: context.place])
    parts = [context.inputs[source][0][offset : offset + rows] for source, rows in zip(context.members, context.args[2], strict=True)]
    return fitted(torch.cat(parts), len(context.answer))


def _group_of(context: pc.AnswerContext, members: Sequence[int], index: int) -> torch.Tensor:
    return fitted(torch.cat(_parts(context.case, context.inputs, members, index)), len(context.answer))


def _world_rank(context: pc.AnswerContext) -> torch.Tensor:
    return _group_of(context, context.members, context.rank % len(context.members))


def _contiguous_group(context: pc.AnswerContext) -> torch.Tensor:
    return _group_of(context, neighbours(context), neighbours(context).index(context.rank))


_UNEVEN = pc.small_cases("uneven_bf16", "uneven_fp32", "uneven_int64", "transposed_bf16", "world_group_fp32", "strided_group_bf16")
PROBLEM = pc.Problem(
    id=27,
    slug="moe_all2all_primitive",
    title="Variable-split all-to-all of token rows",
    category="expert_parallel",
    parallelism=("expert",),
    origin="VeOmni and Megatron-LM: the all-to-all wrapper of their mixture-of-experts layers, forward",
    summary=(
        "Rows (axis 0) are cut in order by input_split_sizes, and part q goes to rank q of the group. The result is the parts received, "
        "in the order of the group's ranks, rows inside a part in their order: (sum(output_split_sizes), *rest), a bit copy. Entry q of "
        "output_split_sizes is what rank q's input_split_sizes says for this rank; zeros are legal. With both None, equal parts. With "
        "one rank in the group the input itself is returned."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    cost=cost,
    presets=(
        pc.preset(
            "small",
            "uneven, missing and empty splits, ranks that send or receive nothing, all rows to one rank, groups, odd rows",
            pc.case("uneven_bf16", BF16, splits="uneven", row=(3,)),
            pc.case("uneven_fp32", FP32, splits="uneven", row=(5,)),
            pc.case("uneven_int64", torch.int64, splits="uneven", row=(3,)),
            pc.case("transposed_bf16", BF16, splits="uneven", row=(3,), transposed=True),
            pc.case("idle_ranks_bf16", BF16, splits="idle", row=(3,)),
            pc.case("incast_fp32", FP32, splits="incast", rows=7, row=(3,)),
            pc.case("nothing_bf16", BF16, splits="nothing", row=(3,)),
            pc.case("no_splits_bf16", BF16, splits="none", rows=16, row=(3, 5)),
            pc.case("world_group_fp32", FP32, splits="uneven", row=(3,), group="world"),
            pc.case("strided_group_bf16", BF16, splits="uneven", row=(3,), group="strided", world_sizes=(4, 8)),
        ),
        pc.preset("pkb", "the public benchmark's shape and equal splits", pc.case("bf16", BF16, splits="equal", rows=1024, row=(1024,))),
        pc.preset(
            "production_deepseek_v3_ep",
            "4096 tokens x 8 experts, hidden 7168, Zipf(0.6)",
            pc.case("bf16", BF16, splits="zipf", exponent=0.6, rows=4096 * 8, row=(7168,)),
        ),
        pc.preset(
            "production_qwen3_235b_ep",
            "8192 tokens x 8 experts, hidden 4096, Zipf(0.6)",
            pc.case("bf16", BF16, splits="zipf", exponent=0.6, rows=8192 * 8, row=(4096,)),
        ),
        pc.preset(
            "production_deepseek_v3_decode_ep",
            "128 tokens x 8 experts, hidden 7168, Zipf(1): latency",
            pc.case("bf16", BF16, splits="zipf", exponent=1.0, rows=128 * 8, row=(7168,)),
        ),
    ),
    known_wrong_answers=(
        pc.wrong("equal_splits", "rows cut equally, whatever the splits say", _equal_splits, _UNEVEN),
        pc.wrong("own_offsets", "every source read at this rank's own offset", _own_offsets, _UNEVEN),
        pc.wrong("world_rank_as_index", "the part for the world rank's number", _world_rank, ("small/strided_group_bf16",)),
        pc.wrong("contiguous_group", "neighbours taken for the group", _contiguous_group, ("small/strided_group_bf16",)),
    ),
    process_groups=group_layout,
    notes=(
        "The public benchmark only has equal splits, which makes it problem 8. Here splits differ for every pair of ranks and slot, and "
        "there are idle ranks, all rows to one rank, and groups smaller than the world.",
        "The public signature allows tensors of split sizes, but its reference rejects them. Here a one-dimensional integer tensor is "
        "accepted too. Inputs always hold lists.",
        "Process groups list ranks in ascending order, since torch sorts them; a strided group makes a rank's number there another one.",
        "Where splits are drawn, the cost is that of their mean over slots. Lower ranks are the more popular ones in Zipf's law.",
    ),
)
