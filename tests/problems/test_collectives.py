"""What the contract test cannot see in problems 2 to 8, 27 and 36: layout rules element by element, groups, roots and costs."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peerlane import problems
from peerlane.errors import UnknownPreset
from peerlane.evaluate.plan import presets_of
from peerlane.problems.contract import Case, same_bits
from peerlane.problems.families.ulysses import kept_length
from peerlane.problems.p027_moe_all2all_primitive import expected_table, popularity, split_list, split_table
from problem_cases import arguments, costs, members, oracles
from ranks.pool import RankPool

NUMBERS = (2, 3, 4, 5, 6, 7, 8, 27, 36)


@pytest.mark.parametrize(
    ("number", "busiest_port_bytes"),
    # Payload of the public shapes on 8 ranks: 2 MiB per rank in 2 to 8 and 27, 256 KiB in 36.
    [
        (2, 7 * 2**21), (3, 2**21), (4, 2**21), (5, 7 * 2**21), (6, 7 * 2**21), (7, 7 * 2**21), (8, 7 * 2**21), (27, 7 * 2**18),
        (36, 7 * 2**16 // 2),
    ],
)  # fmt: skip
def test_cost_of_the_public_shapes_on_eight_ranks(number: int, busiest_port_bytes: int) -> None:
    assert max(max(cost.egress_bytes, cost.ingress_bytes) for cost in costs(number, "pkb")) == pytest.approx(busiest_port_bytes)


@pytest.mark.parametrize("number", [2, 4, 6, 7, 8, 27, 36])  # in 3 and 5 only the root's argument is read
@pytest.mark.parametrize("world_size", [2, 4])
def test_compulsory_traffic_is_that_of_the_tensors(number: int, world_size: int) -> None:
    """Problems that read all of their input and write all of their output: device memory traffic from the arguments and the answer."""
    problem = problems.get(number)
    for case in problem.cases("small", world_size):
        if case.params.get("root") == "any" or case.params.get("unpadded", (0, 0))[1] or case.params.get("splits") in ("uneven", "idle"):
            continue  # traffic differs between slots, or padding is not read
        inputs = arguments(case)
        for rank, expected in enumerate(oracles(case, inputs)):
            alias = number == 6 and expected.value.shape == inputs[rank][0].shape
            written = 0 if alias else expected.value.numel()
            assert problem.cost(case, rank).hbm_bytes == pytest.approx((inputs[rank][0].numel() + written) * case.dtype.itemsize), case.key


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_slot_keeps_its_layout_when_contents_change(number: int, world_size: int) -> None:
    for case in problems.get(number).cases("small", world_size):
        for first, second in zip(arguments(case), arguments(case, block=1), strict=True):
            assert first[0].shape == second[0].shape and first[1:] == second[1:]


def test_roots_change_between_slots() -> None:
    for number, label in ((3, "odd_bytes_uint8"), (4, "cancelling_bf16"), (5, "scalar_int64"), (6, "odd_bytes_uint8")):
        case = problems.get(number).case("small", label, 4)
        roots = set()
        for slot in range(16):
            (root,) = {args[1] for args in arguments(case, slot=slot)}
            roots.add(root)
        assert roots == {0, 1, 2, 3}, number


def test_root_left_out_where_the_public_benchmark_leaves_it_out() -> None:
    given = {number: len(arguments(problems.get(number).cases("pkb", 2)[0])[0]) for number in (3, 4, 6)}
    assert given == {3: 1, 4: 2, 6: 1}


# Problem 27


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_rows_come_in_source_order_and_keep_their_order(world_size: int) -> None:
    for case in problems.get(27).cases("small", world_size):
        inputs = arguments(case)
        for rank, expected in enumerate(oracles(case, inputs)):
            group = members(case, rank)
            me = group.index(rank)
            rows = []
            for number, source in enumerate(group):
                tensor, sent, _, _ = inputs[source]
                sent = sent or [len(tensor) // len(group)] * len(group)
                assert sum(sent) == len(tensor)
                if inputs[rank][2] is not None:
                    assert inputs[rank][2][number] == sent[me]
                rows.append(tensor[sum(sent[:me]) : sum(sent[: me + 1])])
            want = torch.cat(rows)
            assert expected.value.shape == want.shape and same_bits(expected.value, want), case.key


@pytest.mark.parametrize(
    ("splits", "params"), [("uneven", {}), ("idle", {}), ("incast", {"rows": 7}), ("zipf", {"rows": 4096, "exponent": 0.6})]
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_expected_splits_are_the_mean_over_slots(splits: str, params: dict[str, Any], ranks: int) -> None:
    case = Case(27, "small", "any", ranks, torch.bfloat16, params={"splits": splits, "row": (3,), **params})
    slots = 200
    total = torch.zeros(ranks, ranks, dtype=torch.float64)
    for slot in range(slots):
        total += torch.tensor(split_table(case, ranks, random.Random(slot)), dtype=torch.float64)
    want = torch.tensor(expected_table(case, ranks), dtype=torch.float64)
    # The entries' standard deviation is at most 0.6 of their mean, so that of the mean over 200 slots is below 5 %.
    assert torch.allclose(total / slots, want, rtol=0.2, atol=0.0)


def test_zipf_popularity() -> None:
    shares = popularity(4, 1.0)
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_uneven_splits_have_no_equal_entries(ranks: int) -> None:
    case = Case(27, "small", "any", ranks, torch.bfloat16, params={"splits": "uneven", "row": (3,)})
    entries = sorted(itertools.chain(*split_table(case, ranks, random.Random(5))))
    assert all(b - a >= 2 for a, b in itertools.pairwise(entries)) and entries[0] > 1


def test_split_sizes_may_be_a_vector_but_not_a_matrix() -> None:
    assert split_list(None) is None
    assert split_list([2, 0]) == [2, 0]
    assert split_list(torch.tensor([2, 0], dtype=torch.int32)) == [2, 0]
    with pytest.raises(ValueError, match="2 axes: expected a one-dimensional"):
        split_list(torch.tensor([[2, 0]]))


def exchange_with_tensor_splits(rank: int, world_size: int) -> list[list[float]]:
    sent = [[2, 3], [1, 4]]
    rows = torch.arange(5.0).unsqueeze(1) + 10 * rank
    result = problems.get(27).reference(rows, torch.tensor(sent[rank]), torch.tensor([row[rank] for row in sent]))
    return result.squeeze(1).tolist()


def groups_of_one(rank: int, world_size: int) -> tuple[bool, bool]:
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    x = torch.randn(3, 2)
    moved = problems.get(36).reference(x, 0, 1, alone)
    return problems.get(27).reference(x, [9], [9], alone) is x, torch.equal(moved, x) and moved.data_ptr() != x.data_ptr()


def test_reference_takes_tensor_splits(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2).run(exchange_with_tensor_splits) == [[0, 1, 10], [2, 3, 4, 11, 12, 13, 14]]


def test_groups_of_one_rank(rank_pool: Callable[[int], RankPool]) -> None:
    """27 returns its input itself, whatever the splits say; 36 returns a copy."""
    assert rank_pool(2).run(groups_of_one) == [(True, True), (True, True)]


# Problem 36


def index_by_index(case: Case, inputs: list[tuple[Any, ...]], members: list[int], me: int) -> torch.Tensor:
    """The definition, one (position, head) pair at a time."""
    x, seq_dim, head_dim, _, true_length = inputs[members[me]]
    ranks = len(members)
    local, heads = x.size(seq_dim), x.size(head_dim) // ranks
    length = local * ranks
    if true_length != 0 and true_length % ranks != 0:
        length = true_length
    shape = list(x.shape)
    shape[seq_dim], shape[head_dim] = length, heads
    out = torch.zeros(shape, dtype=x.dtype)
    for position, head in itertools.product(range(length), range(heads)):
        source = inputs[members[position // local]][0].select(seq_dim, position % local)
        source = source.select(head_dim - (head_dim > seq_dim), me * heads + head)
        out.select(seq_dim, position).select(head_dim - (head_dim > seq_dim), head).copy_(source)
    return out


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_exchange_index_by_index(world_size: int) -> None:
    for case in problems.get(36).cases("small", world_size):
        inputs = arguments(case)
        for rank, expected in enumerate(oracles(case, inputs)):
            group = members(case, rank)
            want = index_by_index(case, inputs, group, group.index(rank))
            assert expected.value.shape == want.shape and same_bits(expected.value, want), case.key


@pytest.mark.parametrize(
    ("whole", "true_length", "ranks", "kept"),
    [(6, 0, 2, 6), (6, 5, 2, 5), (6, 4, 2, 6), (6, 1, 2, 1), (12, 11, 4, 11), (12, 8, 4, 12), (12, 7, 4, 7), (6, 6, 2, 6)],
)
def test_only_a_length_that_is_no_multiple_trims(whole: int, true_length: int, ranks: int, kept: int) -> None:
    assert kept_length(whole, true_length, ranks) == kept


def test_padding_is_not_charged() -> None:
    problem = problems.get(36)
    case = problem.case("production_llama3_70b_queries", "bf16", 8)
    position = 64 * 128 * 2
    first, last = problem.cost(case, 0), problem.cost(case, 7)
    assert first.egress_bytes == pytest.approx(7 / 8 * 4096 * position)
    assert last.egress_bytes == pytest.approx(7 / 8 * 4091 * position)
    assert first.ingress_bytes == pytest.approx((32763 - 4096) * position / 8)
    assert last.hbm_bytes == pytest.approx((4091 + 32763 / 8) * position)


# The sweep


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_sweep_size_is_that_of_the_larger_of_a_ranks_buffers(number: int, world_size: int) -> None:
    problem = problems.get(number)
    smallest, *_, largest = problem.family("sweep")
    assert (smallest.name, largest.name) == ("sweep_2kib", "sweep_512mib")
    case = problem.cases(smallest.name, world_size)[0]
    inputs = arguments(case)
    given = max(args[0].nbytes for args in inputs)
    returned = max(item.value.numel() * item.dtype.itemsize for item in oracles(case, inputs))
    assert max(given, returned) == 2048
    whole = 2 if number == 1 else 1  # both directions of an all-reduce
    share = 1 if number in (3, 4) else (world_size - 1) / world_size
    ports = [max(cost.egress_bytes, cost.ingress_bytes) for cost in costs(number, largest.name, world_size)]
    assert max(ports) == whole * share * (512 << 20)


def test_a_sweep_is_chosen_by_its_name_alone() -> None:
    problem, without = problems.get(2), problems.get(13)
    chosen = presets_of(problem, ("sweep",), 4)
    assert chosen == [item.name for item in problem.presets if item.name.startswith("sweep_")] and len(chosen) == 10
    assert not set(chosen) & set(presets_of(problem, ("small", "pkb", "production", "production_first"), 4))
    assert presets_of(problem, ("pkb", "sweep_1mib"), 4) == ["pkb", "sweep_1mib"]
    assert presets_of(without, ("pkb", "sweep", "sweep_1mib"), 4) == ["pkb"]
    with pytest.raises(UnknownPreset, match=r"it has: small, pkb, production_.*, sweep$"):
        presets_of(problem, ("sweep_3mib",), 4)
