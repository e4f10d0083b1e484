"""torch.distributed's collectives on the kit: one kernel a call, on the current stream, in eager mode and in CUDA graphs.

    group = Communicator()                      collective; one arena for all operations
    group.all_reduce(tensor)                    in place, or into another tensor
    group.all_gather_into_tensor(output, input)

Every method is called by all ranks of the group, in the same order, on streams that are ordered alike. Sums are taken in rank order in fp32
(of integers: in integers, which wrap around) and rounded once; all ranks get the same bits. Roots are numbers within the group. Other
reductions are in ``reductions.py``. Which kernel serves which size is in ``plans.py``, who sends what to whom in ``messages.py``, the
kernels in ``kernels.py``.
"""

import copy
import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from peerlane.device.collectives import messages as message_tables
from peerlane.device.collectives import plans
from peerlane.device.collectives.checks import part_bytes, require_contiguous, require_fit, require_part, require_parts, require_root
from peerlane.device.collectives.kernels import kernel_source
from peerlane.device.collectives.messages import Member
from peerlane.device.collectives.plans import Machine, Plan
from peerlane.device.collectives.reductions import SUM, Reduction, fills_packets
from peerlane.device.collectives.workspace import RINGS, Messages, Rings, Workspace, staged_bytes, workspace_bytes
from peerlane.device.host.arena import Arena
from peerlane.device.host.group import DeviceKernel, DeviceLaunch, Group, per_group
from peerlane.device.host.group_of import group_of
from peerlane.device.host.launch import excuse
from peerlane.errors import UsageError

# Places of the arguments that change from call to call.
_MESSAGES, _IN, _OUT = 2, 3, 4
_MOST_LAUNCHES = 1024
"""Sizes that are kept at a time: then all are forgotten, for sizes that do not come again would fill any memory."""


class Communicator:
    """The collectives of one group of 2 to 8 ranks of one node, on the current device. Creating one is collective.

    Tensors are contiguous, on that device and of any shape. Reductions take bfloat16, float16, float32, both float8 types and integers;
    moves take any dtype. Other tensors, sizes that do not fit, and roots outside the group raise UsageError. The first call of each shape
    compiles and loads; do that before a graph is captured. A wait of more than ``timeout_s`` (default: the group's limit) ends in
    DeviceTimeout, which says who waited for whom. ``rings`` is for tuning, the same on all ranks.
    """

    def __init__(self, group: Group | dist.ProcessGroup | None = None, *, timeout_s: float | None = None, rings: Rings = RINGS) -> None:
        self._serves_backend = False
        self.group = group_of(group)
        sm_count = self.group.waiting_blocks
        rings = replace(rings, blocks=min(rings.blocks, sm_count))  # no grid is larger
        self.arena = Arena(workspace_bytes(self.group.world_size, rings), self.group, timeout_s=timeout_s, name="collectives")
        self.workspace = Workspace.take(self.arena, self.group.world_size, rings)
        self.arena.seal()
        self.member = Member(self.arena.rank, self.arena.world_size)
        self.machine = Machine(self.arena.world_size, sm_count, rings)
        self._launches: dict[Hashable, DeviceLaunch] = {}
        self._kernels: dict[tuple[str, torch.dtype, str], DeviceKernel] = {}
        self._timeout_s = timeout_s
        self._stages: list[tuple[Arena, Workspace]] = []
        """The memory of staged all-reduces, once there are any."""

    def load(self, dtype: torch.dtype, most_bytes: int) -> None:
        """Collective: makes the kernels and memory of all-reduces, reduce-scatters, all-gathers and all-to-alls of up to so many bytes."""
        fits = fills_packets(dtype)
        if self.machine.staged_bytes and most_bytes > plans.STAGED_FROM_BYTES:
            self._stage()
        octaves = [1 << power for power in range(2, most_bytes.bit_length() + 1)]
        for nbytes in {size for octave in octaves for size in (octave, octave + 12, octave * 3 // 2)}:
            sums = (plan(nbytes, self.machine, packets_fit=fits) for plan in (plans.all_reduce, plans.reduce_scatter))
            for plan in (*sums, plans.exchange(nbytes, self.machine)):
                self._kernel(plan.kernel, dtype, SUM.name)

    def serving_backend(self) -> "Communicator":
        """Returns this communicator, with the same memory, for the backend. Closing that closes all that the group keeps."""
        other = copy.copy(self)
        other._serves_backend, other._launches, other._kernels = True, {}, {}
        return other

    @property
    def closed(self) -> bool:
        """Tells whether the memory was given back."""
        return self.arena.closed

    def close(self) -> None:
        """Gives the memory back, once all ranks have finished all calls."""
        self._launches.clear()
        if self._serves_backend:
            self.group.close()
            return
        for arena, _ in self._stages:
            arena.close()
        self._stages.clear()
        self.arena.close()

    # ---- sums ------------------------------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, output: torch.Tensor | None = None, reduction: Reduction = SUM) -> None:
        """Writes the sum, or another reduction, of all ranks' tensors to ``output`` (default: in place)."""
        output = tensor if output is None else output
        self._same_size(output, tensor, 1, 1)
        nbytes, packets_fit = tensor.nbytes, fills_packets(tensor.dtype)
        self._run(
            ("all_reduce", nbytes, tensor.dtype, reduction),
            tensor,
            output,
            lambda: (plans.all_reduce(nbytes, self.machine, packets_fit=packets_fit), Messages(), 0),
            reduction,
        )

    def reduce(self, tensor: torch.Tensor, dst: int, output: torch.Tensor | None = None, reduction: Reduction = SUM) -> None:
        """Writes the reduction of all ranks' tensors to ``output`` on rank ``dst``; elsewhere ``output`` gets the rank's own tensor."""
        output = tensor if output is None else output
        self._same_size(output, tensor, 1, 1)
        require_root(dst, self.machine.world_size)
        nbytes, packets_fit = tensor.nbytes, fills_packets(tensor.dtype)
        self._run(
            ("reduce", nbytes, tensor.dtype, dst, reduction),
            tensor,
            output,
            lambda: (plans.reduce(nbytes, self.machine, packets_fit=packets_fit), message_tables.reduce(self.member, nbytes, dst), dst),
            reduction,
        )

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction = SUM) -> None:
        """Writes the reduction of all ranks' parts number r, of W equal ones in ``input``, to rank r's ``output``."""
        self._same_size(output, input, self.machine.world_size, 1)
        shard, packets_fit = output.nbytes, fills_packets(input.dtype)
        self._run(
            ("reduce_scatter", shard, input.dtype, reduction),
            input,
            output,
            lambda: (
                plans.reduce_scatter(shard, self.machine, packets_fit=packets_fit),
                message_tables.reduce_scatter(self.member, shard),
                0,
            ),
            reduction,
        )

    # ---- moves -----------------------------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int, output: torch.Tensor | None = None) -> None:
        """Writes rank ``src``'s tensor to ``output`` on every rank (default: in place). Other ranks' ``tensor`` is not read."""
        output = tensor if output is None else output
        self._same_size(output, tensor, 1, 1)
        require_root(src, self.machine.world_size)
        nbytes = tensor.nbytes
        self._run(
            ("broadcast", nbytes, src),
            tensor,
            output,
            lambda: (plans.broadcast(nbytes, self.machine), message_tables.broadcast(self.member, nbytes, src), src),
        )

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Writes every rank's ``input``, in rank order, to ``output`` on every rank. ``input`` may be its own place in ``output``."""
        self._same_size(output, input, 1, self.machine.world_size)
        shard = input.nbytes
        self._run(
            ("all_gather", shard),
            input,
            output,
            lambda: (plans.exchange(shard, self.machine), message_tables.all_gather(self.member, shard), 0),
        )

    def all_gather(self, input: torch.Tensor) -> torch.Tensor:
        """Returns every rank's ``input``, in rank order: (W, *shape)."""
        output = input.new_empty((self.machine.world_size, *input.shape))
        self.all_gather_into_tensor(output, input.contiguous())
        return output

    def gather(self, tensor: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        """Writes every rank's ``tensor``, in rank order, to ``output`` on rank ``dst``; elsewhere ``output`` is None."""
        require_root(dst, self.machine.world_size)
        shard = tensor.nbytes
        if self.member.rank == dst:
            output = require_parts(output, "gathers", dst, self.machine.world_size)
            self._same_size(output, tensor, 1, self.machine.world_size)
        else:
            output = None
        self._run(
            ("gather", shard, dst),
            tensor,
            output,
            lambda: (plans.rooted_exchange(shard, self.machine), message_tables.gather(self.member, shard, dst), dst),
        )

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> None:
        """Writes part r of rank ``src``'s ``input``, of W equal ones, to rank r's ``output``. Elsewhere ``input`` is None."""
        require_root(src, self.machine.world_size)
        shard = output.nbytes
        if self.member.rank == src:
            input = require_parts(input, "scatters", src, self.machine.world_size)
            self._same_size(output, input, self.machine.world_size, 1)
        else:
            input = None
        self._run(
            ("scatter", shard, src),
            input,
            output,
            lambda: (plans.rooted_exchange(shard, self.machine), message_tables.scatter(self.member, shard, src), src),
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        """Sends part q of ``input`` to rank q, where it becomes part r of ``output``. Parts are rows of axis 0: equal, or as the splits
        say.

        With splits on one rank there are splits on all; what rank r sends to q is what q expects from r. Zero rows are a part too.
        """
        if output_split_sizes is None and input_split_sizes is None:
            self._same_size(output, input, 1, 1)
            part = part_bytes(input, None, self.machine.world_size)[0]
            self._run(
                ("all_to_all", part),
                input,
                output,
                lambda: (plans.exchange(part, self.machine), message_tables.all_to_all(*[[part] * self.machine.world_size] * 2), 0),
            )
            return
        sides = ((input, input_split_sizes), (output, output_split_sizes))
        table = message_tables.all_to_all(*(part_bytes(*side, self.machine.world_size) for side in sides))
        self._uneven(output, input, table)

    def exchange(
        self, output: torch.Tensor, input: torch.Tensor, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]]
    ) -> None:
        """Moves parts of any length: ``sends[q]`` is where in ``input`` the bytes for rank q begin and how many they are, ``receives[q]``
        where in ``output`` those of rank q go. Rank r sends to q as many bytes as q expects from r; parts may overlap in ``input``."""
        for tensor, parts in ((input, sends), (output, receives)):
            if len(parts) != self.machine.world_size or any(at < 0 or size < 0 or at + size > tensor.nbytes for at, size in parts):
                raise UsageError(f"parts {list(parts)} of {tensor.nbytes} bytes; expected {self.machine.world_size} parts inside them")
        self._uneven(output, input, message_tables.parts(sends, receives))

    def _uneven(self, output: torch.Tensor, input: torch.Tensor, table: Messages) -> None:
        with self.group.lock:
            launch = self._launch(("uneven_all_to_all",), input, lambda: (plans.uneven_exchange(self.machine), Messages(), 0))
            self._start_table(launch, table, input, output)

    # ---- unequal parts whose sizes all ranks know --------------------------------------------------------------------------------------

    def all_gather_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int]) -> None:
        """Writes every rank's ``input``, in rank order, to ``output``: rank q's has ``sizes[q]`` rows, of axis 0 of ``output``."""
        parts = self._parts(output, input, sizes)
        if (most := max(parts)) != 0:
            table = message_tables.all_gather_parts(self.member, parts)
            self._by_table(("all_gather", sum(parts), *sizes), plans.exchange(most, self.machine), table, input, output)

    def reduce_scatter_parts(self, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], reduction: Reduction = SUM) -> None:
        """Writes the reduction of all ranks' part number r to rank r's ``output``: ``sizes[r]`` rows of ``input``, parts in rank order."""
        parts, packets_fit = self._parts(input, output, sizes), fills_packets(input.dtype)
        if (most := max(parts)) != 0:
            plan = plans.reduce_scatter(most, self.machine, packets_fit=packets_fit)
            table = message_tables.reduce_scatter_parts(self.member, parts)
            self._by_table(("reduce_scatter", sum(parts), *sizes), plan, table, input, output, reduction)

    def _parts(self, whole: torch.Tensor, own: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Returns the bytes of each rank's part of ``whole``. Raises UsageError unless ``own`` has the size of this rank's."""
        parts = part_bytes(whole, sizes, self.machine.world_size)
        require_part(own, whole, sizes[self.member.rank])
        self._same_size(whole, whole, 1, 1)
        return parts

    def _by_table(
        self, call: tuple[Any, ...], plan: Plan, table: Messages, source: torch.Tensor, target: torch.Tensor, reduction: Reduction = SUM
    ) -> None:
        """Launches the kernel of a plan, kept once for all sizes with this plan, with messages of its own. All ranks make this ``call``."""
        with self.group.lock:
            self.group.announce(call)
            launch = self._launch(("parts", plan, source.dtype, reduction), source, lambda: (plan, Messages(), 0), reduction)
            self._start_table(launch, table, source, target)

    # ---- launches --------------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        key: tuple[Any, ...],
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        make: Callable[[], tuple[Plan, Messages, int]],
        reduction: Reduction = SUM,
    ) -> None:
        """Launches what ``make`` plans, once per ``key``: the operation, its bytes, and what else all ranks agree on.

        Nothing to move on one rank means nothing to move on any."""
        shape = source if source is not None else target
        if shape is None or shape.nbytes == 0:
            return
        with self.group.lock:
            self.group.announce(key)
            self._start(self._launch(key, shape, make, reduction), source, target)

    def _launch(
        self, key: Hashable, tensor: torch.Tensor, make: Callable[[], tuple[Plan, Messages, int]], reduction: Reduction = SUM
    ) -> DeviceLaunch:
        launch = self._launches.get(key)
        if launch is None:
            plan, messages, root = make()
            pointers = (ctypes.c_void_p(), ctypes.c_void_p())
            arena, shared = self._stage() if plan.kernel == plans.STAGED else (self.arena, self.workspace)
            workspace = Workspace.from_buffer_copy(shared)
            workspace.factor = reduction.factor
            args = (arena.view, workspace, messages, *pointers, ctypes.c_uint64(tensor.nbytes), ctypes.c_int(root))
            launch = self._kernel(plan.kernel, tensor.dtype, reduction.name).bind(
                plan.grid, plan.block, args, shared_bytes=plan.shared_bytes
            )
            if len(self._launches) == _MOST_LAUNCHES:
                self._launches.clear()
            self._launches[key] = launch
        return launch

    def _kernel(self, name: str, dtype: torch.dtype, reduction: str) -> DeviceKernel:
        """The kernel, found and loaded once however many sizes it serves."""
        if (name, dtype, reduction) not in self._kernels:
            source, defines = kernel_source(name, self.machine.world_size, dtype, self.machine.rings, reduction)
            kernel = self._kernels[name, dtype, reduction] = self.group.kernel(
                source, name, defines=defines, on_failure=self.arena.raise_fault
            )
            if self._serves_backend:
                excuse(kernel)
        return self._kernels[name, dtype, reduction]

    def _stage(self) -> tuple[Arena, Workspace]:
        """Collective at first: the arena of staged all-reduces."""
        if not self._stages:
            world_size, most, blocks = self.machine.world_size, self.machine.staged_bytes, self.machine.sm_count
            arena = Arena(staged_bytes(world_size, most, blocks), self.group, timeout_s=self._timeout_s, name="collectives")
            self._stages.append((arena, Workspace.take_staged(arena, world_size, most, blocks)))
            arena.seal()
            arena.belong_to(self.arena)
        return self._stages[0]

    def _start(self, launch: DeviceLaunch, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        require_contiguous(source, target)
        for place, tensor in ((_IN, source), (_OUT, target)):
            launch.args[place].value = None if tensor is None else self.group.address(tensor)
        launch()

    def _start_table(self, launch: DeviceLaunch, table: Messages, source: torch.Tensor, target: torch.Tensor) -> None:
        ctypes.memmove(ctypes.addressof(launch.args[_MESSAGES]), ctypes.addressof(table), ctypes.sizeof(table))
        self._start(launch, source, target)

    def _same_size(self, output: torch.Tensor, input: torch.Tensor, outputs: int, inputs: int) -> None:
        require_fit(output, input, outputs, inputs)
        if input.device != self.arena.device:
            raise UsageError(f"tensors on {input.device}; this communicator works on {self.arena.device}: move them, or make one there")


def communicator(group: Group | dist.ProcessGroup | None = None) -> Communicator:
    """Returns the one communicator of ``group`` (default: all ranks) in this process, made by the first call, which is collective."""
    return _communicator(group_of(group))


_communicator = per_group(Communicator)
