"""Compares what a candidate returned with the oracle."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.problems.contract.draw import INTEGER
from peerlane.problems.contract.spec import Case, Expected, Problem, Score, Tolerance
from peerlane.problems.contract.tree import Tree, dtype_name, map_leaves

_PIECE_ELEMENTS = 1 << 26  # compared at a time: a comparison in float64 takes half a dozen tensors of their size
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def expected_leaves(tree: Tree) -> list[Expected]:
    """The Expected entries of an oracle's answer, in the order of the output's tensors."""
    if isinstance(tree, Expected):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in expected_leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in expected_leaves(item)]
    return []


def map_expected(tree: Tree, function: Any) -> Tree:
    """The oracle's answer with every Expected replaced by ``function(expected)``."""
    if isinstance(tree, Expected):
        return function(tree)
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_expected(item, function) for item in tree)
    if isinstance(tree, dict):
        return {key: map_expected(item, function) for key, item in tree.items()}
    return tree


def rounded(tree: Tree) -> Tree:
    """The oracle's answer as a candidate would return it: every Expected rounded once to its dtype."""
    return map_expected(tree, lambda leaf: leaf.value.to(leaf.dtype).clone())


def type_mismatch(got: Tree, expected: Tree, path: str = "output") -> str | None:
    """Why the structure, a shape or a dtype is wrong, or None if all are right. Strides are the candidate's own business."""
    if isinstance(expected, Expected):
        if not isinstance(got, torch.Tensor):
            return f"{path}: got {_said(got)}, expected a tensor"
        if tuple(got.shape) != tuple(expected.value.shape):
            return f"{path}: got shape {tuple(got.shape)}, expected {tuple(expected.value.shape)}"
        if got.dtype != expected.dtype:
            return f"{path}: got dtype {dtype_name(got.dtype)}, expected {dtype_name(expected.dtype)}"
        return None
    if isinstance(expected, torch.Size):
        same = isinstance(got, tuple) and tuple(got) == tuple(expected)
        return None if same else f"{path}: got {got!r}, expected {expected!r}"
    if isinstance(expected, (list, tuple)):
        if type(got) is not type(expected) or len(got) != len(expected):
            size = f" of {len(got)}" if isinstance(got, (list, tuple)) else ""
            return f"{path}: got {type(got).__name__}{size}, expected {type(expected).__name__} of {len(expected)}"
        pairs: list[tuple[str, Any, Any]] = [(f"{path}[{i}]", g, e) for i, (g, e) in enumerate(zip(got, expected, strict=True))]
    elif isinstance(expected, dict):
        if not isinstance(got, dict) or list(got) != list(expected):
            what = f"a dict with keys {list(got)}" if isinstance(got, dict) else _said(got)
            return f"{path}: got {what}, expected a dict with keys {list(expected)}"
        pairs = [(f"{path}[{key!r}]", got[key], expected[key]) for key in expected]
    else:
        if isinstance(got, torch.Tensor) or got != expected:
            return f"{path}: got {_said(got)}, expected {expected!r}"
        return None
    for child_path, child_got, child_expected in pairs:
        if (reason := type_mismatch(child_got, child_expected, child_path)) is not None:
            return reason
    return None


def _said(got: Tree) -> str:
    """What was got, without its contents unless they are one plain value."""
    if isinstance(got, torch.Tensor):
        return "a tensor"
    return reprlib.repr(got) if got is None or isinstance(got, (bool, int, float, str)) else f"a {type(got).__name__}"


def plainly(problem: Problem, reason: str) -> str:
    """A type's mismatch in the candidate's terms: the second half of an answer (see :meth:`Problem.answer`) is not what it returned."""
    if not problem.updates:
        return reason
    reason = re.sub(r"^output\[1\]\['(\w+)'\]", r"argument `\1` after the call", reason)
    return re.sub(r"^output\[0\]", "output", reason)


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    position = []
    for size in reversed(shape):
        position.append(flat % size)
        flat //= size
    return tuple(reversed(position))


def _number(tensor: torch.Tensor, flat: int) -> float:
    value = tensor.reshape(-1)[flat].item()
    return float(value.real if isinstance(value, complex) else value)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # the stride of a single element may be anything
    return flat.view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    return torch.equal(_words(a), _words(b))


def any_differs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Whether one of these pairs of tensors with elements does not hold the same bytes; on their device, which is not waited for."""
    return torch.stack([(_words(a) != _words(b)).any() for a, b in pairs]).any()


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Position-dependent 63-bit checksums of their contents, all NaN alike."""
    sums = [_checksum(tensor) for tensor in tensors]
    return [value & (2**63 - 1) for value in torch.stack(sums).tolist()] if sums else []


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32) if tensor.itemsize == 1 else tensor
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    words = _words(tensor)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(0, words.numel(), _PIECE_ELEMENTS):
        piece = words[first : first + _PIECE_ELEMENTS]
        weights = torch.arange(first, first + piece.numel(), device=words.device).mul_(0x9E3779B97F4A7C1).bitwise_xor_(0x7F4A7C15)
        total += (piece * weights).sum()
    return total


def compare_exact(name: str, got: torch.Tensor, want: torch.Tensor) -> Score:
    """Bit for bit, so that NaN payloads and signed zeros count."""
    if got.numel() == 0:
        return Score(name, 0.0, "empty")
    word = _WORDS.get(got.dtype.itemsize, torch.uint8)
    flat_got = got.contiguous().reshape(-1).view(word)
    flat_want = want.contiguous().reshape(-1).view(word)
    if torch.equal(flat_got, flat_want):
        return Score(name, 0.0, "identical")
    different = flat_got != flat_want
    count = int(different.sum())
    per_element = flat_got.numel() // got.numel()
    worst = int(different.to(torch.uint8).argmax()) // per_element
    return Score(
        name,
        math.inf,
        f"{-(-count // per_element)} of {got.numel()} elements differ (compared bit for bit)",
        _index(worst, got.shape),
        _number(got, worst),
        _number(want, worst),
    )


@dataclass(frozen=True)
class _Errors:
    """How far elements are off, and that by what is allowed. ``found``: the largest of these figures, the norms of the error and of what
    was wanted, and the largest relative error of a row, as far as the tolerance limits them; else 0."""

    error: torch.Tensor
    bound: torch.Tensor
    elements: torch.Tensor
    rows: torch.Tensor | None
    found: tuple[float, float, float, float]

    @staticmethod
    def of(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor | None, tolerance: Tolerance, rms: float) -> _Errors:
        """Of two tensors of one shape and dtype. Where an element of either is infinite or NaN, the first figure is so too."""
        error, bound = (got - want).abs(), tolerance.relative * want.abs()
        if magnitude is not None:
            bound = bound + tolerance.magnitude * torch.nan_to_num(magnitude.to(want.dtype), nan=0.0, posinf=0.0)
        if tolerance.rms:
            bound = bound + rms
        elements = (error / bound).masked_fill_(error == 0, 0.0)
        figures, rows = [elements.max(), *[elements.new_zeros(())] * 3], None
        if tolerance.normwise is not None:
            figures[1:3] = error.norm(), want.norm()
        if tolerance.rowwise is not None and got.dim() > 0:
            rows = _relative(error.norm(dim=-1), want.norm(dim=-1))
            figures[3] = rows.max()
        largest, error_norm, norm, row = torch.stack(figures).tolist()  # the one time that the host waits
        return _Errors(error, bound, elements, rows, (largest, error_norm, norm, row))


@dataclass(frozen=True)
class _Comparison:
    """Two tensors, and the magnitudes that the tolerance scales with, to be compared in pieces of whole rows."""

    got: torch.Tensor
    want: torch.Tensor
    magnitude: torch.Tensor | None
    tolerance: Tolerance
    work: torch.dtype

    @property
    def starts(self) -> range:
        """The first rows of the pieces; the rows of a tensor are those of its last axis."""
        length = self.got.shape[-1] if self.got.dim() else 1
        return range(0, self.got.numel() // length, max(1, _PIECE_ELEMENTS // length))

    def piece(self, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The tensors' rows from ``start`` on, in the dtype of the comparison; a comparison in one piece has its tensors as they are."""
        starts = self.starts
        if len(starts) == 1:
            return self.got.to(self.work), self.want.to(self.work), self.magnitude
        rows = slice(start, start + starts.step)

        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.expand_as(self.got).reshape(-1, self.got.shape[-1])[rows]

        magnitude = None if self.magnitude is None else part(self.magnitude)
        return part(self.got).to(self.work), part(self.want).to(self.work), magnitude

    def rms(self) -> float:
        """The root of the mean square of what was wanted, where the tolerance has a share of it."""
        if not self.tolerance.rms:
            return 0.0
        squares = [torch.nan_to_num(self.piece(start)[1], 0.0, 0.0, 0.0).square().sum() for start in self.starts]
        return self.tolerance.rms * math.sqrt(float(torch.stack(squares).sum()) / self.got.numel())

    def errors(self, start: int, rms: float) -> tuple[_Errors, torch.Tensor | None]:
        """The errors of one piece without what is infinite or NaN in it; where such an element is not what was wanted, if any is."""
        got, want, magnitude = self.piece(start)
        errors = _Errors.of(got, want, magnitude, self.tolerance, rms)
        if all(map(math.isfinite, errors.found)):
            return errors, None
        unusual = ~(got.isfinite() & want.isfinite())
        misplaced = unusual & (got != want) & ~(got.isnan() & want.isnan())
        kept = (got.masked_fill(unusual, 0.0), want.masked_fill(unusual, 0.0))
        return _Errors.of(*kept, magnitude, self.tolerance, rms), misplaced


def compare_close(name: str, got: torch.Tensor, expected: Expected, tolerance: Tolerance) -> Score:
    """By the error model. Complex outputs are compared as pairs of reals."""
    want, magnitude = expected.value, expected.magnitude if tolerance.magnitude else None
    if got.numel() == 0:
        return Score(name, 0.0, "empty")
    if tolerance.magnitude and magnitude is None:
        raise ValueError(f"output {name!r}: the tolerance scales with a magnitude that the oracle did not give")
    if got.is_complex():
        got, want = torch.view_as_real(got.contiguous()), torch.view_as_real(want.contiguous())
        if magnitude is not None:
            magnitude = magnitude.unsqueeze(-1)
    work = torch.float64 if want.dtype != torch.float32 else torch.float32
    whole = _Comparison(got, want, magnitude, tolerance, work)
    rms, starts = whole.rms(), whole.starts
    length = got.shape[-1] if got.dim() else 1
    found: list[tuple[float, float, float, float]] = []
    misplaced, first_misplaced = 0, 0
    for start in starts:
        errors, wrong = whole.errors(start, rms)
        if wrong is not None and (count := int(wrong.sum())):
            if not misplaced:
                first_misplaced = start * length + int(wrong.reshape(-1).to(torch.uint8).argmax())
            misplaced += count
        found.append(errors.found)
    if misplaced:
        detail = f"{misplaced} NaN or infinite elements not where the oracle has them"
        at = first_misplaced
        return Score(name, math.inf, detail, _index(at, got.shape), _number(got, at), _number(want, at))
    elements, error_norms, norms, rows = zip(*found, strict=True)
    limits = [("elementwise", 1.0, _largest(elements))]
    if tolerance.normwise is not None:
        size = math.hypot(*norms)
        limits.append(("normwise", tolerance.normwise, math.hypot(*error_norms) / size if size else 0.0))
    if tolerance.rowwise is not None and got.dim() > 0:
        limits.append(("rowwise", tolerance.rowwise, _largest(rows)))
    ratios = [value / limit for _, limit, value in limits]
    ratio = math.nan if any(map(math.isnan, ratios)) else max(ratios)
    which = next(number for number, value in enumerate(ratios) if math.isnan(value) or value == ratio)
    kind, limit, value = limits[which]
    if ratio <= 1.0:
        return Score(name, ratio, kind)
    detail = f"{kind}: relative error {value:.3g}, allowed {limit:.3g}"
    of_pieces = rows if kind == "rowwise" else elements
    start = starts[of_pieces.index(_largest(of_pieces))]
    errors, _ = whole.errors(start, rms)
    if kind == "rowwise":
        assert errors.rows is not None, "they are limited"
        return Score(name, ratio, detail, _index(start + int(errors.rows.reshape(-1).argmax()), got.shape[:-1]))
    worst = int(errors.elements.reshape(-1).argmax())
    if kind == "elementwise":
        error, bound = _number(errors.error, worst), _number(errors.bound.expand_as(errors.error), worst)
        detail = f"elementwise: error {error:.3g}, allowed {bound:.3g}"
    at = start * length + worst
    return Score(name, ratio, detail, _index(at, got.shape), _number(got, at), _number(want, at))


def _largest(values: Sequence[float]) -> float:
    """The first NaN, or else the largest."""
    return next(filter(math.isnan, values), max(values))


def _relative(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return (error / size).masked_fill_(size == 0, 0.0)


def score(problem: Problem, case: Case, got: Tree, expected: Tree, kind: str = "random") -> list[Score]:
    """A Score per output. ``got`` must have the right structure, shapes and dtypes (see :func:`type_mismatch`)."""
    exact = kind == INTEGER and problem.integer_exact
    if problem.compare is not None and not exact:
        return problem.compare(case, got, expected, kind)
    tolerances: Mapping[str, Tolerance] = problem.tolerance(case)
    got_leaves: list[torch.Tensor] = []
    map_leaves(got, got_leaves.append)
    scores = []
    for value, leaf in zip(got_leaves, expected_leaves(expected), strict=True):
        if leaf.exact:
            scores.append(compare_exact(leaf.name, value, leaf.value.to(leaf.dtype)))
        elif exact:  # a sum may come out as either zero: adding +0 makes both +0
            scores.append(compare_exact(leaf.name, value + 0.0, leaf.value.to(leaf.dtype) + 0.0))
        elif leaf.name in tolerances:
            scores.append(compare_close(leaf.name, value, leaf, tolerances[leaf.name]))
        else:
            known = ", ".join(tolerances) or "none"
            raise ValueError(
                f"output {leaf.name!r}: tolerance(case) has no entry for it, only for: {known}; add one, or let the oracle use exactly(...)"
            )
    return scores
