"""The kernel and the grid of a collective for a size: pure functions of what all ranks know, so that all ranks plan alike.

The limits come from a model (packets carry a third more bytes than data) and from the sweeps in results/h200x4 and results/h200x2:
collectives.json compares the kernels by size, and rings.json the settings of rings.
"""

from dataclasses import dataclass

from peerlane.device.collectives import workspace
from peerlane.device.collectives.kernels import ROUNDS
from peerlane.device.collectives.workspace import RINGS, Rings

ONE_SHOT_EXCESS_BYTES = 512 << 10
"""Bytes per port that a second trip over the link is worth: about 1.5 us at 343 GB/s."""
PORT_PACKET_LIMIT_BYTES = 24 << 20
"""Most data of an exchange that one port takes in or sends out as packets, in as many rounds as that takes. Of two ranks, packets take
what fits at once."""
ROOTED_PACKET_LIMIT_BYTES = 6 << 20
"""The same where all is for one rank, or from one."""
TWO_SHOT_LIMIT_BYTES = 16 << 20
"""Largest tensor that goes by packets in two trips, in as many rounds as that takes; of two ranks by stores."""
STAGED_FROM_BYTES, STAGED_LIMIT_BYTES = workspace.PACKET_BUFFER_TENSOR_BYTES, TWO_SHOT_LIMIT_BYTES
"""Sizes between which sums of two ranks are staged: packets are ahead below, and rings above (results/h100x2/layers.jsonl)."""
STAGED = "all_reduce_staged"
"""The kernel whose memory is an arena of its own, made when a tensor first needs it."""


@dataclass(frozen=True)
class Plan:
    """One launch of a kernel of ``kernels.KERNELS``."""

    kernel: str
    grid: int
    block: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """The facts that a plan depends on besides sizes: ranks, the smallest number of SMs of any of them, and how rings are laid out."""

    world_size: int
    sm_count: int
    rings: Rings = RINGS

    @property
    def staged_bytes(self) -> int:
        """The largest all-reduce that is staged; 0 if none is."""
        return STAGED_LIMIT_BYTES if self.world_size == 2 else 0


def all_reduce(nbytes: int, machine: Machine, *, packets_fit: bool = True, staged: bool = True) -> Plan:
    """Plans a sum of ``nbytes`` > 0 on every rank. ``packets_fit``: no element lies in two packets; else sums take rings. ``staged``: the
    caller has memory for staged sums."""
    if staged and STAGED_FROM_BYTES < nbytes <= machine.staged_bytes:
        return Plan(STAGED, machine.sm_count, 512)
    if not packets_fit:
        return _ring("all_reduce_relay", machine)
    packets = _packets(nbytes)
    others = machine.world_size - 1
    # Per port, one shot sends (W - 1) S and two shots 2 (W - 1) / W S, each times 4 / 3.
    excess = others * (1 - 2 / machine.world_size) * packets * workspace.PACKET_BYTES
    if excess <= ONE_SHOT_EXCESS_BYTES and packets <= _room(machine):
        return Plan("all_reduce_one_shot", *_spread(packets, machine))
    if nbytes <= TWO_SHOT_LIMIT_BYTES and machine.world_size > 2:
        # Places for terms, and as many for sums.
        return _by_packets("all_reduce_two_shot", -(-packets // machine.world_size), _room(machine) // 2, machine)
    return _ring("all_reduce_relay", machine)


def broadcast(nbytes: int, machine: Machine) -> Plan:
    """Plans the move of ``nbytes`` > 0 from one rank to all."""
    if machine.world_size == 2:  # nobody to share the work with
        return rooted_exchange(nbytes, machine)
    return _rooted("exchange_packets", "broadcast_two_shot", "broadcast_relay", nbytes, machine)


def reduce(nbytes: int, machine: Machine, *, packets_fit: bool = True) -> Plan:
    """Plans the sum of every rank's ``nbytes`` > 0 on one."""
    if not packets_fit:
        return _ring("reduce_ring" if machine.world_size == 2 else "reduce_relay", machine)
    if machine.world_size == 2:
        return _messages("reduce_packets", "reduce_ring", nbytes, machine, ROOTED_PACKET_LIMIT_BYTES)
    return _rooted("reduce_packets", "reduce_two_shot", "reduce_relay", nbytes, machine)


def exchange(message: int, machine: Machine) -> Plan:
    """Plans messages of ``message`` > 0 bytes from every rank to every other one: all-gather, all-to-all."""
    return _messages("exchange_packets", "exchange_ring", message, machine)


def rooted_exchange(message: int, machine: Machine) -> Plan:
    """Plans messages of ``message`` > 0 bytes to one rank from every other one, or from one to every other: gather, scatter."""
    return _messages("exchange_packets", "exchange_ring", message, machine, ROOTED_PACKET_LIMIT_BYTES)


def reduce_scatter(shard: int, machine: Machine, *, packets_fit: bool = True) -> Plan:
    """Plans sums of ``shard`` > 0 bytes on every rank."""
    if not packets_fit:
        return _ring("reduce_ring", machine)
    return _messages("reduce_packets", "reduce_ring", shard, machine)


def uneven_exchange(machine: Machine) -> Plan:
    """Plans messages whose lengths only their two ends know: by rings, whatever they are."""
    return _ring("exchange_ring", machine)


def _messages(packets: str, ring: str, message: int, machine: Machine, limit_bytes: int = PORT_PACKET_LIMIT_BYTES) -> Plan:
    at_port, room = (machine.world_size - 1) * message, _room(machine)
    if at_port <= limit_bytes if machine.world_size > 2 else _packets(message) <= room:
        return _by_packets(packets, _packets(message), room, machine)
    return _ring(ring, machine)


def _rooted(one_trip: str, two_trips: str, relay: str, nbytes: int, machine: Machine) -> Plan:
    others = machine.world_size - 1
    # Through the root's port, one trip takes (W - 1) S and two trips S, each times 4 / 3.
    if (others - 1) * _packets(nbytes) * workspace.PACKET_BYTES <= ONE_SHOT_EXCESS_BYTES:
        return Plan(one_trip, *_spread(_packets(nbytes), machine))
    if nbytes <= TWO_SHOT_LIMIT_BYTES:
        return _by_packets(two_trips, -(-_packets(nbytes) // others), _room(machine), machine)
    return _ring(relay, machine)


def _by_packets(kernel: str, packets: int, room: int, machine: Machine) -> Plan:
    """Plans messages of at most ``packets`` packets, where ``room`` fit at a time."""
    return Plan(kernel if packets <= room else kernel + ROUNDS, *_spread(packets, machine))


def _room(machine: Machine) -> int:
    """Returns how many packets of one source a packet buffer holds."""
    return workspace.packet_message_bytes(machine.world_size) // workspace.PACKET_DATA_BYTES


def _packets(nbytes: int) -> int:
    return -(-nbytes // workspace.PACKET_DATA_BYTES)


def _ring(kernel: str, machine: Machine) -> Plan:
    rings = machine.rings
    threads, shared_bytes = {
        "reduce_ring": (rings.reduce_threads, rings.reduce_shared_bytes),
        "all_reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
        "reduce_relay": (rings.relay_threads, rings.relay_shared_bytes),
        "broadcast_relay": (rings.broadcast_threads, rings.broadcast_shared_bytes),
    }.get(kernel, (rings.exchange_threads, rings.exchange_shared_bytes))
    return Plan(kernel, min(rings.exchange_blocks(machine.world_size), machine.sm_count), threads, shared_bytes)


def _spread(items: int, machine: Machine) -> tuple[int, int]:
    """Returns grid and block for ``items`` threads' work: small blocks on many SMs, at most one block per SM."""
    block = next((threads for threads in (128, 256, 512) if items <= threads * machine.sm_count), 512)
    return min(-(-items // block), machine.sm_count), block
