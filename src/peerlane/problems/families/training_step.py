"""What problems share that are one training step of a two-layer MLP: cases, inputs, costs, and wrong and honest answers.

A :class:`StepModel` makes most of a problem from two functions: one that reads the whole step from all ranks' arguments, and one that says
which parts of the new state a rank returns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families import optimizer
from peerlane.problems.families.collective import FP32, wide_sum
from peerlane.problems.families.matmul import FLOP_UNIT

# Cases and inputs.


def shapes_of(case: pc.Case) -> tuple[tuple[int, ...], ...]:
    """Shapes of W1, b1, W2, b2."""
    d_in, h, d_out = case["d_in"], case["h"], case["d_out"]
    return (h, d_in), (h,), (d_out, h), (d_out,)


def parameter_count(case: pc.Case) -> int:
    """P, the length of the flat parameters."""
    return sum(math.prod(shape) for shape in shapes_of(case))


def tokens(case: pc.Case, rank: int) -> int:
    """Rows of a rank's batch: ``tokens``, ``tokens_by_rank`` (repeated as often as the world needs), or its share of ``tokens_total``."""
    if "tokens_by_rank" in case.params:
        by_rank = case["tokens_by_rank"]
        return int(by_rank[rank % len(by_rank)])
    return int(case["tokens"] if "tokens" in case.params else case["tokens_total"] // case.world_size)


def adam_of(case: pc.Case) -> optimizer.Adam:
    """The hyperparameters of a case: ``lr``, ``step``, and ``beta1``, ``beta2``, ``eps``, ``weight_decay`` where they are unusual."""
    params = case.params
    return optimizer.Adam(
        params["lr"],
        params.get("beta1", 0.9),
        params.get("beta2", 0.999),
        params.get("eps", 1e-8),
        params["step"],
        params.get("weight_decay", 0.0),
    )


def gradient_scales(case: pc.Case) -> tuple[float, float, float, float]:
    """Standard deviations of the averaged gradients of W1, b1, W2, b2, roughly.

    Weights have variance 1 / fan-in, so that hidden units are relu(N(0, 1)), of mean 0.4 and mean square 1/2, and residuals have
    variance 4 or so. That much is noise, which the N tokens of all W ranks average out; column means of the residuals (0.4 from the hidden
    units' mean, and 1.5 for every rank on its own) are not.
    """
    d_in, h, d_out = case["d_in"], case["h"], case["d_out"]
    count = sum(tokens(case, rank) for rank in range(case.world_size))
    noise, mean = 4 / count, 0.16 + 2.3 / case.world_size
    first = 2 / math.sqrt(d_out * h)
    return (
        first * math.sqrt(noise / 2 + 0.16 * mean / d_in),
        first * math.sqrt(noise / 2 + mean / 4),
        2 / d_out * math.sqrt(noise / 2 + 0.16 * mean),
        2 / d_out * math.sqrt(noise + mean),
    )


def _pieces(case: pc.Case, start: int, stop: int) -> list[tuple[int, slice]]:
    """Which of the four parameters the flat positions [start, stop) fall into, and where, counted from ``start``."""
    found, first = [], 0
    for index, shape in enumerate(shapes_of(case)):
        last = first + math.prod(shape)
        if max(first, start) < min(last, stop):
            found.append((index, slice(max(first, start) - start, min(last, stop) - start)))
        first = last
    return found


def draw_batch(case: pc.Case, rank: int, draw: pc.Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """X of N(0, 1) entries, and y of N(0, 1) entries about column means, which differ between ranks as data of different origin do: N(0,
    s^2) with s from 1 on the first rank to 2 on the last. ``case["pattern"]``:

    * ``nan``: the last rank has a NaN among its targets, of a token that is zero
    * ``zero_loss``: rank 1's batch is zero
    * ``cancelling``: all ranks have one X, and targets whose large common part has the opposite sign on every other rank
    """
    count, pattern = tokens(case, rank), case.params.get("pattern")
    x_shape, y_shape = (count, case["d_in"]), (count, case["d_out"])
    if pattern == "cancelling":
        sign = -4.0 if rank % 2 else 4.0
        y = draw.normal(y_shape, FP32) + sign * draw.shared.normal(y_shape, FP32)
        return draw.shared.normal(x_shape, case.dtype), y.to(case.dtype)
    x = draw.normal(x_shape, case.dtype)
    means = draw.normal(y_shape[1:], FP32, scale=1 + rank / (case.world_size - 1))
    y = (draw.normal(y_shape, FP32) + means).to(case.dtype)
    if pattern == "nan" and rank == case.world_size - 1:
        x[0] = 0.0
        y[0, case["d_out"] // 2] = math.nan
    elif pattern == "zero_loss" and rank == 1:
        x.zero_()
        y.zero_()
    return x, y


def draw_parameters(case: pc.Case, draw: pc.Draw, start: int, stop: int) -> torch.Tensor:
    """Flat parameters [start, stop), of variance 1 / fan-in. ``case["pattern"]``:

    * ``dead``: every other hidden unit's bias is -64, so that it is never active
    * ``nan``: all b1 are positive, so that a token of zeros activates all hidden units
    * ``zero_loss``: no b1 is positive and all b2 are zero, so that the output for a token of zeros is zero
    """
    values, pattern = draw.normal((stop - start,), FP32), case.params.get("pattern")
    scales = [case["d_in"] ** -0.5] * 2 + [case["h"] ** -0.5] * 2
    for index, part in _pieces(case, start, stop):
        piece = values[part].mul_(scales[index])
        if index == 1 and pattern in ("nan", "zero_loss"):
            piece.abs_().mul_(1.0 if pattern == "nan" else -1.0)
        elif index == 1 and pattern == "dead":
            piece[::2] = -64.0
        elif index == 3 and pattern == "zero_loss":
            piece.zero_()
    return values.to(case.dtype)


def past_moments(case: pc.Case, draw: pc.Draw, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Moments in float32 as earlier steps leave them whose gradients were N(0, 1): ``step`` - 1 of them, but at least one."""
    adam = adam_of(case)
    age = max(1, adam.step - 1)
    exp_avg = draw.normal((count,), FP32, scale=(1 - adam.beta1) * math.sqrt((1 - adam.beta1 ** (2 * age)) / (1 - adam.beta1**2)))
    exp_avg_sq = 10.0 ** draw.uniform((count,), FP32, low=-1.0, high=0.5)
    return exp_avg, exp_avg_sq.mul_(1 - adam.beta2**age)


def draw_moments(case: pc.Case, draw: pc.Draw, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat moments [start, stop) of :func:`past_moments`, of earlier gradients of the present one's scale."""
    exp_avg, exp_avg_sq = past_moments(case, draw, stop - start)
    scales = gradient_scales(case)
    for index, part in _pieces(case, start, stop):
        exp_avg[part].mul_(scales[index])
        exp_avg_sq[part].mul_(scales[index] ** 2)
    return exp_avg.to(case.dtype), exp_avg_sq.to(case.dtype)


def small_case(label: str, dtype: torch.dtype, **params: Any) -> pc.CaseSpec:
    """104 parameters, unless other sizes are given: shards of 4 ranks begin inside b1 and W2, those of 8 ranks inside rows of W1."""
    return pc.case(label, dtype, **{"d_in": 3, "h": 8, "d_out": 8, "tokens": 3, "lr": 0.05, "step": 2, **params})


def whole_outputs(case: pc.Case, source: int, prefix: str = "") -> list[optimizer.Output]:
    """Outputs that are the whole of W1, b1, W2, b2, or of their moments."""
    outputs, start = [], 0
    for name, shape in zip(optimizer.NAMES, shapes_of(case), strict=True):
        outputs.append(optimizer.Output(prefix + name, source, start, shape))
        start += math.prod(shape)
    return outputs


# Known wrong answers and alternative solutions, from the same view of the whole step.


@dataclass(frozen=True)
class StepModel:
    """Makes oracle, tolerance, wrong answers and alternative solutions of a problem that is one training step.

    ``training`` reads the whole step from all ranks' arguments; ``outputs`` says what a rank returns of the new state, as a tuple or, if
    ``single``, as a tensor.
    """

    training: Callable[[pc.Case, pc.Inputs], optimizer.Training]
    outputs: Callable[[pc.Case, int], Sequence[optimizer.Output]]
    single: bool = False

    def oracle(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> pc.Tree:
        """Of the problem."""
        expected = optimizer.step_expected(self.training(case, inputs), self.outputs(case, rank), case.dtype)
        return expected[0] if self.single else expected

    def tolerance(self, case: pc.Case) -> Mapping[str, pc.Tolerance]:
        """Of the problem."""
        return optimizer.step_tolerance(case, self.outputs(case, 0))

    def arranged(self, case: pc.Case, rank: int, state: optimizer.Flat) -> pc.Tree:
        """What the rank returns if this is the new state."""
        parts = [
            state[output.source][output.start :][: math.prod(output.shape)].view(output.shape).to(case.dtype, copy=True)
            for output in self.outputs(case, rank)
        ]
        return parts[0] if self.single else tuple(parts)

    def wrong(
        self,
        name: str,
        why: str,
        *,
        training: Callable[[pc.AnswerContext, optimizer.Training], optimizer.Training] | None = None,
        state: Callable[[pc.AnswerContext, optimizer.Training, optimizer.Flat], optimizer.Flat] | None = None,
        **options: Any,
    ) -> pc.KnownWrongAnswer:
        """A known wrong answer: the step in float32 from a changed ``training``, or the right new ``state`` spoilt."""

        def answer(context: pc.AnswerContext) -> pc.Tree:
            right = self.training(context.case, context.inputs)
            result = optimizer.narrow_step(training(context, right) if training else right, FP32)
            return self.arranged(context.case, context.rank, state(context, right, result) if state else result)

        return pc.wrong(name, why, answer, **options)

    def honest(self, work: Callable[[pc.Case], torch.dtype]) -> Callable[[pc.Case, pc.Inputs, int], pc.Tree]:
        """The step in a working dtype, every operation rounded to it."""
        return lambda case, inputs, rank: self.arranged(case, rank, optimizer.narrow_step(self.training(case, inputs), work(case)))

    @property
    def alternative_solutions(self) -> tuple[pc.AlternativeSolution, ...]:
        """In float32 with one rounding of the results, and with every operation rounded to the case's dtype."""
        return pc.alternatives(fp32_rounded_once=self.honest(lambda _: FP32), every_operation_rounded=self.honest(lambda case: case.dtype))


def _with_adam(**changes: Any) -> Callable[[pc.AnswerContext, optimizer.Training], optimizer.Training]:
    return lambda _, training: replace(training, adam=replace(training.adam, **changes))


def _batches_of(ranks: Callable[[pc.AnswerContext], Sequence[int]]) -> Callable[[pc.AnswerContext, optimizer.Training], optimizer.Training]:
    return lambda context, training: replace(training, batches=[training.batches[q] for q in ranks(context)])


def _squares_averaged(_: pc.AnswerContext, old: optimizer.Training, new: optimizer.Flat) -> optimizer.Flat:
    square = wide_sum([gradient.square() for gradient in optimizer.rank_gradients(old)]) / len(old.batches)
    second = old.adam.beta2 * old.exp_avg_sq.to(FP32) + (1 - old.adam.beta2) * square
    return old.parameters.to(FP32) - old.adam.step_of(new[1], second), new[1], second


def step_wrong_answers(model: StepModel, *, moments: bool = True) -> tuple[pc.KnownWrongAnswer, ...]:
    """Mistakes in a step of Adam; without ``moments`` the new moments are not among the outputs."""
    found = (
        model.wrong(
            "nothing_done", "parameters and moments as they were", state=lambda _, old, new: (old.parameters, old.exp_avg, old.exp_avg_sq)
        ),
        model.wrong(
            "moments_ignored",
            "moments taken for zero",
            training=lambda _, t: replace(t, exp_avg=t.exp_avg * 0, exp_avg_sq=t.exp_avg_sq * 0),
        ),
        model.wrong("no_bias_correction", "moments not divided by 1 - beta^step", training=_with_adam(corrected=False)),
        model.wrong(
            "betas_swapped",
            "beta1 for beta2 and the other way round",
            training=lambda _, t: replace(t, adam=replace(t.adam, beta1=t.adam.beta2, beta2=t.adam.beta1)),
        ),
        model.wrong(
            "ascent", "the step added instead of taken off", state=lambda _, old, new: (2 * old.parameters.to(FP32) - new[0], *new[1:])
        ),
        model.wrong(
            "plain_momentum", "no second moment", state=lambda _, old, new: (old.parameters.to(FP32) - old.adam.lr * new[1], *new[1:])
        ),
    )
    if not moments:
        return found
    return (
        *found,
        model.wrong("parameters_kept", "moments right, parameters as they were", state=lambda _, old, new: (old.parameters, *new[1:])),
        model.wrong(
            "moments_kept", "parameters right, moments as they were", state=lambda _, old, new: (new[0], old.exp_avg, old.exp_avg_sq)
        ),
    )


def gradient_wrong_answers(model: StepModel) -> tuple[pc.KnownWrongAnswer, ...]:
    """Mistakes in the average of the ranks' gradients."""
    return (
        model.wrong("own_gradient", "the gradient of the rank's own batch", training=_batches_of(lambda c: [c.rank])),
        model.wrong(
            "sum_of_gradients",
            "the sum of the ranks' gradients instead of their mean",
            training=lambda _, t: replace(t, gradient=wide_sum(optimizer.rank_gradients(t))),
        ),
        model.wrong("squares_averaged", "the mean of the ranks' squared gradients in the second moment", state=_squares_averaged),
        model.wrong(
            "no_gradient", "moments decay, nothing is added", training=lambda _, t: replace(t, gradient=torch.zeros_like(t.parameters))
        ),
    )


def usual_wrong_answers(model: StepModel, **usual: float) -> tuple[pc.KnownWrongAnswer, ...]:
    """Usual numbers in place of unusual arguments: 0.9 and 0.999 for the betas, no eps, and those of ``usual``, each on its own."""
    found = {"usual_betas": {"beta1": 0.9, "beta2": 0.999}, "no_eps": {"eps": 0.0}}
    found |= {f"usual_{name}": {name: value} for name, value in usual.items()}
    return tuple(
        model.wrong(name, f"whatever was passed: {changes}", training=_with_adam(**changes), cases=("small/unusual_adam_fp32",))
        for name, changes in found.items()
    )


def excused_by_nan(outputs: Sequence[str]) -> dict[str, str]:
    """Standard known wrong answers that are right in the case ``nan_bf16``, where a NaN has reached all of these outputs in every call."""
    return {f"{null}/{output}@small/nan_bf16": "all of it is NaN" for null in ("nan", "previous") for output in outputs}


# For costs.


def batch_bytes(case: pc.Case, rank: int) -> int:
    """Bytes of a rank's X and y."""
    return tokens(case, rank) * int(case["d_in"] + case["d_out"]) * case.dtype.itemsize


def mlp_flops(case: pc.Case, rank: int) -> Mapping[str, float]:
    """Two products forward, and three backward: no gradient of X."""
    d_in, h, d_out = case["d_in"], case["h"], case["d_out"]
    return {FLOP_UNIT[case.dtype]: tokens(case, rank) * (4 * d_in * h + 6 * d_out * h)}


def known_algorithm(source: str, *, spread: float = 0.0, sharded: bool = True, gathers: bool = True) -> pc.Algorithm:
    """The step as it is usually taken. ``spread``: how many times the parameters' bytes rank 0 sends first; 0: they are gathered.
    ``sharded``: each rank updates its part, and the new parameters are sent to all if it ``gathers``; else all ranks update everything."""

    def steps(case: pc.Case, rank: int) -> pc.Steps:
        size = parameter_count(case) * case.dtype.itemsize
        part, shot = size / case.world_size if sharded else size, pc.traffic.reduce_scatter(size, case.world_size)
        over_tokens = tokens(case, rank) * (case["h"] + case["d_out"]) * case.dtype.itemsize
        return (
            pc.step("state to all ranks", hbm=max(spread, 1.0) * size, link=spread * size or shot, barriers=1),
            pc.step("products", hbm=batch_bytes(case, rank), flops=mlp_flops(case, rank)),
            pc.step("gradients of biases", hbm=over_tokens),
            pc.step("sum over ranks", hbm=size, link=shot if sharded else 2 * shot, barriers=1 if sharded else 2),
            pc.step("Adam", hbm=7 * part + gathers * size, link=gathers * shot, barriers=int(gathers)),
        )

    return pc.Algorithm("products without passes between them, then Adam", source, steps)
