"""What the Ulysses exchanges and gathers share: the all-to-all from one axis to another, payloads, costs, wrong answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peerlane.problems import contract as pc
from peerlane.problems.families.collective import group_members


def exchange(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rank's block of scatter_dim (of as many equal ones as the group has ranks) of every rank's x, in rank order along gather_dim."""
    blocks = torch.stack(x.chunk(dist.get_world_size(group), dim=scatter_dim)).contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return torch.cat(received.unbind(), dim=gather_dim)


def kept_length(whole_length: int, unpadded_dim_size: int, ranks: int) -> int:
    """Positions of a gathered sequence that remain: a true length of 0 or a multiple of ``ranks`` cuts nothing."""
    return unpadded_dim_size if unpadded_dim_size % ranks else whole_length


def trimmed(whole: torch.Tensor, seq_dim: int, unpadded_dim_size: int, ranks: int) -> torch.Tensor:
    """The gathered sequence without its padding, a view."""
    return whole.narrow(seq_dim, 0, kept_length(whole.size(seq_dim), unpadded_dim_size, ranks))


def local_shape(shape: Sequence[int], ranks: int, *, times: int | None = None, over: int | None = None) -> tuple[int, ...]:
    """One rank's shape: the length of axis ``times`` multiplied by the group's size, that of axis ``over`` divided by it."""
    lengths = list(shape)
    if times is not None:
        lengths[times] *= ranks
    if over is not None:
        lengths[over] //= ranks
    return tuple(lengths)


def with_length(shape: Sequence[int], axis: int, length: int) -> tuple[int, ...]:
    """The shape with another length along one axis."""
    lengths = list(shape)
    lengths[axis] = length
    return tuple(lengths)


def payload(case: pc.Case, draw: pc.Draw, shape: Sequence[int]) -> torch.Tensor:
    """Random bits; ``case["permuted"]``: as a view whose axes lie in memory in reverse order."""
    if case.params.get("permuted"):
        return draw.bits(tuple(shape)[::-1], case.dtype).permute(*reversed(range(len(shape))))
    return draw.bits(shape, case.dtype)


def group_argument(case: pc.Case) -> pc.GroupRef | None:
    """The group that the case names; None is the world."""
    return pc.GroupRef(case["group"]) if "group" in case.params else None


def per_ranks(count: tuple[int, int], ranks: int) -> int:
    """A length or size given as (a, b), which stands for a * ranks + b."""
    return count[0] * ranks + count[1]


def gathering_cost(case: pc.Case, rank: int, shape: Sequence[int], seq_dim: int, unpadded_dim_size: int) -> pc.Cost:
    """Positions that will be cut need not be read, sent or written; they are the last ones, so the last ranks have less to send."""
    members = group_members(case, rank)
    ranks, me, local = len(members), members.index(rank), shape[seq_dim]
    position = torch.Size(shape).numel() // local * case.dtype.itemsize
    kept = kept_length(local * ranks, unpadded_dim_size, ranks)
    own = min(max(kept - me * local, 0), local)
    return pc.Cost(
        hbm_bytes=own * position + kept * position / ranks,
        egress_bytes=pc.traffic.all_to_all(own * position, ranks),
        ingress_bytes=(kept - own) * position / ranks,
    )


def _first_argument(case: pc.Case, rank: int, args: tuple[Any, ...]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    return tensor


@dataclass(frozen=True)
class Exchange:
    """The definition of an exchange problem, from which its oracle and its wrong answers are made.

    Attributes:
        scattered, gathered: what lies along the two axes, as names of known wrong answers use it.
        axes(case): scatter_dim and gather_dim.
        tensor(case, rank, args): what a rank exchanges.
        layout(case, tensor): the exchanged tensor in the output's layout; the gathered axis stays in its place.
        unpadded(case, rank): the true length of the gathered axis, as in :func:`kept_length`.
    """

    scattered: str
    gathered: str
    axes: Callable[[pc.Case], tuple[int, int]]
    tensor: Callable[[pc.Case, int, tuple[Any, ...]], torch.Tensor] = _first_argument
    layout: Callable[[pc.Case, torch.Tensor], torch.Tensor] = lambda case, tensor: tensor
    unpadded: Callable[[pc.Case, int], int] = lambda case, rank: 0

    def tensors(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
        """What every member of the rank's group exchanges, in group order."""
        return [self.tensor(case, source, inputs[source]) for source in group_members(case, rank)]

    def blocks(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
        """What the rank gets from every member of its group."""
        scatter_dim, _ = self.axes(case)
        members = group_members(case, rank)
        return [tensor.chunk(len(members), scatter_dim)[members.index(rank)] for tensor in self.tensors(case, inputs, rank)]

    def finished(self, case: pc.Case, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """The output, from the blocks put together."""
        members, (_, gather_dim) = group_members(case, rank), self.axes(case)
        return trimmed(self.layout(case, whole), gather_dim, self.unpadded(case, rank), len(members))

    def joined(self, case: pc.Case, rank: int, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output, from blocks that follow one another along the gathered axis."""
        return self.finished(case, rank, torch.cat(list(blocks), self.axes(case)[1]))

    def answer(self, case: pc.Case, inputs: pc.Inputs, rank: int) -> torch.Tensor:
        """The right output."""
        return self.joined(case, rank, self.blocks(case, inputs, rank))

    def known_wrong_answers(
        self, *, strided: tuple[str, ...] | None = None, interleaved: tuple[str, ...] | None = None
    ) -> tuple[pc.KnownWrongAnswer, ...]:
        """Wrong answers of every exchange.

        The arguments name the cases in which they are wrong (None: in all): blocks must be longer than one along the scattered or the
        gathered axis.
        """
        return (
            pc.wrong(
                f"strided_{self.scattered}", f"{self.scattered} r, r + W, r + 2 W ... instead of consecutive ones", self._strided, strided
            ),
            pc.wrong(f"interleaved_{self.gathered}", f"{self.gathered}: one of every rank in turn", self._interleaved, interleaved),
        )

    def trimming_wrong_answers(self, padded: tuple[str, ...]) -> tuple[pc.KnownWrongAnswer, ...]:
        """Wrong answers about padding, for the cases that have some, and for ``multiple_bf16``, whose true length is a multiple of W."""
        return (
            pc.wrong("trimming_forgotten", "padding still there", self._untrimmed, padded),
            pc.wrong("trimmed_in_front", "as many tokens cut, but the first ones", self._trimmed_in_front, padded),
            pc.wrong(
                "trimmed_although_multiple",
                "cut to a true length that is a multiple of W",
                self._trimmed_although_multiple,
                ("small/multiple_bf16",),
            ),
        )

    def _strided(self, context: pc.AnswerContext) -> torch.Tensor:
        scatter_dim, _ = self.axes(context.case)
        parts = []
        for tensor in self.tensors(context.case, context.inputs, context.rank):
            places = torch.arange(context.place, tensor.size(scatter_dim), len(context.members), device=tensor.device)
            parts.append(tensor.index_select(scatter_dim, places))
        return self.joined(context.case, context.rank, parts)

    def _interleaved(self, context: pc.AnswerContext) -> torch.Tensor:
        blocks = self.blocks(context.case, context.inputs, context.rank)
        axis = self.axes(context.case)[1] % blocks[0].dim()
        return self.finished(context.case, context.rank, torch.stack(blocks, axis + 1).flatten(axis, axis + 1))

    def _untrimmed(self, context: pc.AnswerContext) -> torch.Tensor:
        blocks = self.blocks(context.case, context.inputs, context.rank)
        return self.layout(context.case, torch.cat(blocks, self.axes(context.case)[1]))

    def _trimmed_in_front(self, context: pc.AnswerContext) -> torch.Tensor:
        whole, seq_dim = self._untrimmed(context), self.axes(context.case)[1]
        kept = context.answer.size(seq_dim)
        return whole.narrow(seq_dim, whole.size(seq_dim) - kept, kept)

    def _trimmed_although_multiple(self, context: pc.AnswerContext) -> torch.Tensor:
        answer: torch.Tensor = context.answer
        return answer.narrow(self.axes(context.case)[1], 0, self.unpadded(context.case, context.rank))


def members_tensors(case: pc.Case, inputs: pc.Inputs, rank: int) -> list[torch.Tensor]:
    """The first argument of every member of the rank's group, in group order."""
    return [inputs[source][0] for source in group_members(case, rank)]


def unpadded(case: pc.Case, rank: int) -> int:
    """The sequence's length without padding; 0: there is none."""
    return per_ranks(case.params.get("unpadded", (0, 0)), len(group_members(case, rank)))
