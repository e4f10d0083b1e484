"""Gaussians projected and exchanged: the rows of one rank's answer, and right and wrong ways to compute them.

See :mod:`peerlane.problems.p061_gaussian_splat_projection_exchange` for the arguments and the order of rows and outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import FP32, FP64
from peerlane.problems.families.splat import Projection, project, project_covariances

Outputs = tuple[torch.Tensor, ...]


@dataclass
class Rows:
    """Rows of one rank's answer, in float64: source, camera, Gaussian within the source, and what is projected of it."""

    source: torch.Tensor
    camera: torch.Tensor
    gaussian: torch.Tensor
    extents: torch.Tensor
    means2d: torch.Tensor
    depths: torch.Tensor
    conics: torch.Tensor
    spread: torch.Tensor
    position_spread: torch.Tensor
    depth_spread: torch.Tensor
    determinant: torch.Tensor
    trace: torch.Tensor
    smallest: torch.Tensor


def _projection(args: tuple[Any, ...], viewer: tuple[Any, ...], camera: int, dtype: torch.dtype, **changes: Any) -> Projection:
    """One camera's view of a rank's Gaussians."""
    means, quats, scales = (tensor.to(dtype) for tensor in args[:3])
    one = slice(camera, camera + 1)
    width, height, eps2d, near, far, _ = viewer[7:]
    kept = {"width": width, "height": height, "eps2d": eps2d, "near": near, "far": far, **changes}
    return project(means, quats, scales, viewer[5][one].to(dtype), viewer[6][one].to(dtype), **kept)


def visible_rows(inputs: pc.Inputs, rank: int, dtype: torch.dtype = FP64, **changes: Any) -> Rows:
    """What the rank's cameras see, by source, camera and Gaussian. ``changes`` (wrong) apply to what is seen, not to whether it is."""
    viewer, parts = inputs[rank], []
    for source, args in enumerate(inputs):
        for camera in range(len(viewer[5])):
            view = _projection(args, viewer, camera, FP64)
            extents = view.extents()
            seen = view.visible(extents.ceil(), *viewer[7:9])[0].nonzero().squeeze(1)
            if changes or dtype != FP64:
                view = _projection(args, viewer, camera, dtype, **changes)
                extents = view.extents()
            place = torch.full_like(seen, source), torch.full_like(seen, camera), seen
            a, _, c = view.covariance[0, seen].unbind(-1)
            values = (
                extents, view.means2d, view.depths, view.conics(), view.spread, view.position_spread, view.depth_spread, view.determinant()
            )  # fmt: skip
            parts.append((*place, *(value[0, seen] for value in values), a + c, torch.minimum(a, c)))
    return Rows(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _first_of(inputs: pc.Inputs, device: torch.device) -> torch.Tensor:
    """(W,): how many Gaussians the ranks before each have."""
    counts = torch.tensor([len(args[0]) for args in inputs], device=device)
    return counts.cumsum(0) - counts


def copied(inputs: pc.Inputs, rows: Rows, argument: int) -> torch.Tensor:
    """Rows of an argument that is sent as it is."""
    first = _first_of(inputs, rows.source.device)
    return torch.cat([args[argument] for args in inputs])[first[rows.source] + rows.gaussian]


def numbers_of(case: pc.Case, inputs: pc.Inputs, rank: int, rows: Rows) -> torch.Tensor:
    first = _first_of(inputs, rows.source.device)
    return rows.gaussian + (first[rank] if case.variant == "pkb" else first[rows.source])


def _assembled(case: pc.Case, inputs: pc.Inputs, rank: int, rows: Rows, numbers: torch.Tensor | None = None) -> Outputs:
    """Rows as a candidate would return them."""
    ids = numbers_of(case, inputs, rank, rows) if numbers is None else numbers
    radii = rows.extents.ceil().to(torch.int32)
    reals = (rows.means2d.to(FP32), rows.depths.to(FP32), rows.conics.to(FP32))
    return (rows.camera, ids, radii, *reals, copied(inputs, rows, 3), copied(inputs, rows, 4))


def factored(case: pc.Case, inputs: pc.Inputs, rank: int) -> Outputs:
    return _assembled(case, inputs, rank, visible_rows(inputs, rank, FP32))


def by_covariances(case: pc.Case, inputs: pc.Inputs, rank: int) -> Outputs:
    """Every source's Gaussians projected where their camera is, from covariances in float32."""
    viewer, parts = inputs[rank], []
    first = _first_of(inputs, viewer[0].device)
    for source, args in enumerate(inputs):
        radii, means2d, depths, conics = project_covariances(*args[:3], *viewer[5:12])
        camera, gaussian = (radii > 0).all(-1).nonzero(as_tuple=True)
        at = (camera, gaussian)
        ids = gaussian + first[rank if case.variant == "pkb" else source]
        parts.append((camera, ids, radii[at], means2d[at], depths[at], conics[at], args[3][gaussian], args[4][gaussian]))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def projected_wrongly(**changes: Any) -> Callable[[pc.AnswerContext], Outputs]:
    return lambda context: _assembled(context.case, context.inputs, context.rank, visible_rows(context.inputs, context.rank, **changes))


def with_arguments(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[pc.AnswerContext], Outputs]:
    """The right rows, but values projected from arguments that ``change`` has spoilt."""

    def answer(context: pc.AnswerContext) -> Outputs:
        right, viewer = visible_rows(context.inputs, context.rank), context.args
        views = [[_projection(change(args), viewer, camera, FP64) for camera in range(len(viewer[5]))] for args in context.inputs]
        conics, extents = torch.empty_like(right.conics), torch.empty_like(right.extents)
        for source, of_source in enumerate(views):
            for camera, view in enumerate(of_source):
                chosen = (right.source == source) & (right.camera == camera)
                conics[chosen], extents[chosen] = view.conics()[0, right.gaussian[chosen]], view.extents()[0, right.gaussian[chosen]]
        outputs = list(context.answer)
        outputs[2], outputs[5] = extents.ceil().to(torch.int32), conics.to(FP32)
        return tuple(outputs)

    return answer


def numbered(number: Callable[[pc.AnswerContext, Rows, torch.Tensor], torch.Tensor]) -> Callable[[pc.AnswerContext], Outputs]:
    """The right answer but for the Gaussians' numbers: ``number(context, rows, first Gaussian of every rank)``."""

    def answer(context: pc.AnswerContext) -> Outputs:
        rows = visible_rows(context.inputs, context.rank)
        first = _first_of(context.inputs, rows.source.device)
        return _assembled(context.case, context.inputs, context.rank, rows, number(context, rows, first))

    return answer


def reordered(key: Callable[[Rows], Sequence[torch.Tensor]]) -> Callable[[pc.AnswerContext], Outputs]:
    """The right rows in another order: by ``key``, first entry first."""

    def answer(context: pc.AnswerContext) -> Outputs:
        order = torch.arange(len(context.answer[0]), device=context.answer[0].device)
        for column in reversed(key(visible_rows(context.inputs, context.rank))):
            order = order[column[order].argsort(stable=True)]
        return tuple(output[order] for output in context.answer)

    return answer


def world_cameras(context: pc.AnswerContext) -> Outputs:
    return (context.answer[0] + context.rank * context.case["cameras"], *context.answer[1:])
