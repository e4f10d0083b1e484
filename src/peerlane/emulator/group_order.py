"""The order that collectives of some ranks make, as signals among all ranks' launches: torch's symmetric memory sends them too."""

from collections.abc import Collection
from typing import Any

import torch

from peerlane.emulator.host_memory import Part
from peerlane.emulator.job import Launch
from peerlane.emulator.sequence import Code, Step
from peerlane.emulator.stream_kernels import ALL, BARRIER, NONE, SIGNALS


def order_ranks(team: Any, pairs: Collection[tuple[int, int]] | None = None) -> None:
    """Orders what all ranks of a group have done before what they do from now on; with ``pairs`` of a sender and a receiver only what a
    sender has done before what its receivers do."""
    everyone, space = team.world.team(range(team.world.size)), team.world.space
    if pairs is not None and not pairs:
        return
    for other in team.world.teams:  # kernels of the kit know no signals
        if other is not everyone and len(set(other.members) & set(team.members)) > 1:
            other.sequence.barrier(space.placed)
    if pairs is None and team is everyone:
        everyone.sequence.barrier(space.placed)
        return
    if not team.order:
        team.order = [_part(team, member, bytes(4 * len(team.members))) for member in team.members]
        table = b"".join(pad.address.to_bytes(8, "little") for pad in team.order)
        team.order += [_part(team, member, table) for member in team.members]
    launches = []
    of_pairs = [ask for sender, receiver in pairs or () for ask in ((sender, receiver, NONE), (receiver, NONE, sender))]
    for rank, target, source in [(rank, ALL, ALL) for rank in range(len(team.members))] if pairs is None else of_pairs:
        numbers = (0, rank, len(team.members), target, source)
        arguments = (
            team.order[len(team.members) + rank].address.to_bytes(8, "little"),
            *(number.to_bytes(4, "little") for number in numbers),
        )
        launches.append(Launch(Code(SIGNALS).symbol(BARRIER), team.members[rank], 0, (1, 1, 1), (32, 1, 1), 0, 1, arguments))
    step = Step(launches, {part: part.contents() for part in team.order})
    everyone.sequence.signal(SIGNALS, step, space.placed)


def _part(team: Any, member: int, content: bytes) -> Part:
    """Returns memory of a rank that the host never sees."""
    memory, space = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone(), team.world.space
    part = Part("signals of a collective", member, space.address_of_new(memory), memory, symmetric=True)
    part.show()
    space.place(part)
    return part
