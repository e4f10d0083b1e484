"""Comparison of what the ranks of a group call, for debugging: ``PEERLANE_CHECK=1``."""

import torch
import torch.distributed as dist

from peerlane import settings
from peerlane.errors import UsageError
from peerlane.ops.groups import caller_place, kit_group, process_group, world_size


def same_call(name: str, group: str, *tensors: torch.Tensor) -> None:
    """Raises UsageError on all ranks of ``group`` unless every rank makes this call with tensors of these shapes and dtypes.

    Does nothing unless PEERLANE_CHECK=1. The message has each rank's call and the place that it comes from."""
    if not settings.checks_calls() or world_size(group) == 1:
        return
    mode = " in the batch-invariant mode" if settings.batch_invariant() else ""
    call = f"{name}({', '.join(f'{tuple(tensor.shape)} {tensor.dtype}' for tensor in tensors)})".replace("torch.", "") + mode
    kit = kit_group(tensors[0], group)
    if kit is not None and kit.check_call is not None:
        kit.check_call(call)  # which also tells groups whose calls come in another order, and does not wait for them
        return
    if kit is None:
        calls: list[list[str]] = [[]] * world_size(group)
        dist.all_gather_object(calls, [call, caller_place()], group=process_group(group))
    else:
        calls = kit.exchange([call, caller_place()])
    if len({other for other, _ in calls}) > 1:
        listed = "\n".join(f"  rank {rank}: {other} at {place}" for rank, (other, place) in enumerate(calls))
        raise UsageError(f"the ranks of a group made different calls:\n{listed}\nexpected the same call, shapes and dtypes on all ranks")


def no_kernel(name: str, group: str, *tensors: torch.Tensor) -> None:
    """Raises UsageError in the batch-invariant mode, for an operator that torch is about to compute. Sizes of 0 are no matter."""
    if settings.batch_invariant() and all(tensor.numel() for tensor in tensors):
        given = ", ".join(f"{tuple(tensor.shape)} in {tensor.dtype}" for tensor in tensors)
        raise UsageError(
            f"{name} got {given} on {tensors[0].device.type} in a group of {world_size(group)}: no kernel of the kit with the same bits in "
            "every batch serves it, which the batch-invariant mode expects; see docs/batch-invariance.md, or ops.set_batch_invariant(False)"
        )
