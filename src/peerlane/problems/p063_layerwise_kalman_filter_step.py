"""Problem 63: one step of the layer-wise extended Kalman filter optimizer, its covariance blocks spread over ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64, all_gather_single

# Rank of the part of P that is not diagonal.
_FACTORS = 8

Blocks = list[torch.Tensor]
Answer = tuple[tuple[Blocks, Blocks, torch.Tensor], dict[str, Blocks]]


def reference(
    H: list[torch.Tensor],
    error: torch.Tensor,
    weights: list[torch.Tensor],
    P: list[torch.Tensor],
    kalman_lambda: float,
    kalman_nue: float = 0.9987,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    gains = [p @ h for p, h in zip(P, H, strict=True)]
    total = torch.stack([torch.sum(h * gain) for h, gain in zip(H, gains, strict=True)]).sum() + kalman_lambda * len(P)
    dist.all_reduce(total)
    step = error.to(weights[0].dtype) / total
    for weight, p, gain in zip(weights, P, gains, strict=True):
        weight.addcmul_(gain, step)
        p.sub_(gain / total @ gain.t()).div_(kalman_lambda)

    # Every rank's block sizes, then its blocks, padded to the longest.
    ranks = dist.get_world_size()
    counts = _gather(weights[0].new_tensor([len(weights), sum(weight.numel() for weight in weights)], dtype=torch.int64)).tolist()
    most, longest = (max(column) for column in zip(*counts, strict=True))
    sizes = weights[0].new_zeros(most, dtype=torch.int64)
    sizes[: len(weights)] = sizes.new_tensor([weight.numel() for weight in weights])
    all_sizes = _gather(sizes).tolist()
    flat = weights[0].new_zeros(longest)
    flat[: counts[dist.get_rank()][1]] = torch.cat([weight.flatten() for weight in weights])
    gathered = _gather(flat)
    blocks = [
        block.unsqueeze(1)
        for rank in range(ranks)
        for block in torch.split(gathered[rank, : counts[rank][1]], all_sizes[rank][: counts[rank][0]])
    ]
    return blocks, P, weights[0].new_full((), kalman_nue * kalman_lambda + 1.0 - kalman_nue)


def _gather(row: torch.Tensor) -> torch.Tensor:
    """(W, n): every rank's row."""
    rows = row.new_empty(dist.get_world_size() * row.numel())
    all_gather_single(rows, row)
    return rows.view(-1, row.numel())


def block_sizes(case: pc.Case, rank: int) -> tuple[int, ...]:
    """Sizes of one rank's blocks. ``case["blocks"]``: lists that repeat over the ranks, or such lists by world size."""
    lists = case["blocks"]
    if isinstance(lists, Mapping):
        lists = lists[case.world_size]
    return tuple(lists[rank % len(lists)])


def inputs(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[Any, ...]:
    """H, weights and the error N(0, 1), P = (I + U U^T / 8) times ``case["scale"]`` (1) with U (n, 8) N(0, 1); all ranks have one error.

    ``case["pattern"]``:

    * ``asymmetric``: P = I + U V^T / 8
    * ``indefinite``: P = I / 8 - U U^T / 8, so that the shared denominator is negative
    * ``own_error``: every rank has an error of its own
    * ``no_error``: the error is zero
    """
    sizes, pattern = block_sizes(case, rank), case.params.get("pattern")
    h = [draw.normal((n, 1), FP64) for n in sizes]
    weights = [draw.normal((n, 1), FP64) for n in sizes]
    p = []
    for n in sizes:
        left = draw.normal((n, _FACTORS), FP64)
        right = draw.normal((n, _FACTORS), FP64) if pattern == "asymmetric" else left
        block = (left / (-_FACTORS if pattern == "indefinite" else _FACTORS)) @ right.t()
        block.diagonal().add_(1 / _FACTORS if pattern == "indefinite" else 1.0)
        p.append(block.mul_(case.params.get("scale", 1.0)))
    error = (draw if pattern == "own_error" else draw.shared).normal((), case.params.get("error_dtype", FP64))
    if pattern == "no_error":
        error.zero_()
    return (h, error, weights, p, case["lambda"], case["nue"])


def _step(case: pc.Case, inputs: pc.Inputs, rank: int) -> tuple[Blocks, Blocks, torch.Tensor]:
    """All ranks' weights, the rank's P and lambda after the step, in float64, P H from the transposed side and sums in reverse order."""
    total = torch.stack([_denominator(args, case["lambda"]) for args in reversed(inputs)]).sum()
    weights = [w + (error.to(FP64) / total) * _gain(p, h) for hs, error, ws, ps, *_ in inputs for h, w, p in zip(hs, ws, ps, strict=True)]
    h, _, _, p, lam, nue = inputs[rank]
    updated = [(block - _gain(block, g) * (_gain(block, g).t() / total)) * (1 / lam) for g, block in zip(h, p, strict=True)]
    return weights, updated, total.new_tensor(1.0 - nue * (1.0 - lam))


def _gain(p: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (h.t().flip(1) @ p.t().flip(0)).t()


def _denominator(args: tuple[Any, ...], lam: float) -> torch.Tensor:
    """One rank's part of the shared denominator: sum over its blocks of lambda + H^T P H."""
    h, _, _, p, *_ = args
    return torch.stack([lam + (g.t() @ block @ g).squeeze() for g, block in zip(h, p, strict=True)]).sum()


def _answer(inputs: pc.Inputs, rank: int, step: tuple[Blocks, Blocks, torch.Tensor]) -> Answer:
    """The call's answer from :func:`_step`'s: the caller's weights are the rank's part of all of them."""
    first = sum(len(args[2]) for args in inputs[:rank])
    weights, p, lam = step
    local = [weight.clone() for weight in weights[first : first + len(inputs[rank][2])]]
    return (weights, p, lam), {"weights": local, "P": [block.clone() for block in p]}


def oracle(case: pc.Case, inputs: pc.Inputs, rank: int) -> Any:
    """In float64, like the call itself, with the sums of absolute values that rounding errors are in proportion to.

    An error of the denominator counts as much as its terms exceed it: T / |t|, T the sum of the absolute values.
    """
    total = torch.stack([_denominator(args, case["lambda"]) for args in inputs]).sum()
    absolute = torch.stack(
        [_denominator(([h.abs() for h in args[0]], *args[1:3], [p.abs() for p in args[3]]), case["lambda"]) for args in inputs]
    )
    condition = absolute.sum() / total.abs()

    def gain_and_error(p: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gain = p @ h
        return gain, p.abs() @ h.abs() + condition * gain.abs()

    weights, magnitudes = [], []
    for hs, error, ws, ps, *_ in inputs:
        for h, w, p in zip(hs, ws, ps, strict=True):
            gain, spread = gain_and_error(p, h)
            step = error.to(FP64) / total
            weights.append(w + step * gain)
            magnitudes.append(w.abs() + step.abs() * spread)
    h, _, _, p, lam, nue = inputs[rank]
    blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
    for g, block in zip(h, p, strict=True):
        gain, spread = gain_and_error(block, g)
        updated = (block - gain @ gain.t() / total) / lam
        error_size = block.abs().add_(gain.abs() @ spread.t() / total.abs()).add_(spread @ gain.abs().t() / total.abs())
        blocks.append((updated, error_size.div_(lam)))

    first = sum(len(args[2]) for args in inputs[:rank])
    own = range(first, first + len(h))
    returned = (
        [pc.Expected("all_weights", value, FP64, magnitude=size) for value, size in zip(weights, magnitudes, strict=True)],
        [pc.Expected("P", value, FP64, magnitude=size) for value, size in blocks],
        pc.Expected("lambda", total.new_tensor(nue * lam + 1.0 - nue), FP64),
    )
    updated_arguments = {
        "weights": [pc.Expected("updated_weights", weights[i], FP64, magnitude=magnitudes[i]) for i in own],
        "P": [pc.Expected("updated_P", value, FP64, magnitude=size) for value, size in blocks],
    }
    return returned, updated_arguments


def tolerance(case: pc.Case) -> Mapping[str, pc.Tolerance]:
    """A sum of n products in float64 errs by about sqrt(n) u times the sum of their absolute values, in any order; 8 sqrt(n) u are allowed.

    n is the largest block's size, and no less than 16. Lambda takes three roundings.
    """
    u = pc.UNIT_ROUNDOFF[FP64]
    largest = max(16, *(n for rank in range(case.world_size) for n in block_sizes(case, rank)))
    sums = pc.Tolerance(relative=4 * u, magnitude=8 * largest**0.5 * u)
    return {**dict.fromkeys(("all_weights", "P", "updated_weights", "updated_P"), sums), "lambda": pc.Tolerance(relative=4 * u)}


def cost(case: pc.Case, rank: int) -> pc.Cost:
    """P is read for the gain, read again for the update as far as it did not stay on the chip, and written: the update needs the
    denominator, one number that is reduced, of all gains."""
    sizes, ranks = block_sizes(case, rank), case.world_size
    entries, own = sum(n * n for n in sizes), sum(sizes)
    total = sum(sum(block_sizes(case, q)) for q in range(ranks))
    scalar = pc.traffic.all_reduce(8, ranks)
    return pc.Cost(
        hbm_bytes=16 * entries + pc.traffic.read_again(8 * entries) + 8 * (3 * own + total),
        egress_bytes=8 * own * (ranks - 1) + scalar,
        ingress_bytes=8 * (total - own) + scalar,
        flops={"fp64": 5 * entries},
    )


def _reordered(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    return _answer(inputs, rank, _step(case, inputs, rank))


def _denominator_first(case: pc.Case, inputs: pc.Inputs, rank: int) -> Answer:
    """H^T P H from H^T P, sums in pieces of four, and the rank-one update scaled on both sides."""
    lam, nue = case["lambda"], case["nue"]
    total = torch.zeros((), dtype=FP64, device=inputs[rank][1].device)
    for hs, _, _, ps, *_ in inputs:
        for h, p in zip(hs, ps, strict=True):
            for part, piece in zip(torch.split(h.t() @ p, 4, dim=1), torch.split(h, 4), strict=True):
                total = total + (part @ piece).squeeze()
            total = total + lam
    weights = [
        torch.addmm(w, p @ h, (error.to(FP64) / total).view(1, 1))
        for hs, error, ws, ps, *_ in inputs
        for h, w, p in zip(hs, ws, ps, strict=True)
    ]
    h, _, _, p, *_ = inputs[rank]
    updated = [block / lam - (block @ g) @ ((block @ g).t() / (total * lam)) for g, block in zip(h, p, strict=True)]
    return _answer(inputs, rank, (weights, updated, total.new_tensor(nue * lam + (1.0 - nue))))


def _spoilt(change: Callable[[pc.AnswerContext], pc.Inputs]) -> Callable[[pc.AnswerContext], Answer]:
    """A wrong answer: the step on arguments that ``change`` has replaced, of all ranks."""
    return lambda context: _reordered(context.case, change(context), context.rank)


def _in_float32(context: pc.AnswerContext) -> pc.Inputs:
    def narrow(blocks: Blocks) -> Blocks:
        return [block.to(FP32).to(FP64) for block in blocks]

    return [(narrow(h), error, narrow(weights), narrow(p), *rest) for h, error, weights, p, *rest in context.inputs]


def _denominator_is(total: Callable[[pc.AnswerContext], torch.Tensor]) -> Callable[[pc.AnswerContext], Answer]:
    """A wrong answer: the step with another shared denominator."""

    def answer(context: pc.AnswerContext) -> Answer:
        t, lam = total(context), context.case["lambda"]
        weights = [w + error.to(FP64) / t * (p @ h) for hs, error, ws, ps, *_ in context.inputs for h, w, p in zip(hs, ws, ps, strict=True)]
        h, _, _, p, *_ = context.args
        updated = [(block - (block @ g) @ (block @ g).t() / t) / lam for g, block in zip(h, p, strict=True)]
        return _answer(context.inputs, context.rank, (weights, updated, context.answer[0][2]))

    return answer


def _sum_of_parts(context: pc.AnswerContext, ranks: Sequence[int], lam: float) -> torch.Tensor:
    return torch.stack([_denominator(context.inputs[q], lam) for q in ranks]).sum()


def _lambda_once(context: pc.AnswerContext) -> torch.Tensor:
    return _sum_of_parts(context, context.ranks, 0.0) + float(context.case["lambda"])


def _only_divided(context: pc.AnswerContext) -> Answer:
    """The weights as they were and P / lambda: what the public benchmark's tolerance lets pass."""
    weights = [w for _, _, ws, *_ in context.inputs for w in ws]
    return _answer(context.inputs, context.rank, (weights, [p / context.case["lambda"] for p in context.args[3]], context.answer[0][2]))


def _not_divided(context: pc.AnswerContext) -> Answer:
    weights, p, lam = context.answer[0]
    return _answer(context.inputs, context.rank, (weights, [block * context.case["lambda"] for block in p], lam))


def _arguments_untouched(context: pc.AnswerContext) -> Answer:
    returned, _ = context.answer
    return returned, {"weights": context.args[2], "P": context.args[3]}


def _small(label: str, **params: Any) -> pc.CaseSpec:
    return pc.case(label, FP64, **{"blocks": ((4, 7), (3, 3), (9, 1), (2, 5)), "lambda": 0.98, "nue": 0.9987, **params})


def _layers(ranks: int) -> tuple[tuple[int, ...], ...]:
    """40 blocks per rank, sizes from 16 to 2048 at equal ratios, another order on every rank."""
    sizes = [round(16 * 128 ** (i / 39)) for i in range(40)]
    return tuple(tuple(sizes[(i * 7 + rank) % 40] for i in range(40)) for rank in range(ranks))


_LAMBDA: dict[str, Any] = {"lambda": 0.98, "nue": 0.9987}

PRESETS = (
    pc.preset(
        "small",
        "uneven blocks, a block of one, P that is not symmetric, indefinite or huge, lambda 1, errors that are zero, float32 or differ",
        _small("uneven"),
        _small("asymmetric", pattern="asymmetric"),
        _small("indefinite", pattern="indefinite"),
        _small("own_error", pattern="own_error", blocks=((3,), (5, 2, 4))),
        _small("no_error", pattern="no_error"),
        _small("unit_lambda", **{"lambda": 1.0}),
        _small("huge", scale=1e8, nue=0.9),
        _small("single_block", blocks=((1,), (6, 11), (2,), (8,)), error_dtype=FP32),
    ),
    pc.preset("pkb", "the public benchmark's shape", pc.case("fp64", FP64, blocks=((1024,) * 8,), **_LAMBDA)),
    pc.preset(
        "production_rlekf_water",
        "RLEKF on a DeePMD se_e2_a model, 26651 parameters: a block limit of 10240 on 4 ranks, 5120 on 8",
        pc.case(
            "fp64",
            FP64,
            blocks={
                2: ((10240, 1350), (9760, 5301)),
                4: ((10240,), (9760,), (5301,), (1350,)),
                8: ((5120,), (5120,), (4880,), (4880,), (2651,), (2650,), (675,), (675,)),
            },
            **_LAMBDA,
        ),
    ),
    pc.preset(
        "production_dpa1_small",
        "13 blocks of 5120, 64000 parameters, dealt out as evenly as they go",
        pc.case(
            "fp64",
            FP64,
            blocks={2: ((5120,) * 7, (5120,) * 6), 4: ((5120,) * 4, *((5120,) * 3,) * 3), 8: (*((5120,) * 2,) * 5, *((5120,),) * 3)},
            **_LAMBDA,
        ),
    ),
    pc.preset("production_many_layers", "40 small blocks per rank, from 16 to 2048", pc.case("fp64", FP64, blocks=_layers(8), **_LAMBDA)),
)

_SAME_LAMBDA = "the next lambda follows from arguments that are the same in every call and on every rank"

PROBLEM = pc.Problem(
    id=63,
    slug="layerwise_kalman_filter_step",
    title="Layer-wise extended Kalman filter optimizer step with a globally shared gain",
    category="fsdp_zero",
    parallelism=("zero", "data"),
    origin="DeePMD-kit: LKF optimizer (RLEKF), covariance blocks spread over ranks",
    summary=(
        "A rank has any number of blocks i: H_i and weights w_i (n_i, 1), P_i (n_i, n_i), float64, P_i not necessarily symmetric. With "
        "t = sum over all ranks and blocks of lambda + H_i^T P_i H_i and K_i = P_i H_i: w_i += error K_i / t with the rank's own error (a "
        "scalar, cast to float64), and P_i becomes (P_i - K_i K_i^T / t) / lambda. Returns all ranks' updated weights in rank order as a "
        "list of (n_i, 1), the list P, and nue lambda + 1 - nue as a float64 scalar. The lists weights and P hold the updated blocks after "
        "the call. Other ranks' block counts and sizes are not among the arguments."
    ),
    reference=reference,
    inputs=inputs,
    oracle=oracle,
    tolerance=tolerance,
    cost=cost,
    presets=PRESETS,
    updates=("weights", "P"),
    known_wrong_answers=(
        pc.wrong("only_divided", "weights as they were, P divided by lambda", _only_divided),
        pc.wrong("not_divided", "P not divided by lambda", _not_divided, lambda c: c["lambda"] != 1.0),
        pc.wrong("lambda_once", "lambda added once, not once per block", _denominator_is(_lambda_once)),
        pc.wrong(
            "transposed",
            "P transposed",
            _spoilt(lambda c: [(h, e, w, [p.t() for p in ps], *rest) for h, e, w, ps, *rest in c.inputs]),
            ("small/asymmetric",),
        ),
        pc.wrong(
            "first_error",
            "the first rank's error for all",
            _spoilt(lambda c: [(args[0], c.inputs[0][1], *args[2:]) for args in c.inputs]),
            ("small/own_error",),
        ),
        pc.wrong("in_float32", "blocks that went through float32", _spoilt(_in_float32)),
        pc.wrong("arguments_untouched", "right results, but the caller's lists are as before", _arguments_untouched),
    ),
    alternative_solutions=pc.alternatives(reordered=_reordered, denominator_first=_denominator_first),
    excused={
        "another_rank/all_weights": "all ranks return all weights",
        "another_rank/lambda": _SAME_LAMBDA,
        "previous/lambda": _SAME_LAMBDA,
        "previous_mean/lambda": _SAME_LAMBDA,
        "ones/lambda@small/unit_lambda": "1 is right there",
    },
    replicated=("all_weights", "lambda"),
    graph=False,
    graph_reason="other ranks' block sizes, which shape the list returned, are not among the arguments: the host must wait for them",
    notes=(
        "The public benchmark starts from P = I and tiny H, so that returning the weights unchanged and P / lambda passes. Here P has "
        "off-diagonal parts and H is of size one, and everything is held to float64 accuracy.",
        "The public reference puts new tensors in the caller's lists. Here blocks are updated in place. What counts is what the lists hold "
        "after the call.",
        "In the optimizer the error is the same on all ranks; the rank's own is used, as in the public reference, and one case tells.",
        "Lambda is added once per block on every rank: the public semantics, kept.",
    ),
)
