"""Bytes that leave and enter each member of a group in a collective, at least, and those that are read again: for cost models."""

ON_CHIP_BYTES = 128 * 2**20
"""What a GPU can hold from one pass to the next: L2, shared memory and registers of an H200, rounded up."""


def read_again(payload: float) -> float:
    """Returns the bytes of a second pass over ``payload`` bytes that needs a number made by the whole first one."""
    return max(0, payload - ON_CHIP_BYTES)


def all_reduce(payload: float, members: int) -> float:
    """Returns the bytes for a tensor of ``payload`` bytes on every member: its reduce-scatter and the all-gather of the sum."""
    return 2 * (members - 1) / members * payload


def all_gather(result: float, members: int) -> float:
    """Returns the bytes for gathering equal shards to ``result`` bytes on every member."""
    return (members - 1) / members * result


def reduce_scatter(payload: float, members: int) -> float:
    """Returns the bytes for a tensor of ``payload`` bytes on every member, each of which gets an equal shard of the sum."""
    return (members - 1) / members * payload


def all_to_all(payload: float, members: int) -> float:
    """Returns the bytes for ``payload`` bytes on every member, an equal part of which is for each member."""
    return (members - 1) / members * payload
