"""Which kernel a collective uses for a size, with which grid: pure functions of what all ranks know, so that all ranks plan alike.

The limits come from a model (packets carry a third more bytes than data, a port takes in 343 GB/s) and from what was measured on 4x H200:
packets move 270 GB/s of data through a port, and a ring takes about 25 us before it flows.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerlane.device import workspace
from peerlane.device.workspace import RINGS, Rings

ONE_SHOT_EXCESS_BYTES = 512 << 10
"""Bytes per port that a second trip over the link is worth: about 1.5 us at 343 GB/s."""
PORT_PACKET_LIMIT_BYTES = 6 << 20
"""Most data that one port takes in or sends out as packets, where the packet buffers hold it: about as long as a ring takes to start."""


@dataclass(frozen=True)
class Plan:
    """One launch of a kernel of ``kernels.KERNELS``."""

    kernel: str
    grid: int
    block: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """What a plan depends on besides sizes: ranks, the smallest number of SMs of any of them, and how rings are laid out."""

    world_size: int
    sm_count: int
    rings: Rings = RINGS


def all_reduce(nbytes: int, machine: Machine) -> Plan:
    """``nbytes`` > 0 on every rank."""
    if nbytes > workspace.PACKET_LIMIT_BYTES:
        return _ring("all_reduce_relay", machine)
    packets = _packets(nbytes)
    others = machine.world_size - 1
    # Per port, one shot sends (W - 1) S and two shots 2 (W - 1) / W S, each times 4 / 3.
    excess = others * (1 - 2 / machine.world_size) * packets * workspace.PACKET_BYTES
    if excess <= ONE_SHOT_EXCESS_BYTES:
        return Plan("all_reduce_one_shot", *_spread(packets, machine))
    return Plan("all_reduce_two_shot", *_spread(-(-packets // machine.world_size), machine))


def broadcast(nbytes: int, machine: Machine) -> Plan:
    """``nbytes`` > 0 from one rank to all."""
    if machine.world_size == 2:  # nobody to share the work with
        return _messages("exchange_packets", "exchange_ring", nbytes, machine)
    return _rooted("exchange_packets", "broadcast_two_shot", "broadcast_relay", nbytes, machine)


def reduce(nbytes: int, machine: Machine) -> Plan:
    """``nbytes`` > 0 of every rank summed on one."""
    if machine.world_size == 2:
        return _messages("reduce_packets", "reduce_ring", nbytes, machine)
    return _rooted("reduce_packets", "reduce_two_shot", "reduce_relay", nbytes, machine)


def exchange(message: int, machine: Machine) -> Plan:
    """Messages of ``message`` > 0 bytes from or to every other rank at the busiest port: all-gather, all-to-all, gather, scatter."""
    return _messages("exchange_packets", "exchange_ring", message, machine)


def reduce_scatter(shard: int, machine: Machine) -> Plan:
    """Sums of ``shard`` > 0 bytes on every rank."""
    return _messages("reduce_packets", "reduce_ring", shard, machine)


def uneven_exchange(machine: Machine) -> Plan:
    """Messages whose lengths only their two ends know: by rings, whatever they are."""
    return _ring("exchange_ring", machine)


def _messages(packets: str, ring: str, message: int, machine: Machine) -> Plan:
    at_port = (machine.world_size - 1) * message
    if at_port <= PORT_PACKET_LIMIT_BYTES and message <= workspace.packet_message_bytes(machine.world_size):
        return Plan(packets, *_spread(_packets(message), machine))
    return _ring(ring, machine)


def _rooted(one_trip: str, two_trips: str, relay: str, nbytes: int, machine: Machine) -> Plan:
    others = machine.world_size - 1
    # Through the root's port, one trip takes (W - 1) S and two trips S, each times 4 / 3.
    if (others - 1) * _packets(nbytes) * workspace.PACKET_BYTES <= ONE_SHOT_EXCESS_BYTES:
        return Plan(one_trip, *_spread(_packets(nbytes), machine))
    share = -(-_packets(nbytes) // others)
    if nbytes <= PORT_PACKET_LIMIT_BYTES and share * workspace.PACKET_DATA_BYTES <= workspace.packet_message_bytes(machine.world_size):
        return Plan(two_trips, *_spread(share, machine))
    return _ring(relay, machine)


def _packets(nbytes: int) -> int:
    return -(-nbytes // workspace.PACKET_DATA_BYTES)


def _ring(kernel: str, machine: Machine) -> Plan:
    rings = machine.rings
    threads, shared_bytes = {
        "reduce_ring": (rings.reduce_threads, rings.reduce_shared_bytes),
        "all_reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
        "reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
    }.get(kernel, (rings.exchange_threads, rings.exchange_shared_bytes))
    return Plan(kernel, min(rings.exchange_blocks(machine.world_size), machine.sm_count), threads, shared_bytes)


def _spread(items: int, machine: Machine) -> tuple[int, int]:
    """Grid and block for ``items`` threads' work: small blocks on many SMs, at most one block per SM."""
    block = next((threads for threads in (128, 256, 512) if items <= threads * machine.sm_count), 512)
    return min(-(-items // block), machine.sm_count), block
