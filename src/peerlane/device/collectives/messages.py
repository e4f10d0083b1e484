"""The messages of each collective: pure functions from sizes to :class:`Messages`, in bytes.

An *exchange* takes every message to its place; a *sum* adds the messages from all ranks. Ranks are numbered within the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from peerlane.device.collectives.workspace import Messages


@dataclass(frozen=True)
class Member:
    """One rank of a group."""

    rank: int
    world_size: int


def all_gather(member: Member, shard: int) -> Messages:
    """Sends the own ``shard`` bytes to everybody; rank q's go to place q."""
    return all_gather_parts(member, [shard] * member.world_size)


def all_gather_parts(member: Member, sizes: Sequence[int]) -> Messages:
    """Sends the own ``sizes[rank]`` bytes to everybody; rank q's ``sizes[q]`` go behind those of the ranks before it."""
    return _messages([0] * member.world_size, [sizes[member.rank]] * member.world_size, _starts(sizes), sizes)


def reduce_scatter_parts(member: Member, sizes: Sequence[int]) -> Messages:
    """Sends part q, of ``sizes[q]`` bytes, to rank q: terms of a sum that goes to the start of the output."""
    return _messages(_starts(sizes), sizes, [0] * member.world_size, [sizes[member.rank]] * member.world_size)


def all_to_all(sends: Sequence[int], receives: Sequence[int]) -> Messages:
    """Sends ``sends[q]`` bytes to rank q and gets ``receives[q]`` from it, one behind the other on both sides."""
    return _messages(_starts(sends), sends, _starts(receives), receives)


def parts(sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]) -> Messages:
    """Describes messages by begin and length of what goes to each rank, and of what comes from it."""
    return _messages(*zip(*sends, strict=True), *zip(*receives, strict=True))


def broadcast(member: Member, nbytes: int, root: int) -> Messages:
    """Sends the root's ``nbytes`` to everybody, itself included."""
    starts, sent = [0] * member.world_size, [nbytes if member.rank == root else 0] * member.world_size
    return _messages(starts, sent, starts, _only(member, nbytes, root))


def gather(member: Member, shard: int, root: int) -> Messages:
    """Sends everybody's ``shard`` bytes to the root, rank q's to place q."""
    parts = [shard if member.rank == root else 0] * member.world_size
    return _messages([0] * member.world_size, _only(member, shard, root), _starts(parts), parts)


def scatter(member: Member, shard: int, root: int) -> Messages:
    """Sends the root's q-th ``shard`` bytes to rank q."""
    parts = [shard if member.rank == root else 0] * member.world_size
    return _messages(_starts(parts), parts, [0] * member.world_size, _only(member, shard, root))


def reduce_scatter(member: Member, shard: int) -> Messages:
    """Sends the q-th ``shard`` bytes to rank q, terms of a sum that goes to the start of the output."""
    return reduce_scatter_parts(member, [shard] * member.world_size)


def reduce(member: Member, nbytes: int, root: int) -> Messages:
    """Sends all ``nbytes`` to the root, terms of a sum there; elsewhere to the rank itself, as they are."""
    starts, received = [0] * member.world_size, [nbytes if member.rank == root else 0] * member.world_size
    return _messages(starts, _only(member, nbytes, root, member.rank), starts, received)


def _only(member: Member, nbytes: int, *ranks: int) -> list[int]:
    """Returns ``nbytes`` for these ranks, and none for the others."""
    return [nbytes if q in ranks else 0 for q in range(member.world_size)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]


def _messages(send_at: Sequence[int], send_bytes: Sequence[int], receive_at: Sequence[int], receive_bytes: Sequence[int]) -> Messages:
    messages = Messages()
    for name, values in (("send_at", send_at), ("send_bytes", send_bytes), ("receive_at", receive_at), ("receive_bytes", receive_bytes)):
        array = getattr(messages, name)
        for q, value in enumerate(values):
            array[q] = value
    return messages
