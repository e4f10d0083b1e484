"""What the training-step problems share: Adam and the gradients of a two-layer MLP, with the error model of a step.

The flat order of an MLP's parameters is W1 (h, d_in), b1 (h,), W2 (d_out, h), b2 (d_out,), each row-major.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import BF16, FP32, FP64, sequential_sum

NAMES = ("W1", "b1", "W2", "b2")

# Standard deviations of accumulated rounding errors that a gradient may be off by; what that does to a step is allowed twice.
_DEVIATIONS = 4.0

# Roundings between a moment and a parameter's step: bias corrections, root, epsilon, quotient, learning rate; and the moments' own.
_STEP_ROUNDINGS = 8.0

# Elements for which the oracle evaluates steps at a time.
_CHUNK = 2**25

Flat = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Parameters and both moments, flat."""


@dataclass(frozen=True)
class Adam:
    """Hyperparameters of a step. ``corrected`` False leaves out the bias correction, which is wrong."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    step: int
    weight_decay: float = 0.0
    corrected: bool = True

    @property
    def corrections(self) -> tuple[float, float]:
        """1 - beta1^step and 1 - beta2^step."""
        return (1 - self.beta1**self.step, 1 - self.beta2**self.step) if self.corrected else (1.0, 1.0)

    def moments(self, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new moments; a square beyond float32's range is infinite."""
        first = self.beta1 * exp_avg + (1 - self.beta1) * gradient
        second = self.beta2 * exp_avg_sq + (1 - self.beta2) * gradient * gradient
        return first, torch.where(second > torch.finfo(FP32).max, math.inf, second)

    def step_of(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """What the new moments take off the parameters, weight decay aside."""
        correction1, correction2 = self.corrections
        return self.lr * (first / correction1) / ((second / correction2).sqrt() + self.eps)

    def apply(self, parameters: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Flat:
        """New parameters and moments, in the tensors' dtype. Weight decay is decoupled, and takes the old parameters."""
        first, second = self.moments(gradient, exp_avg, exp_avg_sq)
        return parameters - self.step_of(first, second) - self.lr * self.weight_decay * parameters, first, second


# For the references.


def adam_update(parameters: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, adam: Adam) -> Flat:
    """One step as torch.optim does it, in new tensors."""
    correction1, correction2 = adam.corrections
    first = exp_avg.mul(adam.beta1).add_(gradient, alpha=1 - adam.beta1)
    second = exp_avg_sq.mul(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
    denominator = second.div(correction2).sqrt_().add_(adam.eps)
    decayed = parameters.mul(1 - adam.lr * adam.weight_decay) if adam.weight_decay else parameters
    return decayed.addcdiv(first, denominator, value=-adam.lr / correction1), first, second


def mlp_gradients(x: torch.Tensor, y: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the mean of (relu(x W1^T + b1) W2^T + b2 - y)^2 over all its elements with respect to W1, b1, W2, b2, by autograd."""
    with torch.enable_grad():
        w1, b1, w2, b2 = (parameter.detach().requires_grad_() for parameter in parameters)
        loss = F.mse_loss(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), y)
        return list(torch.autograd.grad(loss, (w1, b1, w2, b2)))


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One flat copy of all tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Views of the flat tensor with these shapes, in order."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# The whole step, from all ranks' arguments.


@dataclass(frozen=True)
class Training:
    """All that a step depends on. Either ``batches`` and ``shapes`` or the averaged ``gradient`` itself are given; flat tensors."""

    adam: Adam
    parameters: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    shapes: Sequence[tuple[int, ...]] = ()
    gradient: torch.Tensor | None = None


@dataclass(frozen=True)
class Output:
    """One output: ``source`` 0, 1, 2 are the new parameters, first and second moments; ``start`` is where it begins in their flat order."""

    name: str
    source: int
    start: int
    shape: tuple[int, ...]


@dataclass
class _Pass:
    """Forward and backward through the MLP on one batch, in one dtype, with its intermediates."""

    pre: torch.Tensor
    hidden: torch.Tensor
    output: torch.Tensor
    d_output: torch.Tensor
    d_hidden: torch.Tensor
    gradients: list[torch.Tensor]


def _mlp_pass(x: torch.Tensor, y: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> _Pass:
    pre = x @ w1.t() + b1
    hidden = pre.relu()
    output = hidden @ w2.t() + b2
    d_output = (output - y) * (2.0 / y.numel())
    d_hidden = d_output @ w2
    d_pre = d_hidden.masked_fill(pre <= 0, 0.0)
    gradients = [d_pre.t() @ x, d_pre.sum(0), d_output.t() @ hidden, d_output.sum(0)]
    return _Pass(pre, hidden, output, d_output, d_hidden, gradients)


def _root_of_squares(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The roots of sums of squared terms of a @ b."""
    return (a.square() @ b.square()).sqrt_()


def _pass_errors(
    x: torch.Tensor, y: torch.Tensor, parameters: Sequence[torch.Tensor], done: _Pass, u: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What roundings of all intermediates to relative precision u do to the four gradients: in units of u, as roots of sums of squares; and
    what hidden units add whose sign may turn when X W1^T is rounded before b1 is added.
    """
    w1, b1, w2, _ = parameters
    scale = 2.0 / y.numel()
    residual = done.output - y
    residual_error = done.output.abs() + residual.abs() + _root_of_squares(done.hidden, w2.t())
    d_output_error = residual_error * scale + done.d_output.abs()
    d_pre_error = (done.d_hidden.abs() + _root_of_squares(d_output_error, w2)) * (done.pre > 0)
    ones = torch.ones_like(x[:, :1])
    errors = [
        _root_of_squares(d_pre_error.t(), x),
        _root_of_squares(d_pre_error.t(), ones).squeeze(1),
        _root_of_squares(d_output_error.t(), done.hidden),
        _root_of_squares(d_output_error.t(), ones).squeeze(1),
    ]
    accumulation = _DEVIATIONS * pc.UNIT_ROUNDOFF[FP32] * math.sqrt(x.shape[1]) * _root_of_squares(x, w1.t())
    turned = (done.d_hidden.abs() * (done.pre.abs() <= 2 * u * b1.abs() + accumulation)).nan_to_num_(0.0)
    return errors, [turned.t() @ x.abs(), turned.sum(0)]


def _wide_gradient(training: Training, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The averaged gradient in float64 and the error that it may have, both flat.

    The mean over ranks of local gradients; errors of different ranks are independent, and sums of ranks in the dtype err in proportion to
    the sum of magnitudes.
    """
    u = pc.UNIT_ROUNDOFF[dtype]
    parameters = [part.to(FP64) for part in unflatten(training.parameters, training.shapes)]
    total, magnitude, square, turned = (torch.zeros_like(training.parameters, dtype=FP64) for _ in range(4))
    deepest = max(max(shape) for shape in training.shapes)
    for x, y in training.batches:
        x, y = x.to(FP64), y.to(FP64)
        deepest = max(deepest, x.shape[0])
        done = _mlp_pass(x, y, *parameters)
        errors, turns = _pass_errors(x, y, parameters, done, u)
        for part, gradient in zip(unflatten(total, training.shapes), done.gradients, strict=True):
            part += gradient
        for part, gradient in zip(unflatten(magnitude, training.shapes), done.gradients, strict=True):
            part += gradient.abs_()
        for part, error in zip(unflatten(square, training.shapes), errors, strict=True):
            part += error.square_()
        for part, turn in zip(unflatten(turned, training.shapes), turns, strict=False):
            part += turn
    ranks = len(training.batches)
    unit = u + pc.UNIT_ROUNDOFF[FP32] * math.sqrt(deepest)
    error = square.sqrt_().add_(magnitude, alpha=0.5).mul_(_DEVIATIONS * unit).add_(turned)
    return total.div_(ranks), error.div_(ranks)


def step_expected(training: Training, outputs: Sequence[Output], dtype: torch.dtype) -> tuple[pc.Expected, ...]:
    """The right outputs; their magnitudes are the errors that they may have. See :func:`step_tolerance`."""
    if training.gradient is None:
        gradient, error = _wide_gradient(training, dtype)
    else:
        gradient = training.gradient.to(FP64)
        # Gradients narrower than the state may be scaled and squared in their own dtype.
        own = training.gradient.dtype
        error = gradient.abs() * (0.0 if own == dtype else 4 * pc.UNIT_ROUNDOFF[own])
    u, adam = pc.UNIT_ROUNDOFF[dtype], training.adam
    store = FP64 if dtype == FP32 else FP32
    values, allowed = ([torch.empty_like(training.parameters, dtype=store) for _ in range(3)] for _ in range(2))
    for first in range(0, gradient.numel(), _CHUNK):
        part = slice(first, first + _CHUNK)
        p, m, v = (tensor[part].to(FP64) for tensor in (training.parameters, training.exp_avg, training.exp_avg_sq))
        g, e = gradient[part], error[part]
        centre = adam.apply(p, g, m, v)
        moved = [adam.apply(p, g + sign * e, m, v) for sign in (-1, 1)]
        terms = adam.beta1 * m.abs() + (1 - adam.beta1) * g.abs()
        rate = adam.step_of(torch.ones_like(p), centre[2])
        roundings = (
            2 * (2 if adam.weight_decay else 1) * centre[0].abs()
            + _STEP_ROUNDINGS * adam.step_of(centre[1], centre[2]).abs()
            + 4 * rate * terms,
            4 * terms,
            6 * centre[2],
        )
        for index in range(3):
            spread = torch.maximum((moved[0][index] - centre[index]).abs(), (moved[1][index] - centre[index]).abs())
            values[index][part] = centre[index]
            allowed[index][part] = 2 * spread + u * roundings[index]
    return tuple(
        pc.Expected(
            output.name,
            values[output.source][output.start :][: math.prod(output.shape)].view(output.shape),
            dtype,
            magnitude=allowed[output.source][output.start :][: math.prod(output.shape)].view(output.shape),
        )
        for output in outputs
    )


def step_tolerance(case: pc.Case, outputs: Sequence[Output]) -> Mapping[str, pc.Tolerance]:
    """Errors of the update, not of the parameter; the oracle gives them as magnitudes.

    The gradient's error moves both moments and the parameter as the steps at the gradient plus and minus its error tell; that is allowed
    twice. Roundings of the step itself add 8 u of the update; those of the first moment 4 u of its two terms, which also reach the
    parameter; those of the second 6 u; that of the new parameter 2 u of it, which is one spacing at most, and as much again with weight
    decay. Normwise, bfloat16 leaves 8e-3 in the first moments and 12e-3 in the second.
    """
    u = pc.UNIT_ROUNDOFF[case.dtype]
    spread = "d is how far the result moves if the gradient changes by its error, that of passes which round all intermediates to the dtype"
    words = (
        f"|got - want| <= 2 d + {_STEP_ROUNDINGS * u:.2g} |update| + {2 * u:.2g} |want|; {spread}",
        f"|got - want| <= 2 d + {4 * u:.2g} (|beta1 m| + |(1 - beta1) g|); {spread}",
        f"|got - want| <= 2 d + {6 * u:.2g} |want|; {spread}",
    )
    normwise = {1: 1.5e-2, 2: 2.5e-2} if case.dtype == BF16 and case.params.get("pattern") != "cancelling" else {}
    enough = 4096
    return {
        output.name: pc.Tolerance(
            magnitude=1.0, normwise=normwise.get(output.source) if math.prod(output.shape) >= enough else None, words=words[output.source]
        )
        for output in outputs
    }


# In narrower arithmetic.


def rank_gradients(training: Training, work: torch.dtype = FP32) -> list[torch.Tensor]:
    """Every rank's own gradient, flat, with every operation rounded to ``work``."""
    parameters = [part.to(work) for part in unflatten(training.parameters, training.shapes)]
    return [flatten(_mlp_pass(x.to(work), y.to(work), *parameters).gradients) for x, y in training.batches]


def narrow_step(training: Training, work: torch.dtype) -> Flat:
    """The step with every operation rounded to ``work``, gradients added rank by rank."""
    gradient = training.gradient
    if gradient is None:
        gradient = sequential_sum(rank_gradients(training, work)) / len(training.batches)
    state = (training.parameters, gradient, training.exp_avg, training.exp_avg_sq)
    return training.adam.apply(*(tensor.to(work) for tensor in state))
