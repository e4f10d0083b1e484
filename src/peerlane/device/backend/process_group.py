"""The process group of the backend: torch.distributed's operations in terms of the kit's and of NCCL's and gloo's."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from peerlane.device.backend import kit
from peerlane.device.backend.kit import Collectives
from peerlane.device.backend.ordering import JointWork
from peerlane.device.backend.routing import LIBRARIES, RoutedGroup, c10d, options
from peerlane.device.collectives.point_to_point import Transfer
from peerlane.device.host.tally import count
from peerlane.errors import UsageError

NOT_SHARED = "the kit serves messages of groups whose ranks share GPUs"
ANY_SOURCE = "a receive from any rank; the kit serves those that name it"


@dataclass
class _Batch:
    """The calls of one ``batch_isend_irecv``, which the kit or NCCL gets as one."""

    operations: Sequence[Any]
    issued: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    """for the kit, with their tensors"""
    tensors: list[torch.Tensor] = field(default_factory=list)
    joint: JointWork = field(default_factory=lambda: JointWork([]))


class PeerlaneGroup(RoutedGroup):
    """A group whose collectives run on the kit where it serves them. Its children are ordinary gloo and NCCL groups."""

    _batch: _Batch | None = None

    # ---- sums ------------------------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.AllreduceOptions)
        (tensor,) = _one(tensors, "all_reduce")
        reduction, refusal = kit.reduction(opts.reduceOp, tensor.dtype)
        if (served := self._served("all_reduce", tensor, refusal)) is not None:
            return self._on_kit("all_reduce", lambda: served.all_reduce(kit.flat(tensor), reduction=reduction), tensors, opts)
        return self._on_child(tensor, lambda child: child.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.AllreduceCoalescedOptions)
        alike = _like(c10d.AllreduceOptions(), opts)
        return self._spanned("all_reduce", tensors, lambda: JointWork([self.allreduce([tensor], alike) for tensor in tensors]))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.ReduceOptions)
        (tensor,) = _one(tensors, "reduce")
        reduction, refusal = kit.reduction(opts.reduceOp, tensor.dtype)
        if (served := self._served("reduce", tensor, refusal)) is not None:
            return self._on_kit("reduce", lambda: served.reduce(kit.flat(tensor), opts.rootRank, reduction=reduction), tensors, opts)
        return self._on_child(tensor, lambda child: child.reduce(tensors, opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = options(opts, c10d.ReduceScatterOptions)
        reduction, refusal = kit.reduction(opts.reduceOp, input.dtype)
        if (served := self._served("reduce_scatter_single", input, refusal)) is not None:
            call = lambda: served.reduce_scatter_tensor(output, input, reduction=reduction)  # noqa: E731
            return self._on_kit("reduce_scatter_single", call, [output, input], opts, [input])
        return self._on_child(input, lambda child: child._reduce_scatter_base(output, input, opts))

    def reduce_scatter_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._spanned(
            "reduce_scatter_single", inputs, lambda: JointWork([self.reduce_scatter_single(*pair, opts) for pair in pairs])
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = options(opts, c10d.ReduceScatterOptions)
        (output,), (parts,) = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        reduction, refusal = kit.reduction(opts.reduceOp, output.dtype)
        if (served := self._served("reduce_scatter", output, refusal)) is not None:
            call = lambda: kit.reduce_scatter(served, output, parts, reduction)  # noqa: E731
            return self._on_kit("reduce_scatter", call, [output, *parts], opts, parts)
        return self._on_child(output, lambda child: child.reduce_scatter(outputs, inputs, opts))

    # ---- moves -----------------------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.BroadcastOptions)
        (tensor,) = _one(tensors, "broadcast")
        if (served := self._served("broadcast", tensor)) is not None:
            return self._on_kit("broadcast", lambda: served.broadcast(kit.flat(tensor), opts.rootRank), tensors, opts)
        return self._on_child(tensor, lambda child: child.broadcast(tensors, opts))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = options(opts, c10d.AllgatherOptions)
        if (served := self._served("all_gather_single", input)) is not None:
            call = lambda: served.all_gather_into_tensor(output, input)  # noqa: E731
            return self._on_kit("all_gather_single", call, [output, input], opts, [input])
        return self._on_child(input, lambda child: child._allgather_base(output, input, opts))

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._spanned("all_gather_single", inputs, lambda: JointWork([self.all_gather_single(*pair, opts) for pair in pairs]))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.AllgatherOptions)
        (input,), (parts,) = _one(inputs, "all_gather"), _one(outputs, "all_gather")
        if (served := self._served("all_gather", input)) is not None:
            return self._on_kit("all_gather", lambda: kit.all_gather(served, parts, input), [*parts, input], opts, [input])
        return self._on_child(input, lambda child: child.allgather(outputs, inputs, opts))

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self._spanned("all_gather", inputs, lambda: JointWork([self.allgather([list(own)], [input], opts) for own, input in pairs]))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.GatherOptions)
        (input,) = _one(inputs, "gather")
        if (served := self._served("gather", input)) is not None:
            call = lambda: _gather(served, outputs, input, opts.rootRank)  # noqa: E731
            return self._on_kit("gather", call, [*itertools.chain(*outputs), input], opts, [input])
        return self._on_child(input, lambda child: child.gather(outputs, inputs, opts))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        opts = options(opts, c10d.ScatterOptions)
        (output,) = _one(outputs, "scatter")
        if (served := self._served("scatter", output)) is not None:
            call = lambda: _scatter(served, output, inputs, opts.rootRank)  # noqa: E731
            return self._on_kit("scatter", call, [output, *itertools.chain(*inputs)], opts, list(itertools.chain(*inputs)))
        return self._on_child(output, lambda child: child.scatter(outputs, inputs, opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        opts = options(opts, c10d.AllToAllOptions)
        if (served := self._served("all_to_all_single", input)) is not None:
            splits = (list(output_splits) or None, list(input_splits) or None)
            call = lambda: served.all_to_all_single(output, input, *splits)  # noqa: E731
            return self._on_kit("all_to_all_single", call, [output, input], opts, [input])
        return self._on_child(input, lambda child: child.alltoall_base(output, input, list(output_splits), list(input_splits), opts))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        opts = options(opts, c10d.AllToAllOptions)
        if (served := self._served("all_to_all", inputs[0])) is not None:
            splits = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
            fill = lambda whole: served.all_to_all_single(whole, kit.joined(inputs), *splits)  # noqa: E731
            return self._on_kit("all_to_all", lambda: kit.fill_parts(outputs, fill), [*outputs, *inputs], opts, inputs)
        return self._on_child(inputs[0], lambda child: child.alltoall(outputs, inputs, opts))

    # The names of PyTorch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- point to point --------------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Work:
        if (messenger := self._messenger(tensors[0].device)) is not None:
            return self._message_on_kit(messenger, "send", tensors, dst, tag)
        return self._message_of_child("send", tensors, lambda child: child.send(tensors, dst, tag), NOT_SHARED)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Work:
        if (messenger := self._messenger(tensors[0].device)) is not None:
            return self._message_on_kit(messenger, "recv", tensors, src, tag)
        return self._message_of_child("recv", tensors, lambda child: child.recv(tensors, src, tag), NOT_SHARED)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        return self._message_of_child("recv", tensors, lambda child: child.recv_anysource(tensors, tag), ANY_SOURCE)

    # Messages run outside of the chain of collectives: one may wait for a peer that has collectives to do first.

    def _message_on_kit(self, messenger: RoutedGroup, operation: str, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        (tensor,) = _one(tensors, operation)
        count(operation, tensor.device.type, "kit")
        batch = self._batch_of_call()
        try:
            elements = kit.flat(tensor)
        except UsageError:
            self._batch = None
            raise
        rank = peer if messenger is self else self._ranks[peer]
        transfer = Transfer(elements.data_ptr(), elements.nbytes, rank, operation == "recv", f"{self.common_name} {tag}")
        if batch is None:
            return self._noted(self._spanned(operation, tensors, lambda: messenger._start_messages([transfer], tensors)))
        batch.transfers.append(transfer)
        batch.tensors.append(tensor)
        if len(batch.transfers) == len(batch.operations):
            self._batch = None
            batch.joint.works.append(messenger._start_messages(batch.transfers, batch.tensors))
        return batch.joint

    def _message_of_child(self, operation: str, tensors: list[torch.Tensor], issue: Callable[[Any], Work], reason: str) -> Work:
        (tensor,) = _one(tensors, operation)
        child = self._child(tensor.device)
        offered = tensor.device.type == self._provider.device_type
        count(operation, tensor.device.type, LIBRARIES[tensor.device.type], reason if offered else "")
        batch = self._batch_of_call() if child.supports_coalescing else None
        if batch is None:
            return self._noted(issue(child))
        if batch.issued == 0:
            child._start_coalescing()
        try:
            issue(child)
        except BaseException:
            self._batch = None
            with contextlib.suppress(Exception):
                child._end_coalescing()
            raise
        batch.issued += 1
        if batch.issued == len(batch.operations):
            self._batch = None
            batch.joint.works.append(child._end_coalescing())
        return batch.joint

    def _batch_of_call(self) -> _Batch | None:
        """Returns the batch that the caller's message belongs to; None for a message of its own, or one that is coalesced otherwise."""
        operations = _calling_batch() if self._coalescing is None else None
        if operations is not None and (self._batch is None or self._batch.operations is not operations):
            self._batch = _Batch(operations)
        return None if operations is None else self._batch


def create_group(options: Any, device: torch.device | None) -> PeerlaneGroup:
    """Creates the group, bound to ``device`` if that is given; torch.distributed calls this on every rank of a new group."""
    group = PeerlaneGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name=options.group_id,
        ranks=list(options.global_ranks_in_group),
    )
    if device is not None:
        group.bound_device_id = device
    return group


def _one(items: Sequence[Any], operation: str) -> Sequence[Any]:
    """Returns the only one of ``items``: a process has one GPU of a group."""
    if isinstance(items, torch.Tensor):
        raise UsageError(f"{operation} got a tensor: expected a list of one, and options; torch.distributed's functions make them")
    if len(items) != 1:
        raise UsageError(f"{operation} of {len(items)} tensors at once; pass one, or use a coalesced operation")
    return items


def _like(options: Any, other: Any) -> Any:
    """Returns ``options`` with the reduction, the timeout and the kind of call of ``other``."""
    for name in ("reduceOp", "timeout", "asyncOp"):
        setattr(options, name, getattr(other, name))
    return options


def _gather(served: Collectives, outputs: Sequence[Sequence[torch.Tensor]], input: torch.Tensor, dst: int) -> None:
    if outputs:
        kit.fill_parts(outputs[0], lambda whole: served.gather(input.contiguous(), whole, dst))
    else:
        served.gather(input.contiguous(), None, dst)


def _scatter(served: Collectives, output: torch.Tensor, inputs: Sequence[Sequence[torch.Tensor]], src: int) -> None:
    kit.fill_parts([output], lambda whole: served.scatter(whole, kit.joined(inputs[0]) if inputs else None, src))


def _calling_batch() -> Sequence[Any] | None:
    """Returns the operations of the ``batch_isend_irecv`` that this call comes from, or None.

    PyTorch tells a group written in Python nothing about batches, and NCCL deadlocks if it gets their messages one by one.
    """
    frame = inspect.currentframe()
    for _ in range(8):
        if frame is None:
            return None
        if frame.f_code is _BATCH_CODE:
            operations: Sequence[Any] = frame.f_locals["p2p_op_list"]
            return operations
        frame = frame.f_back
    return None


_BATCH_CODE = inspect.unwrap(dist.batch_isend_irecv).__code__
