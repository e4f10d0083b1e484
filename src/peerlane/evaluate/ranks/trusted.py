"""The trusted rank: generates inputs, knows the oracle, judges outputs, times the reference. Candidate code never runs here.

Inputs are generated into private memory (staging) and copied to the shared arena just before the candidate may use them (publish). Every
:meth:`TrustedInterface.generate_inputs` draws new contents from the run's secret, which only trusted ranks hold. Several cases may be open
at a time, each in a space of its own.

Nothing that a candidate can map ever holds an answer before the candidate has given its own: the oracle and the reference work in this
process's private memory, and an arena is cleared before it is handed out.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from peerlane.evaluate import wire
from peerlane.evaluate.correctness.jitter import compile_sm_holder, keep_busy
from peerlane.evaluate.correctness.judge import changed_names, compare_arguments, judge_output
from peerlane.evaluate.memory.arena import POISON, aligned, view
from peerlane.evaluate.memory.layouts import Inputs, Layouts, find_layouts
from peerlane.evaluate.rank_interface import TrustedInterface
from peerlane.evaluate.ranks.case_state import OpenCase, Snapshot
from peerlane.evaluate.ranks.rank import Rank
from peerlane.evaluate.ranks.timed_block import copies_time
from peerlane.problems.contract.judge import digests, expected_leaves, same_bits, type_mismatch
from peerlane.problems.contract.tree import Description, GroupRef, Tree, dtype_of, rebuild, resolve_groups, tensor_descriptions
from peerlane.results.sanitize import one_line

_GATHERED_BYTES = 64 << 20  # of a rank's inputs, that oracles get from it at a time


class TrustedRank(Rank, TrustedInterface):
    """Serves the requests of the supervisor: a case is opened, generated, published, timed, its outputs collected and judged."""

    def __init__(self, config: dict[str, Any], rank: int, memory_fd: int) -> None:
        super().__init__(config, rank, memory_fd)
        self._secret = ""
        self._open: dict[str, OpenCase] = {}
        self._layouts: dict[tuple[int, str, int, float], Layouts] = {}
        self._output_names: dict[str, list[str]] = {}
        """by case, in the order of the output's tensors, once an answer was judged"""

    def take_secret(self, secret: str) -> str:
        self._secret = secret
        return base64.b64encode(compile_sm_holder(self.device)).decode() if self.place.has_gpus else ""

    def opened(self, space: str) -> OpenCase:
        current = self._open.get(space)
        if current is None:
            raise RuntimeError(f"no case is open in {space}: expected open_case first")
        return current

    def open_case(self, space: str, case_id: wire.CaseId, slots: int, most_bytes: float, alone: bool) -> wire.OpenedCase:
        for closed in [*reversed(self._open)] if alone else [space]:
            self.close_case(closed)
        problem, case = self.case_of(case_id)
        groups = self.groups(problem.process_groups(case))
        inputs = Inputs(problem, case, self.rank, self._secret, self.device)
        key = problem.id, case.key, slots, most_bytes
        if key not in self._layouts:
            self._layouts = {cached: layouts for cached, layouts in self._layouts.items() if cached[0] == problem.id}
            self._layouts[key] = find_layouts(inputs, slots, most_bytes, groups)
        current = self._open[space] = OpenCase(inputs, self._layouts[key], groups, self.memory_fd)
        self.freeze_objects()
        layout = wire.CaseLayout(
            arena=current.arena.handle,
            arguments=current.layouts[self.rank],
            outputs=current.output_layout,
            input_bytes=current.input_bytes,
            output_bytes=current.output_bytes,
            groups={name: [list(members) for members in groups_] for name, groups_ in problem.process_groups(case).items()},
        )
        return wire.OpenedCase(layout, self._layouts[key].reference_s, self._layouts[key].quickest_s)

    def close_case(self, space: str) -> None:
        if (current := self._open.pop(space, None)) is not None:
            self.block = None
            current.arena.close()
        self.give_back()

    def generate_inputs(self, space: str, block: int, kinds: list[str]) -> None:
        self.opened(space).generate(block, kinds)
        self.synchronize()

    def publish_inputs(self, space: str, slots: int) -> None:
        current = self.opened(space)
        end = current.private.end(slots)
        current.arena.data[:end].copy_(current.staging[:end])
        current.outputs.fill_(POISON)
        current.guards.paint()
        self.synchronize()

    def prepare_block(self, space: str, mode: wire.LaunchMode, side: wire.Side, plan: wire.BlockPlan) -> str | None:
        current = self.opened(space)
        return self.build_block(mode, plan, current.reference, current.private, current.private_outputs)

    def undo_swaps(self, space: str) -> None:
        private = self.opened(space).private
        for _, slot, other in reversed(self.prepared.plan.swaps):
            private.swapper(slot, other)()
        self.synchronize()

    def time_copies(self, space: str) -> wire.CopiesTime:
        return wire.CopiesTime(*copies_time(self.prepared, lambda: self.undo_swaps(space)))

    def keep_device_busy(self, seconds: float) -> None:
        """Keeps the device busy, as declared. Only the rank that shares its GPU gets more than 0."""
        keep_busy(seconds)

    def collect_outputs(self, space: str, slots: list[int], contents: list[int], outputs: wire.Outputs, intact: list[int]) -> int:
        current = self.opened(space)
        for slot, source, described in zip(slots, contents, outputs, strict=True):
            current.collect(slot, source, described)
            if slot in intact:
                current.changes += _changes(current, source, slot)
        self.synchronize()
        return sum(snapshot.nbytes for snapshot in current.snapshots)

    def discard_outputs(self, space: str) -> None:
        current = self.opened(space)
        current.snapshots.clear()
        current.changes.clear()

    def save_output(self, space: str, slot: int) -> None:
        current = self.opened(space)
        current.saved = slot, current.taken(slot)
        self.synchronize()

    def compare_output(self, space: str) -> wire.OutputComparison:
        current = self.opened(space)
        (slot, first), current.saved = current.saved, (0, [])
        pairs = enumerate(zip(first, current.taken(slot), strict=True))
        changed = next((number for number, (before, after) in pairs if before.numel() and not same_bits(before, after)), None)
        return wire.OutputComparison(changed, _out_of_bounds(current))

    def judge_outputs(self, space: str, at_rest: bool, judges: list[int]) -> wire.Judgement:
        current = self.opened(space)
        snapshots, current.snapshots = current.snapshots, []
        changes, current.changes = current.changes, []
        if at_rest:
            changes += [change for slot in range(len(current.kinds)) for change in _changes(current, slot, slot)]
        return wire.Judgement(
            slots=[*self._judge_all(current, snapshots, judges or [None] * len(snapshots))],
            changed_arguments=changed_names(changes),
            out_of_bounds=_out_of_bounds(current) if at_rest else None,
        )

    def _judge_all(self, current: OpenCase, snapshots: list[Snapshot], judges: Sequence[int | None]) -> Iterator[wire.SlotScore]:
        """Judges one snapshot after the other. Where ranks share a GPU, they take turns with large ones: an answer takes many times its
        size in float64, and ranks that compute at once gain nothing. ``judges``: the only rank that compares a snapshot; None: all do."""
        large = current.slot_bytes > _GATHERED_BYTES
        widths = [aligned(max(1, *(span.stop - span.start for span in current.spans(snapshot.source)))) for snapshot in snapshots]
        begin = 0
        while begin < len(snapshots):
            if large and self.shares_gpu:
                yield self._judge_in_turn(current, snapshots[begin], widths[begin], judges[begin])
                begin += 1
                continue
            end, offsets = begin, [0]
            while end < len(snapshots) and (end == begin or offsets[-1] + widths[end] <= _GATHERED_BYTES):
                offsets.append(offsets[-1] + widths[end])
                end += 1
            waiting = iter(zip(snapshots[begin:end], judges[begin:end], strict=True))
            for inputs in self._all_inputs(current, snapshots[begin:end], offsets):
                snapshot, judge = next(waiting)
                yield self._judge(current, snapshot, inputs) if judge in (None, self.rank) else self._not_judged(current, snapshot)
                snapshot.tensors.clear()
                del inputs  # before those of the next slot are gathered
                if large:
                    self.give_back()
            begin = end

    def _judge_in_turn(self, current: OpenCase, snapshot: Snapshot, width: int, judge: int | None = None) -> wire.SlotScore:
        """Judges a snapshot while the other ranks wait: one of them at a time holds the inputs of all. With a ``judge`` no other does."""
        own, score = _padded(snapshot.inputs, width), None
        if judge not in (None, self.rank):
            score = self._not_judged(current, snapshot)
            snapshot.tensors.clear()
        for reader in range(self.world_size) if judge is None else [judge]:
            everyone = own.new_empty((self.world_size, width)) if reader == self.rank else None
            dist.gather(own, None if everyone is None else [*everyone], dst=reader)
            if everyone is not None:
                score = self._judge(current, snapshot, self._arguments_of_all(current, snapshot, [*everyone]))
                snapshot.tensors.clear()
                del everyone
                self.give_back()
            self.meet()  # an oracle may take longer than a collective waits
        assert score is not None, "every rank has its turn"
        return score

    def _not_judged(self, current: OpenCase, snapshot: Snapshot) -> wire.SlotScore:
        """The score of an answer that is compared on another rank. What must be the same on all ranks is compared all the same."""
        names = self._output_names[current.case.key] if current.problem.replicated else []
        alike = [(name, tensor) for name, tensor in zip(names, snapshot.tensors, strict=False) if current.problem.is_replicated(name)]
        sums = digests([tensor for _, tensor in alike])
        return wire.SlotScore(snapshot.slot, digests=tuple(zip([name for name, _ in alike], sums, strict=True)))

    def _judge(self, current: OpenCase, snapshot: Snapshot, inputs: list[tuple[Any, ...]]) -> wire.SlotScore:
        problem, case, slot = current.problem, current.case, snapshot.slot
        expected = problem.oracle(case, inputs, self.rank)
        if (reason := _claimed_mismatch(snapshot.described, expected, self.device)) is not None:
            return wire.SlotScore(slot, mismatch=reason)
        self._output_names[case.key] = [leaf.name for leaf in expected_leaves(expected)]
        got = rebuild(current.output_layout[slot], iter(snapshot.tensors), current.groups.__getitem__)
        if (mismatch := type_mismatch(got, expected)) is not None:
            raise RuntimeError(f"{case.key}: the reference and the oracle disagree about the output's type: {mismatch}")
        judged = judge_output(problem, case, got, expected, snapshot.kind)
        worst = judged.worst
        return wire.SlotScore(
            slot=slot,
            ratio=worst.ratio,
            output=worst.output,
            detail=worst.detail,
            index=worst.index,
            got=worst.got,
            want=worst.want,
            digests=judged.digests if problem.replicated else (),
        )

    def _all_inputs(self, current: OpenCase, snapshots: list[Snapshot], offsets: list[int]) -> Iterator[list[tuple[Any, ...]]]:
        """Yields for each snapshot the call's arguments on every rank, for the oracle; process groups stay references by name.
        ``offsets``: where each snapshot's inputs lie in what is gathered from a rank, and behind them its size."""
        if len(snapshots) == 1:
            own = _padded(snapshots[0].inputs, offsets[-1])
        else:
            own = torch.empty(offsets[-1], dtype=torch.uint8, device=self.device)
            for snapshot, offset in zip(snapshots, offsets, strict=False):
                own[offset : offset + snapshot.inputs.numel()] = snapshot.inputs
        everyone = own.new_empty(self.world_size * own.numel())
        dist.all_gather_into_tensor(everyone, own)
        del own
        for snapshot, offset in zip(snapshots, offsets, strict=False):
            yield self._arguments_of_all(current, snapshot, [data[offset:] for data in everyone.chunk(self.world_size)])

    def _arguments_of_all(self, current: OpenCase, snapshot: Snapshot, gathered: list[torch.Tensor]) -> list[tuple[Any, ...]]:
        """The arguments of a snapshot's call on every rank, whose bytes are ``gathered``."""
        layouts = zip(current.layouts, gathered, current.spans(snapshot.source), strict=True)
        return [self._arguments(layout[snapshot.source], data, span.start) for layout, data, span in layouts]

    @staticmethod
    def _arguments(layout: Description, data: torch.Tensor, start: int) -> tuple[Any, ...]:
        """The arguments of one call; ``data`` begins with what lies at ``start`` in the rank's memory."""
        tensors = [view(data, {**placed, "offset": placed["offset"] - start}) for placed in tensor_descriptions(layout)]
        return tuple(rebuild(layout, iter(tensors), GroupRef))

    def measure_margins(self, case_id: wire.CaseId) -> dict[str, Any]:
        from peerlane.problems.contract.calibration import margins  # brings Triton along, which ranks that time things are better without

        problem, case = self.case_of(case_id)
        groups = self.groups(problem.process_groups(case))

        def resolve(tree: Tree) -> Tree:
            return resolve_groups(tree, groups.__getitem__)

        result = margins(problem, case, self.rank, secret=self._secret, resolve=resolve, device=self.device)
        if self.place.has_gpus:
            torch.cuda.empty_cache()
        return asdict(result)


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    """The bytes, and so many more that ``size`` of them can be sent; not copied if there are enough."""
    if data.numel() == size:
        return data
    longer = data.new_empty(size)
    longer[: data.numel()] = data
    return longer


def _changes(current: OpenCase, source: int, slot: int) -> list[tuple[str, torch.Tensor]]:
    """The parameters that a call may not change, and whether ``slot`` does not hold in the arena what was generated for ``source``."""
    return compare_arguments(current.problem, current.private.args[source], current.public.args[slot])


def _out_of_bounds(current: OpenCase) -> wire.OutOfBounds | None:
    """Returns the place of a write that belongs to no tensor, if there was one."""
    if (violation := current.guards.out_of_bounds()) is None:
        return None
    region, distance = violation
    place = f"{distance} bytes behind its end" if distance >= 0 else f"{-distance} bytes before its begin"
    return wire.OutOfBounds(region.slot, region.name, place)


def _claimed_mismatch(described: Any, expected: Tree, device: torch.device) -> str | None:
    """Returns how a description by a candidate's rank, which says what it likes, differs in structure, shapes, dtypes or devices."""
    try:
        if (other := next(_others(described), None)) is not None:
            return one_line(f"output holds a {other}, expected a plain tensor on the rank's device")
        tensors = list(tensor_descriptions(described))
        claimed = rebuild(described, iter([torch.empty(d["shape"], dtype=dtype_of(d["dtype"]), device="meta") for d in tensors]), str)
        if (reason := type_mismatch(claimed, expected)) is not None:
            return one_line(reason)
        for leaf, tensor in zip(expected_leaves(expected), tensors, strict=True):
            if device.type != "cpu" and bool(tensor.get("host")) != leaf.host:
                places = ("on the rank's device", "in host memory")
                return f"{leaf.name}: got a tensor {places[not leaf.host]}, expected it {places[leaf.host]}"
    except Exception as error:
        return one_line(f"the output's description is not valid: {type(error).__name__}: {error}")
    return None


def _others(described: Description) -> Any:
    if described["kind"] == "other":
        yield described["type"]
    for item in described.get("items", ()):
        yield from _others(item)
