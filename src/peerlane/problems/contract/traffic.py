"""Bytes that leave and enter each member of a group in a collective, at least: for cost models."""


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
